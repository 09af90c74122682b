"""The engine is stock crafter with one ordering fix, with its surprises, its worlds and its view."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import opensimplex
import pytest

from task_app.environments.crafter.engine import CrafterEngine, EpisodeOver, NotReset
from task_app.environments.crafter.environment import CrafterEnvironment
from task_app.environments.crafter.noise import LAYERS, _layer_points, geometry, noise_layers
from task_app.environments.crafter.objects import Arrow, Cow, Plant, Skeleton, Zombie
from task_app.environments.crafter.rules import ACTIONS
from tests.task_app.environments.crafter.hand_made import (
    MIDNIGHT,
    act,
    draws_between,
    fingerprint,
    fork,
    ground,
    meadow,
    played_game,
    put,
)
from tests.task_app.environments.crafter.reference import Duel, compare_episode, differences, reference_state

ROOT = Path(__file__).resolve().parents[4]
# Stock needs two seconds for a world, so there is one: of the largest seed.
SEED = 2**31 - 2


def test_random_play_equals_stock_in_everything_from_the_new_world_on():
    duel, steps = compare_episode(SEED, 120)
    assert not duel.unequal
    assert steps > 50


def test_play_with_refilled_inventory_equals_stock_and_crafts_and_places_everything():
    duel, steps = compare_episode(SEED, 300, refill_every=7)
    assert not duel.unequal
    assert steps == 300
    crafted = {name for name, count in duel.engine.achievements.items() if count > 0}
    assert {"place_table", "place_furnace", "place_plant", "make_iron_pickaxe", "make_stone_sword"} <= crafted


def test_a_process_with_another_hash_seed_plays_the_same_game_and_loads_no_picture():
    hash_seed = "1" if os.environ.get("PYTHONHASHSEED") == "4242" else "4242"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    code = (
        "from tests.task_app.environments.crafter.hand_made import _textures, played_game\n"
        "print(played_game(), _textures.cache_info().currsize)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout == f"{played_game()} 0\n"


def test_a_frame_is_the_picture_of_stock_and_changes_nothing():
    duel = Duel(SEED)
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
        before = fingerprint(engine)
        frame = engine.frame(200, 150)  # not a multiple of 9, not a square
        assert fingerprint(engine) == before
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
    engine.player.sleeping = True  # fully rested: wakes up and acts in the same step
    assert act(engine, "do") == 1.0
    assert engine.achievements["wake_up"] == engine.achievements["collect_wood"] == 1


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
    for early in (lambda: engine.act(0), engine.view, engine.capture, lambda: engine.inventory):
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
    ("name", "value"), [*(("seed", seed) for seed in (-1, 2**31 - 1, True, 1.0, "7", None)), ("length", 0)]
)
def test_a_seed_or_length_that_is_no_int_in_range_is_refused(name: str, value: Any):
    with pytest.raises(ValueError, match=f"{name} must be an int"):
        CrafterEngine(**{"seed": 0, name: value})


def test_a_dark_step_consumes_the_draws_of_stocks_night_picture():
    # 9x7 cells of 7x7 pixels, a double each; the meadow has no creatures, so nothing else draws
    night, day = meadow(step=MIDNIGHT), meadow()
    before_night, before_day = fork(night), fork(day)
    act(night, "noop")
    act(day, "noop")
    assert draws_between(before_night, night) == 63 * 49
    assert draws_between(before_day, day) == 0


@pytest.mark.parametrize("seed", [0, 1234567, 2**31 - 2])
def test_every_layer_equals_the_opensimplex_package_to_the_last_bit(seed: int):
    simplex, layers = opensimplex.OpenSimplex(seed), noise_layers(seed)
    cells = np.random.default_rng(seed).choice(64 * 64, size=250, replace=False)
    for name in LAYERS:
        x_N, y_N, z_N = _layer_points(name)
        expected = [simplex.noise3(float(x_N[c]), float(y_N[c]), float(z_N[c])) for c in cells]
        assert layers[name][cells].tolist() == expected, name


def test_worlds_made_at_the_same_time_compute_the_geometry_once():
    geometry.cache_clear()
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(noise_layers, range(8)))
    assert geometry.cache_info().misses == 1


@pytest.mark.parametrize("place", [(0, 32), (32, 0), (1, 32), (32, 1), (63, 32), (32, 63)])
def test_crafting_fails_in_the_leftmost_column_and_the_top_row_only(place: tuple[int, int]):
    engine = meadow(place)
    x, y = place
    put(engine, "table", x if x else 1, y - 1 if y else 1)
    engine.inventory["wood"] = 1
    act(engine, "make_wood_pickaxe")
    assert engine.inventory["wood_pickaxe"] == int(x > 0 and y > 0)
    assert engine.inventory["wood"] + engine.inventory["wood_pickaxe"] == 1


def test_a_killed_zombie_still_hits_once_in_its_last_update():
    engine = meadow()
    zombie = Zombie(32, 33)
    zombie.health = 1
    put(engine, zombie)
    reward = act(engine, "do")
    assert zombie.removed
    assert engine.inventory["health"] == 7
    assert reward == pytest.approx(1.0 - 0.2)  # defeat_zombie, and two lost health points


@pytest.mark.parametrize("what", ["table", "furnace"])
def test_an_arrow_turns_a_table_or_furnace_into_path(what: str):
    engine = meadow()
    put(engine, what, 35, 30)
    put(engine, Arrow(34, 30, (1, 0)))
    act(engine, "noop")
    assert ground(engine, 35, 30) == "path"
    assert engine.capture().things == ()


def test_an_arrow_hits_the_player_for_two_and_is_gone_as_is_one_that_leaves_the_world():
    engine, edge = meadow(), meadow((3, 3))
    put(engine, Arrow(32, 34, (0, -1)))
    assert act(engine, "noop") == 0.0
    assert act(engine, "noop") == pytest.approx(-0.2)
    put(edge, Arrow(0, 5, (-1, 0)))
    act(edge, "noop")
    assert engine.capture().things == edge.capture().things == ()


def test_a_dead_skeleton_believes_that_it_moved_and_so_does_not_shoot():
    # Stock reports a step onto a free cell even for a removed creature: a draw for the axis, none for a shot.
    engine = meadow()
    skeleton = Skeleton(34, 32)
    skeleton.health = 0
    put(engine, skeleton)
    before = fork(engine)
    act(engine, "noop")
    assert engine.capture().things == ()
    assert draws_between(before, engine) == 1


def test_an_unripe_plant_takes_no_harm_and_a_ripe_one_feeds():
    engine = meadow()
    plant = Plant(32, 33)
    put(engine, plant)
    engine.inventory["food"] = 3
    act(engine, "do")
    assert (engine.inventory["food"], engine.achievements["eat_plant"]) == (3, 0)
    plant.grown = 301
    act(engine, "do")
    assert (engine.inventory["food"], engine.achievements["eat_plant"], plant.grown) == (7, 1, 1)


def test_beyond_the_edge_of_the_world_lies_void():
    view = meadow((1, 62)).view()
    assert [row[:4] for row in view.rows[:4]] == [("void", "void", "void", "grass")] * 4
    assert view.rows[4][3:] == ("grass",) * 6
    assert view.rows[5:] == (("void",) * 9,) * 2
    assert view.materials[5:] == (("void",) * 9,) * 2


def test_the_target_is_the_creature_or_else_the_material_or_void():
    engine, corner = meadow(), meadow((0, 0))
    act(corner, "move_up")
    assert corner.view().target == "void"
    put(engine, "water", 32, 33)
    assert engine.view().target == "water"
    put(engine, Cow(31, 32))
    engine.player.facing = (-1, 0)
    view = engine.view()
    assert view.target == "cow"
    assert (view.rows[3][3], view.materials[3][3]) == ("cow", "grass")


def test_every_kind_has_its_name_and_a_ripe_plant_looks_ripe():
    engine = meadow()
    ripe = Plant(33, 30)
    ripe.grown = 301
    for thing in (Cow(28, 29), Zombie(36, 29), Skeleton(28, 35), Arrow(36, 35), Plant(32, 30), ripe):
        put(engine, thing)
    rows = engine.view().rows
    assert (rows[0][0], rows[0][8], rows[6][0], rows[6][8]) == ("cow", "zombie", "skeleton", "arrow")
    assert (rows[1][4], rows[1][5]) == ("plant", "ripe-plant")


def test_the_view_is_seven_rows_of_nine_with_the_player_in_the_centre():
    engine = meadow()
    for x, y in ((27, 32), (37, 32), (32, 28), (32, 36)):
        put(engine, Zombie(x, y))  # just outside
    view = engine.view()
    assert [len(row) for row in view.rows] == [9] * 7
    assert (view.rows[3][4], view.materials[3][4]) == ("player", "grass")
    assert sum(row.count("grass") for row in view.rows) == 62


def test_an_observation_is_a_copy_that_later_steps_leave_alone():
    environment = CrafterEnvironment()
    data = environment.reset(3).data
    environment._engine.inventory["wood"] = 5
    assert data["inventory"]["wood"] == 0
    assert len(data["inventory"]) == 16
