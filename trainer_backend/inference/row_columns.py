"""Store the inputs of decode steps as arrays over the running requests, so that no step rebuilds them."""

import numpy as np
from numpy.typing import NDArray

from trainer_backend.inference.request import Request
from trainer_backend.inference.sampler import OPTIONS, read_options

_FIRST = 64


class Columns:
    def __init__(self) -> None:
        self.ids = np.zeros(_FIRST, dtype=np.int64)  # the token to feed next
        self.cached = np.zeros(_FIRST, dtype=np.int64)  # the position of this token
        self.keys = np.zeros(_FIRST, dtype=np.uint64)  # `keys` and `counters` select the random number
        self.counters = np.zeros(_FIRST, dtype=np.uint64)
        self.limits = np.zeros(_FIRST, dtype=np.uint64)  # the most tokens that the row may sample
        # The row's index in the last launched step, whose sampled token is fed next; -1: `ids` is fed.
        self.sources = np.zeros(_FIRST, dtype=np.int64)
        self.options = np.zeros((_FIRST, len(OPTIONS)), dtype=np.float64)
        self.processed = np.zeros(_FIRST, dtype=np.bool_)  # log-probs are taken after truncation
        self.truncated = np.zeros(_FIRST, dtype=np.bool_)  # truncation removes tokens

    def set(self, row: int, request: Request) -> None:
        if row == len(self.ids):
            for name, column in vars(self).items():
                setattr(self, name, np.resize(column, (2 * row, *column.shape[1:])))
        sampling = request.sampling
        self.ids[row], self.cached[row] = request.last_id, request.cached
        self.keys[row], self.counters[row] = request.key, len(request.token_ids)
        self.limits[row], self.sources[row] = sampling.max_tokens, -1
        self.options[row] = read_options(sampling)
        self.truncated[row] = sampling.is_truncated and sampling.temperature > 0.0
        # Without truncation both kinds of log-probs are equal, and must not differ by rounding.
        self.processed[row] = request.extras.processed and self.truncated[row]

    def move(self, source: int, target: int) -> None:
        for column in vars(self).values():
            column[target] = column[source]

    def advance(self, rows: NDArray[np.int64] | slice) -> None:
        """Advance rows by one token: to the next position, and to the next random number."""
        self.cached[rows] += 1
        self.counters[rows] += np.uint64(1)
