"""What a report and a table tell of a mixture, on figures worked by hand."""

import pytest

from tests.conftest import tiny_job
from tests.trainer_backend.pages.hand_made import COW, FIRST, TABLE, WOOD, empty_run, evaluation_row, rollout
from tests.trainer_backend.pages.hand_made import iteration_row as row_of_actor
from tests.trainer_backend.pages.test_report import charts, no_frames, told
from trainer_backend.pages.compare import read_sides, setting_differences, write_comparison
from trainer_backend.pages.report import figure_lines, write_report
from trainer_backend.pages.story import read_story
from trainer_backend.run.row_lines import Pace, word_iteration
from trainer_backend.rundir.rollout_files import Credit, write_rollouts

JOB = tiny_job(
    rollout_only={"model_path": "teacher", "behaviour_weight_cap": 4.0},
    rollout_allocation_schedule={"type": "constant", "alpha": 0.25, "unit": "rollout"},
)


def by(policy, *args, **kwargs):
    played = rollout(*args, **kwargs)
    named = played.trajectory.model_copy(update={"model": f"tiny/{policy}"})
    return played.model_copy(update={"trajectory": named})


def mixture(actor, fixed):
    """The columns of an iteration: episodes, mean outcome, and of the fixed one how much it counted."""
    counts = {"mixture/actor/episodes": actor[0], "mixture/fixed/episodes": fixed[0]}
    share = actor[0] / (actor[0] + fixed[0])
    told = {"rollout/policy_choice": share, "mixture/alpha": 0.25, **counts}
    if actor[0]:
        told["mixture/actor/outcome_reward"] = actor[1]
    if fixed[0]:
        told |= {
            "mixture/fixed/outcome_reward": fixed[1],
            "mixture/fixed/counted_share": fixed[2],
            "mixture/counted_share": fixed[2],
        }
    return told


def rows():
    """The first iteration was played by the fixed policy alone, the second by both."""
    first = {name: value for name, value in row_of_actor(1, 1.0).items() if not name.startswith(
        ("episode/outcome_r", "episode/unique", "decision/", "reward/", "loss/", "stop/"))}  # fmt: skip
    return [
        first | mixture((0.0, None), (4.0, 3.0, 0.5)),
        row_of_actor(2, 1.0) | mixture((2.0, 1.0), (2.0, 6.0, 0.2)),
    ]


@pytest.fixture
def run(tmp_path):
    run = empty_run(JOB, tmp_path / "run")
    run.append_metrics(evaluation_row(0, FIRST, None, None))
    for row in rows():
        run.append_metrics(row)
    fixed = [by("fixed", 1, [WOOD, COW, TABLE]), by("fixed", 2, [WOOD, COW, TABLE], group="g1")]
    write_rollouts(run.rollouts_file("iteration_1"), fixed, [Credit([9.0] * 3, [0.0] * 3)] * 2)
    both = [
        by("actor", 1, [WOOD, ()]),
        by("fixed", 1, [COW, TABLE], sibling=1),
        by("actor", 2, [()], group="g1"),
    ]
    credits = [Credit([1.0, 0.5], [0.0] * 2), Credit([9.0, 9.0], [0.0] * 2), Credit([3.0], [0.0])]
    write_rollouts(run.rollouts_file("iteration_2"), both, credits)
    return run


def test_each_policy_is_told_with_its_episodes_its_outcome_and_how_much_they_counted(run):
    lines = dict(figure_lines(read_story(run)))
    assert lines["training episodes by 'actor'"] == "2, 1.00 unique achievements on average"
    # 4 episodes of 3 and 2 of 6 are 4 on average; (4 * 50 % + 2 * 20 %) / 6 = 40 %
    assert lines["training episodes by 'fixed'"] == (
        "6, 4.00 unique achievements on average; they counted as 40.0% of that many of the actor's"
    )


def test_the_report_lives_with_an_iteration_that_the_actor_did_not_play(run):
    html = write_report(run, frames=no_frames).read_text()
    assert "2 of 2 iterations" in told(html)
    found = charts(html)
    by_policy = {curve["label"]: curve["y"] for curve in found["by_policy"]["curves"]}
    assert by_policy == {"actor": [None, 1.0], "fixed": [3.0, 6.0]}
    assert [curve["y"] for curve in found["counted"]["curves"]] == [[0.5, 0.2]]


def test_a_run_of_a_fixed_policy_alone_has_no_curve_of_the_actor(tmp_path):
    run = empty_run(JOB, tmp_path / "run")
    run.append_metrics(rows()[0])
    assert (
        charts(write_report(run, frames=no_frames).read_text()).keys() & {"outcome", "reward_by_turn"}
        == set()
    )
    other = empty_run(tiny_job(), tmp_path / "other")
    write_comparison(read_sides([run.path, other.path]), tmp_path / "out")


def test_an_iteration_is_told_with_each_fixed_policy_and_without_who_did_not_play():
    first, second = (word_iteration(row, Pace()) for row in rows())
    assert "unique achievements" not in first
    assert "by the actor 0%  fixed counted 50.0%  fixed 3.00" in first
    assert "unique achievements 1.00" in second
    assert "by the actor 50%  fixed counted 20.0%  fixed 6.00" in second


def test_a_comparison_names_each_key_of_a_fixed_policy(run, tmp_path):
    other = tiny_job(
        rollout_only={"model_path": "teacher", "objective": "single_ratio"},
        rollout_allocation_schedule={"type": "constant", "alpha": 0.25, "unit": "rollout"},
    )
    sides = read_sides([run.path, empty_run(other, tmp_path / "other").path])
    assert setting_differences(sides) == [
        ("rollout_only.fixed.objective", ['"decoupled"', '"single_ratio"']),
        ("rollout_only.fixed.behaviour_weight_cap", ["4.0", "absent"]),
    ]
