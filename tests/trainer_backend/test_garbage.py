"""Cyclic garbage is looked for seldom while a batch grows, and as before afterwards."""

import gc
from contextlib import ExitStack

import pytest

from trainer_backend.garbage import while_a_batch_grows


def full_collections() -> int:
    return int(gc.get_stats()[2]["collections"])


def test_no_full_collection_runs_while_a_batch_grows_and_young_garbage_goes() -> None:
    usual = gc.get_threshold()
    with while_a_batch_grows():
        before, collected = full_collections(), gc.get_stats()[0]["collected"]
        batch = [[i] for i in range(400_000)]
        assert full_collections() == before
        for _ in range(50_000):
            cycle: list[object] = []
            cycle.append(cycle)
        assert gc.get_stats()[0]["collected"] > collected
    assert gc.get_threshold() == usual and len(batch) == 400_000


def test_the_last_of_overlapping_stages_restores_the_schedule() -> None:
    usual = gc.get_threshold()
    first, second = ExitStack(), ExitStack()
    first.enter_context(while_a_batch_grows())
    during = gc.get_threshold()
    second.enter_context(while_a_batch_grows())
    first.close()
    assert gc.get_threshold() == during != usual
    with pytest.raises(RuntimeError), second:
        raise RuntimeError("a stage fails")
    assert gc.get_threshold() == usual
