"""The view is what the picture shows: 7 rows of 9 cells, the top row first."""

import numpy as np

from task_app.environments.crafter.environment import CrafterEnvironment
from task_app.environments.crafter.objects import Arrow, Cow, Plant, Skeleton, Zombie
from task_app.environments.crafter.picture import _textures
from tests.task_app.environments.crafter.hand_made import act, meadow, put


def test_the_view_is_seven_rows_of_nine_with_the_player_in_the_centre():
    view = meadow().view()
    assert [len(row) for row in view.rows] == [9] * 7
    assert view.rows[3][4] == "player"
    assert view.materials[3][4] == "grass"
    assert sum(row.count("grass") for row in view.rows) == 62


def test_what_lies_up_and_right_stands_up_and_right_in_the_rows():
    engine = meadow()
    put(engine, "table", 34, 31)  # two to the right, one up
    assert engine.view().rows[2][6] == "table"


def test_the_rows_lie_as_the_picture_shows_them():
    engine = meadow()
    put(engine, "table", 34, 31)
    frame = engine.frame(16 * 9, 16 * 9)
    row, column = next((r, c) for r in range(7) for c in range(9) if engine.view().rows[r][c] == "table")
    cell = frame[16 * row : 16 * (row + 1), 16 * column : 16 * (column + 1)].astype(int)
    table = _textures().get("table", (16, 16)).transpose(1, 0, 2)[..., :3].astype(int)
    assert np.abs(cell - table).mean() < 15  # by day; any other texture is far off
    assert np.abs(frame[16 * 4 : 16 * 5, 16 * column : 16 * (column + 1)] - table).mean() > 30


def test_beyond_the_edge_of_the_world_lies_void():
    view = meadow((1, 62)).view()
    assert [row[:4] for row in view.rows[:4]] == [("void", "void", "void", "grass")] * 4
    assert view.rows[4][3:] == ("grass",) * 6
    assert view.rows[5:] == (("void",) * 9,) * 2
    assert view.materials[5:] == (("void",) * 9,) * 2


def test_the_target_at_the_edge_is_void():
    engine = meadow((0, 0))
    act(engine, "move_up")
    assert engine.view().target == "void"


def test_the_target_is_the_creature_and_else_the_material():
    engine = meadow()
    put(engine, "water", 32, 33)
    assert engine.view().target == "water"
    put(engine, Cow(31, 32))
    engine._player.facing = (-1, 0)
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


def test_a_creature_just_outside_the_picture_is_not_seen():
    engine = meadow()
    for x, y in ((27, 32), (37, 32), (32, 28), (32, 36)):
        put(engine, Zombie(x, y))
    assert not any("zombie" in row for row in engine.view().rows)


def test_an_observation_is_a_copy_that_later_steps_leave_alone():
    environment = CrafterEnvironment()
    data = environment.reset(3).data
    environment._engine.inventory["wood"] = 5
    assert data["inventory"]["wood"] == 0
    assert len(data["inventory"]) == 16
