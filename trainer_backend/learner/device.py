"""The learner's device and precision, from `model.device`; checked before anything starts."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from trainer_backend.errors import JobError
from trainer_backend.parts import VISIBLE_DEVICES, Hardware

# Older GPUs have no bfloat16 tensor cores, and no variable-length attention kernel.
_AMPERE = (8, 0)
_LOGITS_BYTES = 256 * 2**20
_GPU_SHARE_OF_LOGITS = 32
# Beginnings of torch's errors on a machine without a GPU. Any other error comes from an existing driver.
_NO_GPU = ("Found no NVIDIA driver", "No CUDA GPUs are available", "No HIP GPUs are available")


@dataclass(frozen=True, slots=True)
class Found:
    """The devices that torch finds on this machine."""

    cuda: tuple[int, int] | None
    """Compute capability of the current GPU."""
    mps: bool
    why_no_cuda: str | None = None
    """Torch's error if it cannot use CUDA; None: it can, or was built without CUDA."""

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
    """Return torch's error if CUDA does not start; None if it does.

    `torch.cuda.is_available` returns False both without a driver and with one that is too old.
    """
    try:
        start()
    except (AssertionError, RuntimeError) as error:
        return str(error).partition("\n")[0].rstrip(". ")  # a C++ stack trace may follow
    return None


@dataclass(frozen=True, slots=True)
class Placement:
    """A device and its precision. Trained weights and their optimizer are always float32."""

    device: torch.device
    """The device of the model."""
    low: torch.dtype | None = None
    """The dtype of inputs of matrix products, and of frozen matrices such as the engine's copy
    (`models.precision`); None: float32 throughout."""
    unusable_gpu: str | None = None
    """Description of a GPU whose driver `auto` found but could not use."""
    card: int | None = None
    """Memory in bytes of a GPU that is only planned (`place_on_card`); None: this machine has it."""

    @property
    def held(self) -> torch.dtype:
        """Return the dtype of frozen matrices: in the engine, in a reference, and in layers with adapters."""
        return self.low or torch.float32

    def hardware(self) -> Hardware:
        """Describe the placement for processes without torch, with the visible GPUs."""
        names: list[str] = []
        if self.device.type == "cuda":
            visible = os.environ.get(VISIBLE_DEVICES)
            names = visible.split(",") if visible else list(map(str, range(torch.cuda.device_count())))
        return Hardware(str(self.held).removeprefix("torch."), tuple(names))

    def notes(self) -> tuple[str, ...]:
        """Return a sentence about a GPU that `auto` does not use, if there is one."""
        if self.unusable_gpu is None:
            return ()
        return (
            f"the job runs on {self.device.type}, although there is a GPU driver: model.device is 'auto', "
            f"and {self.unusable_gpu}",
        )

    def card_bytes(self) -> int:
        """Return the total memory of a CUDA GPU."""
        if self.card is not None:
            return self.card
        return torch.cuda.get_device_properties(self.device).total_memory

    def logits_bytes(self) -> int:
        """Return the bytes that a chunk of logits may take: on a GPU, a share of its memory."""
        return self.card_bytes() // _GPU_SHARE_OF_LOGITS if self.device.type == "cuda" else _LOGITS_BYTES

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context of a forward pass; see `models.precision`."""
        if self.low is None:
            return nullcontext()
        # No cache: it would keep rounded copies of all weights until the pass ends, 2 bytes per weight, on
        # every rank of a sharded model too. A pass reads each weight only once.
        return torch.autocast(self.device.type, dtype=self.low, cache_enabled=False)

    def __str__(self) -> str:
        precision = "float32" if self.low is None else f"{str(self.low).removeprefix('torch.')} over float32"
        card = "" if self.card is None else f" with {self.card / 2**30:.1f} GiB"
        return f"{self.device.type}{card}, {precision}"


def place_on_card(size: int) -> Placement:
    """Return the placement on a hypothetical CUDA GPU of `size` bytes, Ampere or later."""
    return Placement(torch.device("cuda"), torch.bfloat16, card=size)


def place(name: str, found: Found | None = None) -> Placement:
    """Return the placement that `model.device` names; `auto` chooses cuda, mps or cpu, in this order."""
    found = found or Found.by_torch()
    there = {"cuda": found.cuda is not None, "mps": found.mps, "cpu": True}
    unusable_gpu = None
    if name == "auto":
        name = next(device for device, is_there in there.items() if is_there)
        # Torch may be unable to use a driver, such as one that is too old.
        if found.why_no_cuda is not None and not found.why_no_cuda.startswith(_NO_GPU):
            unusable_gpu = str(found)
    if not there[name]:
        raise JobError(
            f"model.device is {name!r}, but {found}",
            hint='model.device = "auto" uses what is available; "cpu" always is.',
        )
    low = torch.bfloat16 if name == "cuda" and found.cuda is not None and found.cuda >= _AMPERE else None
    return Placement(torch.device(name), low, unusable_gpu)
