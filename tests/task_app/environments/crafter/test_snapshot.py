"""Snapshots: JSON there and back, and nothing impossible is let in."""

import base64
import json
import zlib
from typing import Any

import numpy as np
import pytest

from task_app.environments.crafter.engine import CrafterEngine
from task_app.environments.crafter.snapshot import from_state, to_state


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
    restored = from_state(json.loads(json.dumps(to_state(engine))))
    assert restored.fingerprint() == engine.fingerprint()
    rng = np.random.default_rng(99)
    for action in rng.integers(17, size=60).tolist():
        if engine.over:
            break
        assert restored.act(action) == engine.act(action)
        assert restored.view() == engine.view()
    assert restored.fingerprint() == engine.fingerprint()


def test_a_snapshot_is_small():
    assert len(json.dumps(to_state(played(1, 200)))) < 8_000


@pytest.fixture(scope="module")
def good() -> dict[str, Any]:
    return to_state(played(4, 20))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format"),
        ({"surprise": 1}, "surprise"),
        ({"seed": -1}, "seed must be an int"),
        ({"ground": "***"}, "ground is not base64"),
        ({"ground": base64.b64encode(b"no zlib").decode()}, "does not decompress"),
        ({"ground": base64.b64encode(zlib.compress(bytes(10**6))).decode()}, "must hold 4096 materials"),
        ({"words": base64.b64encode(b"1234").decode()}, "words must hold 624"),
        ({"word_position": 625}, "word_position"),
        ({"facing": [1, 1]}, "facing"),
        ({"things": [[9, 1, 1, 1]]}, "known kinds"),
        ({"things": [[1, 70, 1, 1]]}, "outside the world"),
        ({"things": [[1, 5, 5, 1], [1, 5, 5, 1]]}, "taken cell"),
        ({"things": [[4, 5, 5, 0, 7, 7]]}, "arrow flying"),
        ({"inventory": {"health": 9}}, "missing or unknown names"),
        ({"hidden": [0.0]}, "hidden"),
        ({"hidden": [float("nan")] * 5}, "hidden"),
    ],
)
def test_an_impossible_snapshot_is_refused_with_its_place(
    good: dict[str, Any], change: dict[str, Any], message: str
):
    with pytest.raises(ValueError, match=message):
        from_state({**good, **change})
