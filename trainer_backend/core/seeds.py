"""Derives every seed of a job from the job's seed and a purpose. Pure.

Seeds of training worlds are below HELD_OUT_FROM, those of evaluation worlds are not, so they never overlap.
"""

from collections.abc import Collection, Sequence
from hashlib import blake2b
from itertools import count
from typing import TypeVar

HELD_OUT_FROM = 2**30
_SEED_LIMIT = 2**31 - 1
# A world by its seed, or a row of a data set by its id.
World = TypeVar("World", int, str)


def derived_seed(*parts: int | str, below: int = _SEED_LIMIT) -> int:
    """Return a number in [0, below) that depends only on the parts, not on process, platform or order."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") % below


def training_world(job_seed: int, purpose: str, iteration: int, group: int, held_out: Collection[int]) -> int:
    """Return the world seed of a training group, in [0, HELD_OUT_FROM), never one of `held_out`."""
    stem = job_seed, purpose, iteration, group
    seeds = (derived_seed(*stem, attempt, below=HELD_OUT_FROM) for attempt in count())
    return next(seed for seed in seeds if seed not in held_out)


def cycled_worlds(job_seed: int, purpose: str, seeds: Sequence[World], numbers: range) -> list[World]:
    """Return worlds of a fixed set in shuffled epochs: each is played once before any repeats.

    `seeds` is the set, or the ids of rows, in any order; `numbers` are indices of the endless sequence.
    """
    size = len(seeds)
    epochs = {number // size for number in numbers}
    orders = {epoch: _shuffled(seeds, job_seed, purpose, "epoch", epoch) for epoch in epochs}
    return [orders[number // size][number % size] for number in numbers]


def other_worlds(
    job_seed: int, seeds: Sequence[World], *, iteration: int, played: Collection[World]
) -> list[World]:
    """Return a fixed set in the order in which an iteration refills its batch: unplayed worlds first."""
    order = _shuffled(seeds, job_seed, "refill", iteration)
    return sorted(order, key=lambda world: world in played)


def _shuffled(seeds: Sequence[World], *parts: int | str) -> list[World]:
    return sorted(seeds, key=lambda seed: derived_seed(*parts, seed))


def evaluation_worlds(instances: int, explicit: Sequence[int] = ()) -> Sequence[int]:
    """Return the world seeds of the evaluation: the given ones, or the first `instances` held-out ones.

    They are the same for every job, so that jobs can be compared world by world.
    """
    # A range, because membership tests take no memory and constant time.
    return explicit or range(HELD_OUT_FROM, HELD_OUT_FROM + instances)
