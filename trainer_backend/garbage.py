"""Limits Python's search for cyclic garbage while a batch of rollouts grows.

A rollout is some thousand objects without cycles, and a batch keeps them all until its update. Python's usual
schedule searches the whole batch again whenever it has grown by a quarter. That takes nearly half of the time
in which rollouts are read, in pauses of up to a second without a sampled token.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

# The thresholds of the three generations: the oldest is never searched.
_SELDOM = (10_000, 50, 1_000_000_000)

_lock = Lock()
_stages = 0
_usual = gc.get_threshold()


@contextmanager
def while_a_batch_grows() -> Iterator[None]:
    """Let Python search only young objects. Contexts may overlap; the last to end restores the schedule."""
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
