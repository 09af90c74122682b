"""Kernels of what lies between a decoder's products on a CPU, in float32, built by the machine's compiler.

    rms_norm    x / sqrt(mean(x^2) + eps) * weight                                  rows [T, W]
    rotary      norm of each head, if any, and rotation of its halves by position   heads [T, S, D]
    swiglu      silu(gate) * up                                                     rows [T, 2 M]
    store       keys and values of tokens to their rows of a cache
    attend      causal attention of tokens over their own rows, without padding

In a model of under a million parameters, starting torch's operators and what they leave in between take more
time than the products. The sums' order differs from torch's, and nothing else: numbers agree to 1e-6.

The source is `cpu_kernels.c`. It is compiled in half a second, into `~/.cache/turnwise`. Threads are those of
torch's own pool. Sources: as `models.kernels`.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor

log = structlog.get_logger(__name__)

# NaN and infinity stay what they are, so `-ffast-math` is not among them.
_FLAGS = ["-O3", "-march=native", "-fPIC", "-fno-math-errno", "-fno-trapping-math"]
_FLAGS += ["-fassociative-math", "-fno-signed-zeros", "-freciprocal-math"]
# The numbers of a head at most, as in the source.
WIDEST_HEAD = 256


class CpuKernels:
    """The functions of a built library. Tensors are float32, and tokens have stride 1 within."""

    def __init__(self, path: Path) -> None:
        pointer, whole, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        library = ctypes.CDLL(str(path), mode=os.RTLD_NOW)
        self._norm, self._rotary, self._swiglu = library.rms_norm, library.rotary, library.swiglu
        self._store, self._attend = library.store, library.attend
        tables: Any = (
            (self._norm, [pointer, pointer, real, whole, whole, pointer, ctypes.c_int]),
            (
                self._rotary,
                [pointer, *[whole] * 5, pointer, pointer, real, *[pointer] * 4, ctypes.c_int],
            ),
            (self._swiglu, [pointer, whole, whole, pointer, ctypes.c_int]),
            (self._store, [pointer, whole, pointer, *[whole] * 6, *[pointer] * 4]),
            (
                self._attend,
                [pointer, whole, pointer, pointer, *[whole] * 6, pointer, pointer, real, pointer, pointer,
                 ctypes.c_int],
            ),
        )  # fmt: skip
        for function, kinds in tables:
            function.argtypes, function.restype = kinds, None

    def rms_norm(self, states_TW: Tensor, weight_W: Tensor, eps: float) -> Tensor:
        out_TW = torch.empty_like(states_TW)
        self._norm(
            states_TW.data_ptr(), weight_W.data_ptr(), eps, *states_TW.shape, out_TW.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return out_TW

    def rotary(
        self, heads_TSD: Tensor, norms: tuple[Tensor, Tensor] | None, cos: Tensor, sin: Tensor,
        positions_T: Tensor, *, keys: int, eps: float,
    ) -> Tensor:  # fmt: skip
        """The last `keys` heads are keys, the others queries; `cos` and `sin` are of all positions."""
        tokens, heads, size = heads_TSD.shape
        out_TSD = heads_TSD.new_empty((tokens, heads, size))
        by_query, by_key = (None, None) if norms is None else (norm.data_ptr() for norm in norms)
        self._rotary(
            heads_TSD.data_ptr(), heads_TSD.stride(0), tokens, heads, keys, size, by_query, by_key, eps,
            cos.data_ptr(), sin.data_ptr(), positions_T.data_ptr(), out_TSD.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return out_TSD

    def swiglu(self, gate_up_TM: Tensor) -> Tensor:
        tokens, width = len(gate_up_TM), gate_up_TM.shape[1] // 2
        out_TM = gate_up_TM.new_empty((tokens, width))
        self._swiglu(gate_up_TM.data_ptr(), tokens, width, out_TM.data_ptr(), torch.get_num_threads())
        return out_TM

    def store(
        self, k_TKD: Tensor, v_TKD: Tensor, cache: tuple[Tensor, Tensor], heads_TK: Tensor, columns_T: Tensor
    ) -> None:
        """Write tokens into keys and values of rows, [rows, heads, columns, D].

        `heads_TK` counts the heads of all rows.
        """
        keys, values = cache
        tokens, heads, size = k_TKD.shape
        self._store(
            k_TKD.data_ptr(), k_TKD.stride(0), v_TKD.data_ptr(), v_TKD.stride(0), tokens, heads, size,
            keys.shape[2], values.shape[2], heads_TK.data_ptr(), columns_T.data_ptr(), keys.data_ptr(),
            values.data_ptr(),
        )  # fmt: skip

    def attend(
        self, q_THD: Tensor, cache: tuple[Tensor, Tensor], heads_TK: Tensor, columns_T: Tensor, *,
        scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """[T, H, D] over each token's row up to its column, and [T, H] logarithms of sums of exponentials."""
        keys, values = cache
        tokens, heads, size = q_THD.shape
        out_THD = q_THD.new_empty((tokens, heads, size))
        lse_TH = q_THD.new_empty((tokens, heads))
        self._attend(
            q_THD.data_ptr(), q_THD.stride(0), keys.data_ptr(), values.data_ptr(), tokens, heads,
            heads_TK.shape[1], size, keys.shape[2], values.shape[2], heads_TK.data_ptr(),
            columns_T.data_ptr(), scale, out_THD.data_ptr(), lse_TH.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out_THD, lse_TH


def kernels_for(model: Any) -> CpuKernels | None:
    """The kernels, where they compute a model: on a CPU, in float32, with heads that are not too wide."""
    if model.device.type != "cpu" or model.dtype != torch.float32:
        return None
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return cpu_kernels() if size <= WIDEST_HEAD else None


@cache
def cpu_kernels() -> CpuKernels | None:
    """The kernels of this machine; None where there is no compiler for them, and the log says so."""
    compiler = shutil.which(os.environ.get("CC") or "cc")
    reason = "there is no C compiler (cc, or what CC names)"
    if compiler is not None:
        # Without OpenMP, each call is one thread's.
        for omp in (["-fopenmp"], []):
            try:
                return CpuKernels(_library(compiler, [*_FLAGS, *omp]))
            except (OSError, AttributeError, subprocess.SubprocessError) as error:
                reason = getattr(error, "stderr", None) or str(error)
    log.warning("cpu_kernels_not_built", reason=reason, cost="small models decode at half the speed")
    return None


def _library(compiler: str, flags: list[str]) -> Path:
    source = files("trainer_backend.models").joinpath("cpu_kernels.c").read_bytes()
    about = f"{compiler} {flags} {platform.platform()} {_processor()}"
    name = f"cpu_kernels_{hashlib.sha256(source + about.encode()).hexdigest()[:24]}.so"
    for folder in _folders():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = folder / name
            if not (path.exists() and path.stat().st_uid == os.getuid()):
                _build(compiler, flags, source, path)
            return path
        except OSError:
            continue
    raise OSError("no folder for a built library can be written")


def _folders() -> Iterator[Path]:
    """The user's folder for what can be made again; else one of this process."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    yield Path(home) / "turnwise"
    yield Path(tempfile.mkdtemp(prefix="turnwise-"))


def _build(compiler: str, flags: list[str], source: bytes, path: Path) -> None:
    """Compile, and link in a step of its own, so that OpenMP's functions are those that torch has loaded."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        object_, library = Path(folder) / "kernels.o", Path(folder) / path.name
        for command in (
            [compiler, *flags, "-x", "c", "-c", "-", "-o", str(object_)],
            [compiler, "-shared", str(object_), "-lm", "-o", str(library)],
        ):
            subprocess.run(command, input=source, capture_output=True, check=True, timeout=120)
        library.replace(path)


def _processor() -> str:
    """What kind of processor this is: a home folder may be that of several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
