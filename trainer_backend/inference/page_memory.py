"""Manage the device memory of a paged cache, which is allocated on demand in slabs of many pages."""

import math

import torch
from torch import Tensor

from trainer_backend.inference.pages import PAGE
from trainer_backend.models.folder import is_out_of_memory

# The largest size of a slab: large enough for the allocator, and small compared with a device's memory.
SLAB_BYTES = 256 * 2**20
# Even a small cache is divided into this many slabs, so that it need not be allocated all at once.
LEAST_SLABS = 8
# The memory that slabs leave free on a GPU, for prefills and for the capture of graphs.
RESERVE_BYTES = 2 * 2**30


class PageMemory:
    """The device memory of pages, as a list of slabs.

    A slab has the shape [2, layers, slab_pages, PAGE, kv_heads, head_dim], keys first; `slab_pages` is a
    power of 2. Page p is page p % slab_pages of slab p // slab_pages. `bases_S` stores the address of each
    slab on the device, so that the kernels of a captured CUDA graph find slabs that are allocated after the
    capture.

    `limit` is the largest number of pages. If it is not a multiple of `slab_pages`, a part of the last slab
    stays unused (see `whole_slabs`). The first `least` pages are allocated even if less than RESERVE_BYTES
    stays free.
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
        """Allocate a slab. Return how many of its pages may be used, at most `most`; 0 if memory runs out."""
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
        """Return whether another slab may be allocated if the device has `free` free bytes.

        This is so if RESERVE_BYTES stay free, or if fewer than `least` pages are allocated yet.
        """
        needed = math.prod(self._shape) * self.dtype.itemsize + RESERVE_BYTES
        return len(self.slabs) * self.slab_pages < self._least or free >= needed

    def release(self) -> None:
        """Free all slabs. The next call of `grow` then allocates the first slab."""
        self.slabs.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def copy(self, source: int, target: int) -> None:
        (from_slab, source), (to_slab, target) = (divmod(page, self.slab_pages) for page in (source, target))
        self.slabs[to_slab][:, :, target] = self.slabs[from_slab][:, :, source]

    def offsets(self, layer: int) -> tuple[int, int]:
        """Return the offsets of a layer's keys and of its values in a slab, as numbers of elements."""
        layer_size = self.slab_pages * PAGE * self.heads * self.dim
        return layer * layer_size, (self.layers + layer) * layer_size

    def tokens(self, slab: int, layer: int) -> tuple[Tensor, Tensor]:
        """Return views of a layer's keys and values in one slab, [slab_pages * PAGE, heads, dim] each."""
        keys, values = self.slabs[slab][:, layer].flatten(1, 2)
        return keys, values


def free_memory(device: torch.device) -> int:
    """Return the bytes of a CUDA device that are free, or reserved by torch's allocator but unused."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def page_bytes(layers: int, heads: int, dim: int, dtype: torch.dtype) -> int:
    """Return the size in bytes of a page, which stores the keys and values of all layers."""
    return 2 * layers * PAGE * heads * dim * dtype.itemsize


def slab_pages(page: int, limit: int) -> int:
    """Return the number of pages of a slab, which is a power of 2.

    A page has `page` bytes, and the cache has at most `limit` pages. A slab has at most SLAB_BYTES bytes and
    at most `limit` / LEAST_SLABS pages, but at least one page.
    """
    most = max(1, min(SLAB_BYTES // page, limit // LEAST_SLABS))
    return 1 << (most.bit_length() - 1)


def whole_slabs(page: int, limit: int) -> int:
    """Return the largest number of pages up to `limit` that fills whole slabs; a page has `page` bytes."""
    return limit - limit % slab_pages(page, limit)
