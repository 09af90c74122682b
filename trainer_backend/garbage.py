"""Limits Python's search for cyclic garbage while a batch of rollouts grows.

A rollout consists of some thousand objects without reference cycles, and a batch keeps all of them until its
update. By default, Python searches the whole batch again whenever it has grown by a quarter. These searches
take nearly half of the time in which rollouts are read. Each pauses the process, and thus also the sampling
of tokens, for up to a second.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

# The thresholds of the three generations; with the last threshold, the oldest generation is never searched.
_SELDOM = (10_000, 50, 1_000_000_000)

_lock = Lock()
_stages = 0
_usual = gc.get_threshold()


@contextmanager
def while_a_batch_grows() -> Iterator[None]:
    """Let Python search only young objects for garbage while the context is open.

    Contexts may overlap: the previous thresholds are restored when the last context ends.
    """
    global _stages, _usual
    with _lock:
        if _stages == 0:
            _usual = gc.get_threshold()
            gc.set_threshold(*_SELDOM)
        _stages += 1
    try:
        yield
    finally:
        with _lock:
            _stages -= 1
            if _stages == 0:
                gc.set_threshold(*_usual)
