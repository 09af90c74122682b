"""Compiles the CPU kernels once per machine, into the user's cache folder."""

import hashlib
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

# The files are joined and compiled as one source, because the second uses inline functions of the first.
_SOURCES = ("cpu_kernels.c", "cpu_pass.c")
# These are the parts of `-ffast-math` that still handle NaN and infinity.
_FLAGS = ["-O3", "-march=native", "-fPIC", "-fno-math-errno", "-fno-trapping-math"]
_FLAGS += ["-fassociative-math", "-fno-signed-zeros", "-freciprocal-math"]
if platform.machine().lower() in ("x86_64", "amd64"):
    _FLAGS.append("-mprefer-vector-width=512")  # a CPU with AVX2 only still uses 256


def built_library(compiler: str, *, openmp: bool) -> Path:
    """Return the path of the kernels' library for this compiler and processor. Compile it if not cached.

    Raises:
        OSError: neither the cache folder nor a temporary folder can be written.
        subprocess.SubprocessError: the compiler fails.
    """
    flags = [*_FLAGS, "-fopenmp"] if openmp else _FLAGS
    folder = files("trainer_backend.models")
    source = b"".join(folder.joinpath(name).read_bytes() for name in _SOURCES)
    about = f"{compiler} {flags} {platform.platform()} {_describe_processor()}"
    name = f"cpu_kernels_{hashlib.sha256(source + about.encode()).hexdigest()[:24]}.so"
    for home in _folders():
        try:
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = home / name
            if not (path.exists() and path.stat().st_uid == os.getuid()):
                _build(compiler, flags, source, path)
            return path
        except OSError:
            continue
    raise OSError("no folder for a built library can be written")


def _folders() -> Iterator[Path]:
    """Yield the folders to try: the user's cache folder, then a new temporary folder."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    yield Path(home) / "turnwise"
    yield Path(tempfile.mkdtemp(prefix="turnwise-"))


def _build(compiler: str, flags: list[str], source: bytes, path: Path) -> None:
    """Compile and link. Linking is a separate step without -fopenmp, so that torch's OpenMP is used."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        object_, library = Path(folder) / "kernels.o", Path(folder) / path.name
        for command in (
            [compiler, *flags, "-x", "c", "-c", "-", "-o", str(object_)],
            [compiler, "-shared", str(object_), "-lm", "-o", str(library)],
        ):
            subprocess.run(command, input=source, capture_output=True, check=True, timeout=120)
        library.replace(path)


def _describe_processor() -> str:
    """Describe the processor's instruction sets, because different machines may share one cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
