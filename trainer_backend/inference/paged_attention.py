"""Write keys and values into pages, and compute the attention of one new token per row to the row's pages.

Triton's kernels are used where they run (torch for CUDA on Linux includes `triton`, which needs a C
compiler). Elsewhere plain torch is used, which first gathers all pages of the page tables.
`torch.nn.attention.varlen` cannot replace the kernels: since torch 2.12 it accepts page tables, but it
computes only in 16 bits.
"""

from functools import cache
from importlib.util import find_spec

import structlog
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trainer_backend.inference.page_memory import PageMemory
from trainer_backend.inference.page_tiles import Tiles
from trainer_backend.inference.pages import PAGE

log = structlog.get_logger(__name__)


def store(memory: PageMemory, layer: int, slots_T: Tensor, k_THD: Tensor, v_THD: Tensor) -> None:
    """Write the keys and values of T tokens into the tokens' slots.

    Keys and values may have any dtype; their last axis has stride 1. `slots_T` (int64) are slot numbers: page
    number * PAGE + position in the page. A token with slot -1 is not stored; all other slots must differ.
    """
    if kernels_are_here(memory.device):
        from trainer_backend.inference import paged_kernel

        paged_kernel.store(memory, layer, slots_T, k_THD, v_THD)
    else:
        store_by_torch(memory, layer, slots_T, k_THD, v_THD)


def attend(
    memory: PageMemory,
    layer: int,
    q_BHD: Tensor,
    table_BP: Tensor,
    lengths_B: Tensor,
    *,
    scale: float,
    tiles: Tiles | None = None,
) -> Tensor:
    """Return the attention output of one query per row over the row's tokens, [B, H, D], in the cache's type.

    Args:
        q_BHD: of any dtype, rounded to the cache's dtype; the last axis has stride 1. H is a multiple of the
            number of key-value heads, and the query heads that share a key-value head are adjacent.
        table_BP: int32, the page numbers of each row in order; pages after the row's length are not read.
        lengths_B: int32, how many tokens each row attends to; 0 for a padding row, whose result is 0.
        tiles: groups of rows whose shared pages the kernels read once. Plain torch ignores them.
    """
    if kernels_are_here(memory.device):
        from trainer_backend.inference import paged_kernel

        return paged_kernel.attend(memory, layer, q_BHD, table_BP, lengths_B, scale, tiles)
    return attend_by_torch(memory, layer, q_BHD, table_BP, lengths_B, scale)


def gather(memory: PageMemory, layer: int, slots_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and the values in int64 slots, [T, heads, dim] each; zeros for slot -1."""
    size = memory.slab_pages * PAGE
    k_THD = torch.zeros((len(slots_T), memory.heads, memory.dim), dtype=memory.dtype, device=memory.device)
    v_THD = torch.zeros_like(k_THD)
    for slab in range(len(memory.slabs)):
        is_here_T11 = ((slots_T >= 0) & (slots_T // size == slab))[:, None, None]
        places_T = slots_T.clamp(min=0) % size
        keys, values = memory.tokens(slab, layer)
        k_THD = torch.where(is_here_T11, keys[places_T], k_THD)
        v_THD = torch.where(is_here_T11, values[places_T], v_THD)
    return k_THD, v_THD


def store_by_torch(memory: PageMemory, layer: int, slots_T: Tensor, k_THD: Tensor, v_THD: Tensor) -> None:
    size = memory.slab_pages * PAGE
    for slab in range(len(memory.slabs)):
        is_here_T = (slots_T >= 0) & (slots_T // size == slab)
        keys, values = memory.tokens(slab, layer)
        keys[slots_T[is_here_T] % size] = k_THD[is_here_T].to(memory.dtype)
        values[slots_T[is_here_T] % size] = v_THD[is_here_T].to(memory.dtype)


def attend_by_torch(
    memory: PageMemory, layer: int, q_BHD: Tensor, table_BP: Tensor, lengths_B: Tensor, scale: float
) -> Tensor:
    columns_L = torch.arange(table_BP.shape[1] * PAGE, device=memory.device)
    is_key_BL = columns_L < lengths_B[:, None]
    slots_BL = table_BP.long().repeat_interleave(PAGE, dim=1) * PAGE + columns_L % PAGE
    slots_BL = torch.where(is_key_BL, slots_BL, -1)
    shape = (*slots_BL.shape, memory.heads, memory.dim)
    k_BHLD, v_BHLD = (
        tensor.view(shape).transpose(1, 2) for tensor in gather(memory, layer, slots_BL.flatten())
    )
    out_BH1D = scaled_dot_product_attention(
        q_BHD[:, :, None].to(memory.dtype), k_BHLD, v_BHLD, attn_mask=is_key_BL[:, None, None], scale=scale,
        enable_gqa=True,
    )  # fmt: skip
    # Softmax over no key is NaN on some devices.
    return torch.where((lengths_B > 0)[:, None, None], out_BH1D[:, :, 0], 0.0)


def tile_rows(memory: PageMemory, heads: int) -> int:
    """Return the largest number of rows, with `heads` query heads each, that fit in one tile."""
    from trainer_backend.inference import paged_kernel

    group = heads // memory.heads
    return paged_kernel.block_rows(memory, group) // group


def kernels_are_here(device: torch.device) -> bool:
    return device.type == "cuda" and why_no_kernels(device) is None


@cache
def why_no_kernels(device: torch.device) -> str | None:
    """Return why Triton's kernels do not run on a GPU, and log the reason once.

    Return None if they run, or if the device is not a GPU.
    """
    reason = _failure(device) if device.type == "cuda" else None
    if reason is not None:
        log.warning("runs_without_kernels", device=str(device), reason=reason)
    return reason


def _failure(device: torch.device) -> str | None:
    """Run the kernels on one token. Return why this failed, or None if it succeeded."""
    if find_spec("triton") is None:
        return "triton is not installed"
    try:
        memory = PageMemory(layers=1, heads=1, dim=16, dtype=torch.float32, device=device, limit=1)
        memory.grow(1)
        from trainer_backend.inference import paged_kernel

        token_1HD = torch.ones((1, 1, 16), device=device)
        ints_1 = torch.ones(1, dtype=torch.int32, device=device)
        paged_kernel.store(memory, 0, ints_1.long() - 1, token_1HD, token_1HD)
        paged_kernel.attend(memory, 0, token_1HD, ints_1[:, None] - 1, ints_1, 1.0)
        torch.cuda.synchronize(device)
    except Exception as error:  # of any type: no C compiler, a driver or a GPU that is too old
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return None
