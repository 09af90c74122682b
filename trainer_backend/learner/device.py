"""Where the learner computes and in which precision: `model.device`, looked at before anything starts."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from trainer_backend.errors import JobError
from trainer_backend.parts import VISIBLE_DEVICES, Hardware

# Below it a GPU has no bfloat16 in its tensor cores, and no kernel for attention of variable length.
_AMPERE = (8, 0)
_LOGITS_BYTES = 256 * 2**20
_GPU_SHARE_OF_LOGITS = 32
# How torch begins where there is nothing to use. Whatever else it says is a fault of a driver that is there.
_NO_GPU = ("Found no NVIDIA driver", "No CUDA GPUs are available", "No HIP GPUs are available")


@dataclass(frozen=True, slots=True)
class Found:
    """What torch sees of this machine.

    `cuda` is the compute capability of the current GPU. `why_no_cuda` is what torch says when it cannot use
    CUDA; None: it can, or was built without.
    """

    cuda: tuple[int, int] | None
    mps: bool
    why_no_cuda: str | None = None

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
    """What torch says when CUDA does not start; None where it does.

    `torch.cuda.is_available` answers False alike without a driver and with one that is too old.
    """
    try:
        start()
    except (AssertionError, RuntimeError) as error:
        return str(error).partition("\n")[0].rstrip(". ")  # a stack of C++ may follow
    return None


@dataclass(frozen=True, slots=True)
class Placement:
    """A device and its precisions.

    Weights in training and their optimizer are float32 everywhere.

    device: where the model lives.
    low: what the factors of products are rounded to, and what the matrices of the engine's copy and frozen
        ones are held in (`models.precision`); None is float32 throughout.
    unusable_gpu: what torch sees, where `auto` found a GPU's driver and could not use it.
    card: bytes of a GPU that is planned for and need not be here (`place_on_card`); None: it is here.
    """

    device: torch.device
    low: torch.dtype | None = None
    unusable_gpu: str | None = None
    card: int | None = None

    @property
    def held(self) -> torch.dtype:
        """The dtype of frozen matrices: the engine's, a reference's, those under an adapter."""
        return self.low or torch.float32

    def hardware(self) -> Hardware:
        """The same for processes without torch, with the GPUs of this machine where it computes on these."""
        names: list[str] = []
        if self.device.type == "cuda":
            visible = os.environ.get(VISIBLE_DEVICES)
            names = visible.split(",") if visible else list(map(str, range(torch.cuda.device_count())))
        return Hardware(str(self.held).removeprefix("torch."), tuple(names))

    def notes(self) -> tuple[str, ...]:
        """A sentence about a GPU that `auto` does not use; empty: none."""
        if self.unusable_gpu is None:
            return ()
        return (
            f"the job runs on {self.device.type}, though a GPU's driver is there: model.device is 'auto', "
            f"and {self.unusable_gpu}",
        )

    def card_bytes(self) -> int:
        """The whole memory of a CUDA GPU."""
        if self.card is not None:
            return self.card
        return torch.cuda.get_device_properties(self.device).total_memory

    def logits_bytes(self) -> int:
        """Bytes that a chunk of logits may take: on a GPU, a share of its memory."""
        return self.card_bytes() // _GPU_SHARE_OF_LOGITS if self.device.type == "cuda" else _LOGITS_BYTES

    def autocast(self) -> AbstractContextManager[object]:
        """For a forward pass; see `models.precision`."""
        if self.low is None:
            return nullcontext()
        # Its cache would hold rounded copies of all weights until the pass ends, 2 bytes for each: of a model
        # that is sharded on every rank, and of checkpointed layers too. A pass reads each weight once.
        return torch.autocast(self.device.type, dtype=self.low, cache_enabled=False)

    def __str__(self) -> str:
        precision = "float32" if self.low is None else f"{str(self.low).removeprefix('torch.')} over float32"
        card = "" if self.card is None else f" with {self.card / 2**30:.1f} GiB"
        return f"{self.device.type}{card}, {precision}"


def place_on_card(size: int) -> Placement:
    """The placement on a CUDA GPU of so many bytes, no older than Ampere, whatever this machine has."""
    return Placement(torch.device("cuda"), torch.bfloat16, card=size)


def place(name: str, found: Found | None = None) -> Placement:
    """The placement that `model.device` names, by what torch has found; `auto`: cuda, then mps, then cpu."""
    found = found or Found.by_torch()
    there = {"cuda": found.cuda is not None, "mps": found.mps, "cpu": True}
    unusable_gpu = None
    if name == "auto":
        name = next(device for device, is_there in there.items() if is_there)
        # A driver may be there that torch cannot use, such as one that is too old.
        if found.why_no_cuda is not None and not found.why_no_cuda.startswith(_NO_GPU):
            unusable_gpu = str(found)
    if not there[name]:
        raise JobError(
            f"model.device is {name!r}, but {found}",
            hint='model.device = "auto" takes what is there; "cpu" is always there.',
        )
    low = torch.bfloat16 if name == "cuda" and found.cuda is not None and found.cuda >= _AMPERE else None
    return Placement(torch.device(name), low, unusable_gpu)
