"""Surprising behaviour of stock crafter that the engine must keep."""

import numpy as np
import pytest

from task_app.environments.crafter.objects import Arrow, Cow, Plant, Skeleton, Zombie
from task_app.environments.crafter.world import seeded_bits
from tests.task_app.environments.crafter.hand_made import act, draws_between, ground, meadow, put


@pytest.mark.parametrize(
    ("place", "works"),
    [
        ((0, 32), False),
        ((32, 0), False),
        ((1, 32), True),
        ((32, 1), True),
        ((63, 32), True),
        ((32, 63), True),
    ],
)
def test_crafting_fails_in_the_leftmost_column_and_the_top_row_only(place: tuple[int, int], works: bool):
    engine = meadow(place)
    x, y = place
    put(engine, "table", x if x else 1, y - 1 if y else 1)
    engine.inventory["wood"] = 1
    act(engine, "make_wood_pickaxe")
    assert engine.inventory["wood_pickaxe"] == int(works)
    assert engine.inventory["wood"] == 1 - int(works)


def test_a_killed_zombie_still_hits_once_in_its_last_update():
    engine = meadow()
    zombie = Zombie(32, 33)
    zombie.health = 1
    put(engine, zombie)
    reward = act(engine, "do")
    assert zombie.removed
    assert engine.inventory["health"] == 7
    assert reward == pytest.approx(1.0 - 0.2)  # defeat_zombie, and two lost health points


def test_collecting_draws_a_number_even_where_it_cannot_fail():
    engine = meadow()
    put(engine, "tree", 32, 33)
    before = engine.fork()
    act(engine, "do")
    assert engine.inventory["wood"] == 1
    assert draws_between(before, engine) == 1


def test_a_chunk_that_never_held_anything_is_never_balanced():
    engine = meadow(step=9)
    before = engine.fork()
    act(engine, "noop")  # step 10; only the player's own chunk is looked at
    assert engine.capture().chunks == (2 * 6 + 2,)
    # A cow is missing there, which is one draw; over all 36 chunks of the meadow it would be 36 or more.
    assert draws_between(before, engine) == 1


def test_chunks_are_kept_in_the_order_of_the_first_thing_in_them():
    engine = meadow((35, 32))
    put(engine, Cow(5, 60))
    act(engine, "move_right")  # from the chunk of columns 24-35 into that of 36-47
    assert engine.capture().chunks == (2 * 6 + 2, 0 * 6 + 5, 3 * 6 + 2)


@pytest.mark.parametrize("what", ["table", "furnace"])
def test_an_arrow_turns_a_table_or_furnace_into_path(what: str):
    engine = meadow()
    put(engine, what, 35, 30)
    put(engine, Arrow(34, 30, (1, 0)))
    act(engine, "noop")
    assert ground(engine, 35, 30) == "path"
    assert engine.capture().things == ()


def test_an_arrow_hits_the_player_for_two_and_is_gone():
    engine = meadow()
    put(engine, Arrow(32, 34, (0, -1)))
    assert act(engine, "noop") == 0.0
    assert act(engine, "noop") == pytest.approx(-0.2)
    assert engine.capture().things == ()


def test_an_arrow_that_leaves_the_world_is_gone():
    engine = meadow((3, 3))
    put(engine, Arrow(0, 5, (-1, 0)))
    act(engine, "noop")
    assert engine.capture().things == ()


def test_a_dead_skeleton_believes_that_it_moved_and_so_does_not_shoot():
    # Stock reports a step onto a free cell even for a removed creature: a draw for the axis, none for a shot.
    engine = meadow()
    skeleton = Skeleton(34, 32)
    skeleton.health = 0
    put(engine, skeleton)
    before = engine.fork()
    act(engine, "noop")
    assert engine.capture().things == ()
    assert draws_between(before, engine) == 1


def test_a_sapling_waits_a_step_before_it_grows():
    engine = meadow()
    engine.inventory["sapling"] = 1
    act(engine, "place_plant")
    assert engine.capture().things == ((5, 32, 33, 1, 0),)
    act(engine, "noop")
    assert engine.capture().things == ((5, 32, 33, 1, 1),)


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


def test_things_eighteen_steps_away_stand_still():
    engine = meadow()
    near, far = Plant(32 + 17, 32), Plant(32 - 18, 32)
    put(engine, near)
    put(engine, far)
    act(engine, "noop")
    assert (near.grown, far.grown) == (1, 0)


def test_the_two_lowest_bits_of_a_raw_word_are_randint_of_four():
    bits, random = seeded_bits(5), np.random.RandomState(5)
    assert [bits.random_raw() & 3 for _ in range(500)] == [random.randint(0, 4) for _ in range(500)]
