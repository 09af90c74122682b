"""The engine is stock crafter with one ordering fix, and the same in every process."""

import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from task_app.environments.crafter import picture
from task_app.environments.crafter.engine import CrafterEngine, EpisodeOver, NotReset, daylight_at
from task_app.environments.crafter.rules import ACHIEVEMENTS, ACTIONS, RULES
from tests.task_app.environments.crafter.hand_made import MIDNIGHT, act, draws_between, meadow, put
from tests.task_app.environments.crafter.reference import (
    Duel,
    compare_episode,
    differences,
    reference_state,
)

ROOT = Path(__file__).resolve().parents[4]


def played_games() -> list[str]:
    """The fingerprints of two games of 300 steps."""
    prints = []
    for seed in (3, 11):
        engine, rng = CrafterEngine(seed), np.random.default_rng(seed)
        engine.reset()
        for _ in range(300):
            engine.inventory.update(health=9, food=9, drink=9, energy=9)
            engine.act(int(rng.integers(17)))
        prints.append(engine.fingerprint())
    return prints


def textures() -> int:
    """How many pictures this process has read."""
    return picture._textures.cache_info().currsize


def test_random_play_equals_stock_in_everything_from_the_new_world_on():
    duel, steps = compare_episode(2**31 - 2, 250)
    assert not duel.unequal
    assert steps > 50


def test_play_with_refilled_inventory_equals_stock_and_crafts_and_places_everything():
    duel, steps = compare_episode(1, 300, refill_every=7)
    assert not duel.unequal
    assert steps == 300
    crafted = {name for name, count in duel.engine.achievements.items() if count > 0}
    assert {"place_table", "place_furnace", "place_plant", "make_iron_pickaxe", "make_stone_sword"} <= crafted


def test_a_process_with_another_hash_seed_plays_the_same_games_and_loads_no_picture():
    hash_seed = "1" if os.environ.get("PYTHONHASHSEED") == "4242" else "4242"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    code = f"from {__name__} import played_games, textures; print(played_games(), textures())"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout == f"{played_games()} 0\n"


def test_a_stored_fingerprint_of_one_game_still_holds():
    # Made on x86-64 (AVX-512), numpy 2.4.6. Elsewhere a difference may mean that exp() rounds otherwise.
    engine, rng = CrafterEngine(7), np.random.default_rng(7)
    engine.reset()
    start = engine.fingerprint()
    for _ in range(120):
        engine.act(int(rng.integers(17)))
    assert (start[:16], engine.fingerprint()[:16]) == ("70c53395cfb3a960", "a96b8f90f874749e")


def test_reset_gives_the_same_world_again():
    engine = CrafterEngine(9)
    engine.reset()
    first = engine.fingerprint()
    act(engine, "move_left", "do", "noop")
    assert engine.fingerprint() != first
    engine.reset()
    assert engine.fingerprint() == first
    assert engine.step_count == 0


def test_a_fork_goes_on_alike_and_on_its_own():
    engine = CrafterEngine(2)
    engine.reset()
    act(engine, *["move_left", "do", "move_up", "noop"] * 10)
    fork = engine.fork()
    before = engine.fingerprint()
    act(fork, *["move_right", "do", "sleep"] * 15)
    assert engine.fingerprint() == before
    act(engine, *["move_right", "do", "sleep"] * 15)
    assert engine.fingerprint() == fork.fingerprint()


def test_a_frame_is_the_picture_of_stock_and_changes_nothing():
    duel = Duel(1)
    for step in range(190):
        duel.refill(("health", "food", "drink"))
        duel.step(step % 5)
    # From here on into the first night, awake and asleep.
    for tired in (False, True):
        night = deepcopy(duel)
        if tired:
            night.engine.inventory["energy"] = night.reference._player.inventory["energy"] = 3
        for step in range(15):
            night.refill(("health", "food", "drink"))
            night.step(ACTIONS.index("sleep") if tired else step % 5)
        engine, reference = night.engine, night.reference
        assert engine.world.daylight < 0.5
        assert engine.player.sleeping is tired
        before = engine.fingerprint()
        frame = engine.frame(200, 150)  # not a multiple of 9, not a square
        assert engine.fingerprint() == before
        assert frame.shape == (150, 200, 3)
        assert frame.dtype == np.uint8
        np.testing.assert_array_equal(frame, reference.render((200, 150)))
        # Stock's own extra picture took draws from the game.
        assert differences(engine.capture(), reference_state(reference)) != []


def test_a_picture_of_less_than_a_pixel_a_cell_is_refused():
    with pytest.raises(ValueError, match="at least 9x9"):
        meadow().frame(8, 100)


def test_two_unlocks_in_one_step_are_worth_one():
    engine = meadow()
    put(engine, "tree", 32, 33)
    engine._player.sleeping = True  # fully rested: wakes up and acts in the same step
    assert act(engine, "do") == 1.0
    assert engine.achievements["wake_up"] == engine.achievements["collect_wood"] == 1


def test_only_the_first_time_of_an_achievement_is_rewarded():
    engine = meadow()
    put(engine, "tree", 32, 33)
    assert act(engine, "do") == 1.0
    put(engine, "tree", 32, 33)
    assert act(engine, "do") == 0.0
    assert engine.achievements["collect_wood"] == 2


def test_the_end_by_death_and_the_end_by_length_are_told_apart():
    engine = meadow()
    put(engine, "lava", 33, 32)
    assert act(engine, "move_right") == pytest.approx(-0.9)
    assert (engine.dead, engine.over) == (True, True)
    short = meadow(step=4, length=5)
    act(short, "noop")
    assert (short.dead, short.over) == (False, True)


def test_steps_at_the_wrong_time_raise_errors_of_their_own():
    engine = CrafterEngine(0, length=1)
    for early in (lambda: engine.act(0), engine.view, engine.fingerprint, lambda: engine.inventory):
        with pytest.raises(NotReset, match="reset"):
            early()
    assert (engine.dead, engine.over) == (False, False)
    engine.reset()
    with pytest.raises(ValueError, match=r"0 \.\. 16"):
        engine.act(17)
    engine.act(0)
    with pytest.raises(EpisodeOver, match="step 1"):
        engine.act(0)


@pytest.mark.parametrize(
    ("name", "value"),
    [*(("seed", seed) for seed in (-1, 2**31 - 1, True, 1.0, "7", None)), ("length", 0)],
)
def test_a_seed_or_length_that_is_no_int_in_range_is_refused(name: str, value: Any):
    with pytest.raises(ValueError, match=f"{name} must be an int"):
        CrafterEngine(**{"seed": 0, name: value})


def test_step_is_act_in_the_shape_of_gym():
    engine = meadow(step=4, length=5)
    observation, reward, over, info = engine.step(ACTIONS.index("move_right"))
    assert (observation, reward, over) == (None, 0.0, True)
    assert info == {
        "inventory": engine.inventory,
        "achievements": dict.fromkeys(ACHIEVEMENTS, 0),
        "discount": 1.0,
        "player_pos": (33, 32),
        "reward": 0.0,
    }
    assert info["inventory"] is not engine.inventory
    assert engine.render().shape == (64, 64, 3)


def test_a_dark_step_consumes_the_draws_of_stocks_night_picture():
    # 9x7 cells of 7x7 pixels, a double each; the meadow has no creatures, so nothing else draws
    night, day = meadow(step=MIDNIGHT), meadow()
    before_night, before_day = night.fork(), day.fork()
    act(night, "noop")
    act(day, "noop")
    assert draws_between(before_night, night) == 63 * 49
    assert draws_between(before_day, day) == 0


def test_daylight_follows_stocks_formula():
    for step in (0, 1, 137, 299, 300, 9_999):
        progress = (step / 300) % 1 + 0.3
        assert daylight_at(step) == 1 - np.abs(np.cos(np.pi * progress)) ** 3


def test_the_rules_are_those_of_the_installed_package():
    assert (len(ACTIONS), len(ACHIEVEMENTS), len(RULES.item_max)) == (17, 22, 16)
    assert RULES.place["table"].uses == {"wood": 2}
    assert RULES.place["furnace"].uses == {"stone": 4}
    assert RULES.make["iron_pickaxe"].nearby == ("table", "furnace")
    assert RULES.collect["diamond"].requires == {"iron_pickaxe": 1}
    assert RULES.collect["grass"].probability == 0.1
