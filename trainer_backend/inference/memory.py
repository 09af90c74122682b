"""Running out of memory while generating: what counts as that, and what it says to whoever asked."""

import torch

from trainer_backend.errors import EngineOutOfMemory


def is_out_of_memory(error: RuntimeError) -> bool:
    """CUDA has an error of its own; the CPU's allocator raises a bare RuntimeError with this text."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def out_of_memory(doing: str, *, running: int, max_model_len: int) -> EngineOutOfMemory:
    """The error for the requests that did not fit; the others go on."""
    return EngineOutOfMemory(
        f"the engine ran out of memory while {doing}, with {running} requests running and room for "
        f"{max_model_len} tokens each",
        where="[inference]",
        hint="Lower max_running, max_model_len or kept_prefixes.",
    )
