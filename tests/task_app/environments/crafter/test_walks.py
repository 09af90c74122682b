"""The search for walks, on maps drawn by chance."""

from hypothesis import given, settings
from hypothesis import strategies as st

from task_app.environments.crafter.grid import FACINGS
from task_app.environments.crafter.walks import (
    GROUND,
    Ground,
    Trails,
    cell_at,
    find_trails,
    locate,
    step,
    walk_to,
)

maps = st.lists(
    st.sampled_from(["grass", "grass", "sand", "path", "stone", "water"]), min_size=35, max_size=35
)


def build_ground(names: list[str]) -> Ground:
    """7x5 names around a player in the middle."""
    cells = {cell_at(number % 7, number // 7): name for number, name in enumerate(names)}
    return Ground(cells | {cell_at(3, 2): "player"}, player=cell_at(3, 2), facing="down")


def surcharge(ground: Ground, cell: int, *, can_dig: bool) -> float:
    """Env steps to go on from a cell that one stands before: 1, 3 through stone, never through water."""
    if ground.at(cell) in GROUND or cell == ground.player:
        return 1
    return 3 if can_dig and ground.at(cell) == "stone" else float("inf")


@settings(max_examples=60, deadline=None)
@given(maps, st.booleans())
def test_no_neighbour_offers_a_cheaper_or_straighter_way_than_the_one_taken(names, can_dig):
    ground = build_ground(names)
    trails = find_trails(ground, can_dig=can_dig)
    ranks = [(cost, turns, locate(cell)) for cell, (cost, turns, *_) in trails.items()]
    assert ranks == sorted(ranks)  # in the order in which they are preferred
    for cell in ground.cells.keys() - {ground.player}:
        offers = [
            (cost + surcharge(ground, at, can_dig=can_dig), turns + (came not in ("", name)))
            for at, (cost, turns, came, _) in trails.items()
            for name in FACINGS
            if step(at, name) == cell
        ]
        best = min(offers, default=(float("inf"), 0))
        assert trails[cell][:2] == best if best[0] < float("inf") else cell not in trails


@settings(max_examples=60, deadline=None)
@given(maps, st.booleans())
def test_the_legs_of_a_whole_walk_lead_to_its_cell_and_dig_where_stone_is(names, can_dig):
    ground = build_ground(names)
    trails: Trails = find_trails(ground, can_dig=can_dig)
    for cell in trails.keys() - {ground.player}:
        walk, at = walk_to(ground, trails, cell, max_cells=100), ground.player
        for leg in walk.legs:
            for _ in range(leg.count):
                at = step(at, leg.direction)
                assert leg.dig == (ground.at(at) == "stone" and at != cell)
        assert at == cell and not walk.more


def test_a_cell_has_one_number_and_numbers_compare_as_places_do():
    places = [(x, y) for x in range(-8, 120) for y in range(-8, 120)]
    assert [locate(cell_at(x, y)) for x, y in places] == places
    assert [cell_at(x, y) for x, y in places] == sorted(cell_at(x, y) for x, y in places)
