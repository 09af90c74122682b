"""Manage the device memory of pages: slabs of keys and values of all layers, allocated on demand."""

import math

import torch
from torch import Tensor

from trainer_backend.inference.pages import PAGE
from trainer_backend.models.folder import is_out_of_memory

# A slab should be large for the allocator, and small compared with a device's memory.
SLAB_BYTES = 256 * 2**20
# The fewest slabs into which a small cache is divided, since a slab is allocated whole.
LEAST_SLABS = 8
# The memory that slabs leave free on a GPU, for prefills and for the capture of graphs.
RESERVE_BYTES = 2 * 2**30


class PageMemory:
    """Slabs [2, layers, slab_pages, PAGE, kv_heads, head_dim], keys first; `slab_pages` is a power of 2.

    Page p is page p % slab_pages of slab p // slab_pages. `bases_S` holds the address of each slab on the
    device, so that kernels of a captured graph find slabs that are allocated later or again. `limit` is the
    largest number of pages; further pages of the last slab are not used (see `whole_slabs`). The first
    `least` pages are allocated even if less than RESERVE_BYTES stays free.
    """

    def __init__(
        self,
        *,
        layers: int,
        heads: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
        limit: int,
        least: int = 1,
    ) -> None:
        self.layers, self.heads, self.dim, self.dtype, self.device = layers, heads, dim, dtype, device
        self.slab_pages = slab_pages(page_bytes(layers, heads, dim, dtype), limit)
        self._shape = 2, layers, self.slab_pages, PAGE, heads, dim
        self.slabs: list[Tensor] = []
        self._least = least
        self.bases_S = torch.zeros(-(-limit // self.slab_pages), dtype=torch.int64, device=device)

    def grow(self, most: int) -> int:
        """Allocate a slab; return how many of its pages may be used, or 0 if memory runs out."""
        if self.device.type == "cuda" and not self.may_grow(free_memory(self.device)):
            return 0
        try:
            slab = torch.empty(self._shape, dtype=self.dtype, device=self.device)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return 0
        self.bases_S[len(self.slabs)] = slab.data_ptr()
        self.slabs.append(slab)
        return min(most, self.slab_pages)

    def may_grow(self, free: int) -> bool:
        """Return whether a slab fits in `free` bytes next to the reserve, or is needed for `least` pages."""
        needed = math.prod(self._shape) * self.dtype.itemsize + RESERVE_BYTES
        return len(self.slabs) * self.slab_pages < self._least or free >= needed

    def release(self) -> None:
        """Give all memory back to the device. The next `grow` allocates the first slab."""
        self.slabs.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def copy(self, source: int, target: int) -> None:
        (from_slab, source), (to_slab, target) = (divmod(page, self.slab_pages) for page in (source, target))
        self.slabs[to_slab][:, :, target] = self.slabs[from_slab][:, :, source]

    def offsets(self, layer: int) -> tuple[int, int]:
        """Return where a layer's keys and values begin in a slab, counted in numbers of its type."""
        layer_size = self.slab_pages * PAGE * self.heads * self.dim
        return layer * layer_size, (self.layers + layer) * layer_size

    def tokens(self, slab: int, layer: int) -> tuple[Tensor, Tensor]:
        """Return views of a layer's keys and values in one slab, [slab_pages * PAGE, heads, dim] each."""
        keys, values = self.slabs[slab][:, layer].flatten(1, 2)
        return keys, values


def free_memory(device: torch.device) -> int:
    """Return the bytes of a CUDA device that are free or that torch's allocator holds unused."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def page_bytes(layers: int, heads: int, dim: int, dtype: torch.dtype) -> int:
    """Return the number of bytes of a page, which has the keys and values of all layers."""
    return 2 * layers * PAGE * heads * dim * dtype.itemsize


def slab_pages(page: int, limit: int) -> int:
    """Return the number of pages of a slab, a power of 2; a page has `page` bytes.

    The slab has at most SLAB_BYTES and at most `limit` / LEAST_SLABS pages, but at least 1 page.
    """
    most = max(1, min(SLAB_BYTES // page, limit // LEAST_SLABS))
    return 1 << (most.bit_length() - 1)


def whole_slabs(page: int, limit: int) -> int:
    """Return the largest number of pages up to `limit`, of `page` bytes each, that fill whole slabs."""
    return limit - limit % slab_pages(page, limit)
