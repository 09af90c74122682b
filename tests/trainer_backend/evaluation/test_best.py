"""The best evaluation, by the worlds that two of them finished."""

from collections.abc import Sequence
from typing import Any

import pytest

from trainer_backend.evaluation.best import TASKS_DIGEST, find_best

# Outcomes by world; a world that is missing was lost. All evaluations plan worlds 0 to 9.
Played = dict[int, dict[int, float]]


def find(
    played: Played, *, most: float = 0.2, tasks: Sequence[str] = ()
) -> tuple[int | None, dict[int, str]]:
    rows: list[dict[str, Any]] = [
        {
            "iteration": iteration,
            "eval/outcome_reward": sum(outcomes.values()) / len(outcomes),
            "rollout/finished": float(len(outcomes)),
            "rollout/failed": 10.0 - len(outcomes),
        }
        for iteration, outcomes in played.items()
    ]
    for row, digest in zip(rows, tasks, strict=False):
        row |= {TASKS_DIGEST: digest} if digest != "-" else {}
    best = find_best(rows, lambda iteration: played[iteration], most=most)
    return None if best.row is None else best.row["iteration"], dict(best.notes)


def outcomes(*values: float, lost: tuple[int, ...] = ()) -> dict[int, float]:
    return {world: value for world, value in enumerate(values) if world not in lost}


ALL_ONE = outcomes(*[1.0] * 10)


def test_without_losses_the_highest_mean_is_the_best_the_first_of_equals_and_no_file_is_read():
    best, notes = find({0: ALL_ONE, 2: outcomes(*[2.0] * 10), 4: outcomes(*[2.0] * 10)})
    assert (best, notes) == (2, {})


def test_an_evaluation_that_lost_a_world_is_compared_by_the_others():
    # World 0 is worth 10. Without it the second one has 1.1 in each world, and the first one 1.0.
    first = outcomes(10.0, *[1.0] * 9)
    second = outcomes(10.0, *[1.1] * 9, lost=(0,))
    best, notes = find({0: first, 2: second})
    assert best == 2
    assert notes[2].endswith("is compared with the best one by the 9 of 10 worlds that both finished")
    # And the other way round: lost hard worlds raise a mean, and make no checkpoint the best.
    assert find({0: first, 2: outcomes(0.0, *[0.9] * 9, lost=(0,))})[0] == 0


@pytest.mark.parametrize("lost", [(0, 1, 2), (0, 9, 1)])
def test_too_many_lost_worlds_refuse_the_comparison_and_say_so(lost: tuple[int, ...]):
    best, notes = find({0: ALL_ONE, 2: outcomes(*[5.0] * 10, lost=lost)})
    assert best == 0
    assert "evaluation after iteration 2 cannot become the best checkpoint: only 7 of 10 worlds" in notes[2]


def test_losses_of_both_count_together():
    # Each lost two of ten, which is allowed; together they leave six, which is not.
    best, notes = find({0: outcomes(*[1.0] * 10, lost=(0, 1)), 2: outcomes(*[5.0] * 10, lost=(2, 3))})
    assert best == 0 and "only 6 of 10 worlds" in notes[2]


def test_a_first_evaluation_that_lost_too_much_leaves_its_place_to_the_next():
    assert find({0: outcomes(*[9.0] * 10, lost=(0, 1, 2)), 2: ALL_ONE})[0] == 2
    assert find({0: outcomes(*[9.0] * 10, lost=(0, 1, 2))})[0] is None


def test_evaluations_without_a_common_world_are_never_compared():
    first, second = (
        outcomes(*[1.0] * 10, lost=tuple(range(5))),
        outcomes(*[5.0] * 10, lost=tuple(range(5, 10))),
    )
    assert find({0: first, 2: second}, most=1.0)[0] == 0


@pytest.mark.parametrize(
    ("tasks", "best", "others"),
    [
        ("AAA", 0, ""), ("AAB", 4, "after iterations 0 and 2 set"), ("ABB", 2, "after iteration 0 set"),
        ("ABA", 0, "after iteration 2 set"),
        ("", 0, ""), ("-AA", 0, ""), ("-AB", 4, "after iterations 0 and 2 set"),  # - is of earlier versions
    ],
)  # fmt: skip
def test_outcomes_of_other_tasks_are_not_compared_and_the_user_is_told(tasks: str, best: int, others: str):
    # Easier rows would make any checkpoint the best, and harder ones none.
    played = {iteration: outcomes(*[value] * 10) for iteration, value in ((0, 9.0), (2, 2.0), (4, 1.0))}
    found, notes = find(played, tasks=tasks)
    assert found == best
    assert list(notes) == [4] * bool(others)
    assert others in notes.get(4, "")
