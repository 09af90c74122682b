"""Running out of memory while generating: what counts as that, and what it says to whoever asked."""

import torch

from trainer_backend.errors import EngineOutOfMemory

# In a bare RuntimeError: of the CPU's allocator; of Metal and the CUDA driver; of cuBLAS and cuDNN.
_TEXTS = ("can't allocate memory", "out of memory", "alloc_failed")


def is_out_of_memory(error: RuntimeError) -> bool:
    """torch's allocator for CUDA has an error of its own; everything else is told by its text alone."""
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error).lower() for text in _TEXTS)


def out_of_memory(doing: str, *, running: int, max_model_len: int) -> EngineOutOfMemory:
    """The error for the requests that did not fit; the others go on."""
    return EngineOutOfMemory(
        f"the engine ran out of memory while {doing}, with {running} requests running and room for "
        f"{max_model_len} tokens each",
        where="[inference]",
        hint="Lower max_running, max_model_len or kept_prefixes.",
    )
