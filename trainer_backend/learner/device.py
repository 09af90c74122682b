"""The learner's device and precision, chosen by `model.device` and checked before the run starts."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from trainer_backend.errors import JobError
from trainer_backend.parts import VISIBLE_DEVICES, Hardware

# The oldest compute capability with bfloat16 tensor cores and a variable-length attention kernel.
_AMPERE = (8, 0)
_LOGITS_BYTES = 256 * 2**20
_GPU_SHARE_OF_LOGITS = 32
# How torch's errors begin on a machine without a GPU. Any other error shows that there is a driver.
_NO_GPU = ("Found no NVIDIA driver", "No CUDA GPUs are available", "No HIP GPUs are available")


@dataclass(frozen=True, slots=True)
class Found:
    """The devices that torch can use on this machine."""

    cuda: tuple[int, int] | None
    """Compute capability of the current CUDA GPU; None if torch cannot use one."""
    mps: bool
    why_no_cuda: str | None = None
    """The error with which torch refuses CUDA; None if CUDA works or torch was built without it."""

    @classmethod
    def by_torch(cls) -> "Found":
        mps = torch.backends.mps.is_available()
        if torch.cuda.is_available():
            return cls(torch.cuda.get_device_capability(), mps)
        is_built = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
        return cls(None, mps, cuda_refusal() if is_built else None)

    def __str__(self) -> str:
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "a build without CUDA"
        gpus = [name for name, there in (("cuda", self.cuda is not None), ("mps", self.mps)) if there]
        reason = f": {self.why_no_cuda}" if self.why_no_cuda else ""
        return f"torch {torch.__version__} ({built}) sees {', '.join(gpus) or 'no GPU'}{reason}"


def cuda_refusal(start: Callable[[], None] = torch.cuda.init) -> str | None:
    """Start CUDA; return the text of torch's error, or None if it starts.

    `torch.cuda.is_available` does not give the reason: it returns False both without a driver and with a
    driver that is too old.
    """
    try:
        start()
    except (AssertionError, RuntimeError) as error:
        return str(error).partition("\n")[0].rstrip(". ")  # a C++ stack trace may follow
    return None


@dataclass(frozen=True, slots=True)
class Placement:
    """A device, and the precision of computations on it.

    The weights in training and the optimizer's state are always float32.
    """

    device: torch.device
    """The device that computes the model."""
    low: torch.dtype | None = None
    """The dtype of the inputs of matrix products, bfloat16; also the dtype of frozen matrices, such as those
    of the engine's copy of the model (`models.precision`). None if all computations are in float32."""
    unusable_gpu: str | None = None
    """Text about a GPU driver that torch cannot use; None without one, or if `model.device` is not "auto"."""
    card: int | None = None
    """Memory, in bytes, of a hypothetical GPU (`place_on_card`); None if the device is in this machine."""

    @property
    def held(self) -> torch.dtype:
        """The dtype of matrices that are not trained.

        These are the matrices of the engine and of the reference policy, and the base weights of adapters.
        """
        return self.low or torch.float32

    def hardware(self) -> Hardware:
        """Return the dtype of frozen matrices and the visible GPUs, in a form that does not need torch."""
        names: list[str] = []
        if self.device.type == "cuda":
            visible = os.environ.get(VISIBLE_DEVICES)
            names = visible.split(",") if visible else list(map(str, range(torch.cuda.device_count())))
        return Hardware(str(self.held).removeprefix("torch."), tuple(names))

    def notes(self) -> tuple[str, ...]:
        """Return a sentence for the user if there is a GPU that "auto" cannot use; otherwise no text."""
        if self.unusable_gpu is None:
            return ()
        return (
            f"the job runs on {self.device.type}, although there is a GPU driver: model.device is 'auto', "
            f"and {self.unusable_gpu}",
        )

    def card_bytes(self) -> int:
        """Return the total memory of the CUDA GPU in bytes. The device must be a CUDA GPU."""
        if self.card is not None:
            return self.card
        return torch.cuda.get_device_properties(self.device).total_memory

    def logits_bytes(self) -> int:
        """Return the maximal bytes of a chunk of logits: a share of a CUDA GPU's memory, else a constant."""
        return self.card_bytes() // _GPU_SHARE_OF_LOGITS if self.device.type == "cuda" else _LOGITS_BYTES

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context for forward passes: autocast to `low`, or without effect if `low` is None."""
        if self.low is None:
            return nullcontext()
        # autocast's cache is off: it would keep a rounded copy of all weights, 2 bytes per weight, until the
        # pass ends, even on each rank of a sharded model. A pass reads each weight only once.
        return torch.autocast(self.device.type, dtype=self.low, cache_enabled=False)

    def __str__(self) -> str:
        precision = "float32" if self.low is None else f"{str(self.low).removeprefix('torch.')} over float32"
        card = "" if self.card is None else f" with {self.card / 2**30:.1f} GiB"
        return f"{self.device.type}{card}, {precision}"


def place_on_card(size: int) -> Placement:
    """Return the placement on a hypothetical CUDA GPU, Ampere or later, with `size` bytes of memory."""
    return Placement(torch.device("cuda"), torch.bfloat16, card=size)


def place(name: str, found: Found | None = None) -> Placement:
    """Return the placement for a value of `model.device`. Raises JobError if the device is missing.

    "auto" chooses the first available device of cuda, mps and cpu.
    """
    found = found or Found.by_torch()
    there = {"cuda": found.cuda is not None, "mps": found.mps, "cpu": True}
    unusable_gpu = None
    if name == "auto":
        name = next(device for device, is_there in there.items() if is_there)
        # There may be a driver that torch cannot use, for example because it is too old.
        if found.why_no_cuda is not None and not found.why_no_cuda.startswith(_NO_GPU):
            unusable_gpu = str(found)
    if not there[name]:
        raise JobError(
            f"model.device is {name!r}, but {found}",
            hint='model.device = "auto" uses what is available; "cpu" always is.',
        )
    low = torch.bfloat16 if name == "cuda" and found.cuda is not None and found.cuda >= _AMPERE else None
    return Placement(torch.device(name), low, unusable_gpu)
