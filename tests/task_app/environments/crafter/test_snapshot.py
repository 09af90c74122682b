"""Snapshots of a game: bytes there and back, and nothing impossible is let in."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from task_app.environments.crafter.engine import CrafterEngine
from task_app.environments.crafter.prompt import NO_NEWS
from task_app.environments.crafter.snapshot import GROUND_BYTES, pack, unpack
from tests.task_app.environments.crafter.hand_made import fingerprint

Change = Callable[[bytes], bytes]


def played(seed: int, steps: int) -> CrafterEngine:
    engine, rng = CrafterEngine(seed), np.random.default_rng(seed)
    engine.reset()
    for step in range(steps):
        engine.inventory.update(health=9, food=9, drink=9, energy=9 if step % 40 else 2, sapling=9, stone=9)
        engine.act(int(rng.integers(17)))
    return engine


@pytest.mark.parametrize(("seed", "steps"), [(0, 0), (1, 57), (2, 230), (3, 301)])
def test_a_restored_game_goes_on_like_the_original(seed: int, steps: int):
    engine = played(seed, steps)
    restored, *_ = unpack(pack(engine, reward=0.0, news=NO_NEWS))
    assert fingerprint(restored) == fingerprint(engine)
    rng = np.random.default_rng(99)
    for action in rng.integers(17, size=60).tolist():
        if engine.over:
            break
        assert restored.act(action) == engine.act(action)
        assert restored.view() == engine.view()
    assert fingerprint(restored) == fingerprint(engine)


def test_what_the_last_observation_told_comes_back():
    news = {"unlocked": ["wake_up"], "health_change": -2, "no_effect": True, "invalid": "half \ud83d"}
    _, reward, told, _ = unpack(pack(played(1, 3), reward=-0.2, news=news))
    assert (reward, told) == (-0.2, news | {"invalid": "half ?"})


@pytest.fixture(scope="module")
def good() -> bytes:
    return pack(played(4, 20), reward=0.0, news=NO_NEWS)


def head(**fields: Any) -> Change:
    """The snapshot with other fields in its first line."""

    def change(data: bytes) -> bytes:
        line, _, rest = data.partition(b"\n")
        return json.dumps({**json.loads(line), **fields}).encode() + b"\n" + rest

    return change


def ground(material: int) -> Change:
    """The snapshot with another material in the last cell of the ground."""

    def change(data: bytes) -> bytes:
        line, _, rest = data.partition(b"\n")
        return line + b"\n" + rest[: GROUND_BYTES - 1] + bytes([material]) + rest[GROUND_BYTES:]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (head(format=2), "snapshot.format"),
        (head(surprise=1), "snapshot.surprise"),
        (head(memory={"step": 3, "cells": [[0, 200, "grass"]]}), "snapshot.memory.cells"),
        (head(seed=-1), "seed must be an int"),
        (head(step=10**400), "snapshot.step"),
        (head(achievements={"fly": 10**400}), "snapshot.achievements.fly"),
        (ground(0), "ground must hold materials"),
        (ground(200), "ground must hold materials"),
        (lambda data: data[:-1], "holds 6591 bytes after its first line"),
        (lambda data: data + b"x", "holds 6593 bytes after its first line"),
        (lambda data: b"{}" + data, "trailing characters"),
        (lambda data: b"", "EOF"),
        (head(word_position=625), "word_position"),
        (head(facing=[1, 1]), "facing"),
        (head(things=[[9, 1, 1, 1]]), "known kinds"),
        (head(things=[[1, 70, 1, 1]]), "outside the world"),
        (head(things=[[1, 5, 5, 1], [1, 5, 5, 1]]), "taken cell"),
        (head(things=[[4, 5, 5, 0, 7, 7]]), "arrow flying"),
        (head(inventory={"health": 9}), "missing or unknown names"),
        (head(hidden=[0.0]), "hidden"),
        (head(hidden=[float("nan")] * 5), "hidden"),
        (head(reward=float("inf")), "snapshot.reward"),
        (head(news={**NO_NEWS, "unlocked": ["flying"]}), "snapshot.news.unlocked"),
    ],
)
def test_an_impossible_snapshot_is_refused_with_its_place(good: bytes, change: Change, message: str):
    with pytest.raises(ValueError, match=message):
        unpack(change(good))
