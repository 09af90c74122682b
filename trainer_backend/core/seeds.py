"""Derives every seed of a job from the job's seed and a purpose. Pure.

A *world* is the start of an episode that a seed determines. By default, training worlds have seeds below
HELD_OUT_FROM and evaluation worlds have seeds from HELD_OUT_FROM on, so they never overlap.
"""

from collections.abc import Collection, Sequence
from hashlib import blake2b
from itertools import count
from typing import TypeVar

HELD_OUT_FROM = 2**30
_SEED_LIMIT = 2**31 - 1
# What names a start of an episode: the seed of a world, or the id of a row of a data set.
World = TypeVar("World", int, str)


def derived_seed(*parts: int | str, below: int = _SEED_LIMIT) -> int:
    """Hash the parts to a number in [0, below), which is the same in every process and on every platform."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") % below


def training_world(job_seed: int, purpose: str, iteration: int, group: int, held_out: Collection[int]) -> int:
    """Return the world seed of a training group: in [0, HELD_OUT_FROM) and not in `held_out`."""
    stem = job_seed, purpose, iteration, group
    seeds = (derived_seed(*stem, attempt, below=HELD_OUT_FROM) for attempt in count())
    return next(seed for seed in seeds if seed not in held_out)


def cycled_worlds(job_seed: int, purpose: str, seeds: Sequence[World], numbers: range) -> list[World]:
    """Return the items at the indices `numbers` of an endless sequence that repeats a fixed set of worlds.

    The sequence consists of epochs. Each epoch contains every world once, in a new random order. `seeds` are
    the worlds, or the ids of the rows of a data set, in any order.
    """
    size = len(seeds)
    epochs = {number // size for number in numbers}
    orders = {epoch: _shuffled(seeds, job_seed, purpose, "epoch", epoch) for epoch in epochs}
    return [orders[number // size][number % size] for number in numbers]


def other_worlds(
    job_seed: int, seeds: Sequence[World], *, iteration: int, played: Collection[World]
) -> list[World]:
    """Return the worlds `seeds`, for refilling a batch, in a random order but with those in `played` last."""
    order = _shuffled(seeds, job_seed, "refill", iteration)
    return sorted(order, key=lambda world: world in played)


def _shuffled(seeds: Sequence[World], *parts: int | str) -> list[World]:
    return sorted(seeds, key=lambda seed: derived_seed(*parts, seed))


def evaluation_worlds(instances: int, explicit: Sequence[int] = ()) -> Sequence[int]:
    """Return the world seeds of the evaluation: `explicit`, or else the first `instances` held-out seeds.

    The held-out seeds are the same for every job, so that jobs can be compared world by world.
    """
    # A range tests membership in constant time, without storing the seeds.
    return explicit or range(HELD_OUT_FROM, HELD_OUT_FROM + instances)
