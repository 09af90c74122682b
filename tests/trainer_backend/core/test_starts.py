"""Which snapshots of a run are kept, and which are started from: numbers worked by hand."""

from dataclasses import replace

import pytest

from trainer_backend.core.starts import (
    STARTS,
    Candidate,
    CurriculumKeys,
    Moment,
    Pool,
    Starts,
    candidates,
    find_cells,
    frontier,
    kept,
    late,
    uncertain,
)

KEYS = CurriculumKeys(pool=4)
WOOD, BOTH = ("wood",), ("stone", "wood")


def moment(number: int, achieved: tuple[str, ...] = (), *, turn: int = 1, size: int = 10) -> Moment:
    rollout = f"train/1/0/{number}"
    return Moment(f"{rollout}:{turn}", 1, f"run/{rollout}", "train/1/0", 7, turn, 0, achieved, "x" * size)


def starts(pool: Pool, rule: str = "frontier", **keys: float) -> Starts:
    return Starts(KEYS.model_copy(update=keys), STARTS[rule], pool, job_seed=3, reseedable=True)


def test_a_cell_is_the_rarest_achievement_in_whatever_order_a_game_has_them():
    # Four sets of achievements, each with one snapshot; wood has 4, stone 3, coal 2, and iron 1.
    sets = [("wood",), ("stone", "wood"), ("coal", "stone", "wood"), ("coal", "iron", "stone", "wood"), ()]
    assert find_cells([moment(n, names) for n, names in enumerate(sets)]) == [
        "wood",
        "stone",
        "coal",
        "iron",
        None,
    ]
    # Wood has 3, all others 2: of the last one's three, the name decides.
    mixed = [("eggs", "wood"), ("milk", "wood"), ("coal", "wood"), ("coal", "eggs", "milk")]
    assert find_cells([moment(n, names) for n, names in enumerate(mixed)]) == ["eggs", "milk", "coal", "coal"]


def test_the_oldest_of_the_most_common_cell_goes_first_by_number_and_by_bytes():
    common, rare = [moment(n, WOOD) for n in range(4)], moment(9, BOTH)
    pool = Pool().after([rare, *common], [], KEYS)
    assert pool.moments == (rare, *common[1:])
    narrow = KEYS.model_copy(update={"pool_mib": 25 / 2**20})  # of moments of 10 bytes each
    kept = Pool().after([rare, *common], [], narrow)
    assert (kept.moments, kept.mib) == ((rare, common[3]), 20 / 2**20)


def test_starts_and_those_that_gained_something_are_counted_while_their_snapshot_is_kept():
    first, rare, *others = moment(0, WOOD), moment(9, BOTH), *(moment(n, WOOD) for n in (1, 2, 3))
    gains = [(rare.key, True), (first.key, True), (rare.key, False)]
    pool = Pool().after([first, rare], gains, KEYS)
    assert pool.results == {first.key: (1, 1), rare.key: (1, 2)}
    later = pool.after(others, [(first.key, False), (rare.key, True)], KEYS)
    assert later.results == {rare.key: (2, 3)}, "the first is gone, and with it what its starts gained"


def test_those_that_came_further_are_not_forgotten_for_all_that_reach_the_first_turn_of_their_cell():
    deep, first = moment(0, WOOD, turn=7), [moment(n, WOOD, turn=3) for n in range(1, 6)]
    pool = Pool()
    for item in (deep, *first):
        pool = pool.after([item], [], KEYS)
    assert pool.moments == (deep, *first[2:])


def test_the_frontier_draws_a_cell_by_the_root_of_its_snapshots_and_each_of_its_turns_alike():
    turns = (1, 1, 1, 5)
    pool = Pool((*(moment(n, WOOD, turn=turn) for n, turn in enumerate(turns)), moment(9, BOTH)))
    # 1/sqrt(4) in two parts, one of them in three; and 1/sqrt(1)
    assert frontier(pool) == [0.25 / 3] * 3 + [0.25, 1.0]


def test_uncertain_are_those_without_starts_and_those_between_20_and_80_percent():
    pool = Pool(tuple(moment(n) for n in range(4)))
    keys = [item.key for item in pool.moments]
    # With one gain and one miss as the prior: 1/2; (0 + 1)/(8 + 2); (1 + 1)/(8 + 2); (8 + 1)/(8 + 2)
    results = {keys[1]: (0, 8), keys[2]: (1, 8), keys[3]: (8, 8)}
    assert uncertain(replace(pool, results=results)) == [1.0, 0.0, 1.0, 0.0]


def test_late_has_every_turn_as_often():
    pool = Pool((moment(0, turn=1), moment(1, turn=1), moment(2, turn=5)))
    assert late(pool) == [0.5, 0.5, 1.0]


@pytest.mark.parametrize("rule", STARTS)
def test_choices_follow_from_seed_and_pool_and_take_the_share_of_the_groups(rule: str):
    pool = Pool(tuple(moment(n, turn=n + 1) for n in range(20)))
    first, again, other = (starts(pool, rule).choose(k, 9) for k in (4, 4, 5))
    assert first == again != other
    assert len(first) == 2, "a quarter of nine groups, rounded down"
    assert starts(Pool(), rule).choose(4, 9) == []


def test_no_group_starts_where_nothing_is_uncertain():
    only = moment(0)
    pool = Pool((only,), {only.key: (8, 8)})
    assert starts(pool, "uncertain").choose(4, 8) == []


def test_each_group_has_draws_of_its_own_where_there_are_some():
    one = starts(Pool())
    assert one.draws_seed(2, 5) != one.draws_seed(2, 6) != one.draws_seed(3, 6)
    assert replace(one, reseedable=False).draws_seed(2, 5) is None


def test_a_game_offers_the_moment_after_each_rise_and_one_at_random():
    achieved = [(), WOOD, WOOD, WOOD, BOTH, BOTH]
    found = candidates("train/1/0/0", achieved, seed=0)
    assert {one.turn for one in found} > {1, 4} and len(found) == 3
    assert all(one.achieved == achieved[one.turn] and one.turn > 0 for one in found)
    assert candidates("train/1/0/0", [()], seed=1) == []


def test_of_many_candidates_every_cell_gets_its_turn():
    many = [Candidate(f"train/1/0/{n}", 1, 1, WOOD) for n in range(50)]
    few = [Candidate("train/1/1/0", 3, 3, BOTH), Candidate("train/1/1/1", 2, 2, ())]
    found = kept([*many, *few], seed=1, most=4)
    assert sorted(one.achieved for one in found) == [(), BOTH, WOOD, WOOD]
    assert found == kept([*few, *reversed(many)], seed=1, most=4), "in whatever order they come"


def test_of_a_cell_every_turn_of_the_whole_game_comes_before_a_second_moment_of_any():
    many = [Candidate(f"train/1/0/{n}", 1, 1, WOOD) for n in range(50)]
    far = Candidate("train/1/1/0", 1, 8, WOOD)
    assert sorted(one.turn for one in kept([*many, far], seed=1, most=3)) == [1, 1, 8]
    found = candidates("train/1/0/0", [(), WOOD], seed=1, done=7)
    assert found == [Candidate("train/1/0/0", 1, 8, WOOD)]
