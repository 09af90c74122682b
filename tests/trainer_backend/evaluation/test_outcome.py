import io

import pytest
from rich.console import Console

from tests.trainer_backend.dialogues import dialogue, finished
from tests.trainer_backend.pages.hand_made import LAST, WOOD, evaluation_row, rollout
from trainer_backend.collect.batch import Batch, LossCheck
from trainer_backend.collect.metrics import (
    count_worlds,
    evaluation_metrics,
    outcome_interval,
    outcome_meaning,
    outcome_name,
)
from trainer_backend.core.intervals import wilson_interval
from trainer_backend.evaluation.result import evaluation_result
from trainer_backend.run.iteration_metrics import outcome_bounds
from trainer_backend.terminal.evaluation_tables import tables

RIGHT_AND_WRONG = [finished(dialogue(0.0, 1.0), 1, group="g1"), finished(dialogue(0.0), 2, group="g2")]


def test_a_dialogue_is_told_by_its_outcome_and_has_no_achievements():
    row = {"kind": "evaluation", **evaluation_metrics(RIGHT_AND_WRONG)}
    # 1 and 0 of two, by Wilson: the interval is z / 2 / sqrt(n + z^2) around 1/2, with z^2 = 3.8415
    figures = outcome_interval(row)
    assert (figures.mean, figures.count) == (0.5, 2)
    assert figures.high == pytest.approx(0.5 + 1.959964 / 2 / (2 + 3.8415) ** 0.5, abs=1e-4)
    assert (outcome_name(row), outcome_meaning(row)) == ("last turn score", "of the last answer")
    assert row["interaction/score_by_turn"] == [0.0, 0.5]
    assert not [name for name in row if "achievements" in name or "rates" in name or "crafter" in name]


def test_an_evaluation_of_dialogues_holds_their_figures_and_none_of_achievements():
    figures = evaluation_result("p", Batch(tuple(RIGHT_AND_WRONG)))
    assert (figures.outcome.mean, figures.unique, figures.rates, figures.spans) == (0.5, None, {}, ())
    assert figures.conversation["interaction/answers"] == 1.5


def test_repeats_of_a_world_are_averaged_first_and_a_world_is_solved_that_was_solved_once():
    # by world: 1 and 0, 0 and 0, 1 and 1
    played = [((0.0, 1.0), 1), ((0.0,), 1), ((0.0,), 2), ((0.0,), 2), ((1.0,), 3), ((1.0,), 3)]
    rollouts = [
        finished(dialogue(*scores), world, group=f"g{world}", sibling=number % 2)
        for number, (scores, world) in enumerate(played)
    ]
    figures = evaluation_result("p", Batch(tuple(rollouts)))
    assert (figures.episodes, figures.repeats, figures.outcome.mean, figures.outcome.count) == (6, 2, 0.5, 3)
    assert figures.solved_in_any == wilson_interval(2, 3)
    # decisions by world: 1.5, 1, 1
    assert (figures.decisions.mean, figures.decisions.count) == (pytest.approx(3.5 / 3), 3)
    out = io.StringIO()
    Console(file=out, width=100).print(tables(figures))
    assert "6 of 3 worlds, 2 each" in out.getvalue()
    assert "solved in any of 2" in out.getvalue() and "66.7%" in out.getvalue()


def boxes(solved, best, group):
    """An episode of Sokoban: the outcome is success, the achievements are boxes on goals."""
    counts = {"box_1": int(best >= 1), "box_2": int(best >= 2), "solved": solved}
    outcome = {"outcome_reward": float(solved), "outcome_definition": "solved: 1 when every box is"}
    return finished(dialogue(0.0, achievements_counts=counts, **outcome), group=group)


@pytest.mark.parametrize("solved", [(1, 0, 0), (0, 0, 0)], ids=str)
def test_success_is_a_proportion_also_where_there_are_achievements(solved):
    rollouts = [boxes(one, 2 * one, f"g{number}") for number, one in enumerate(solved)]
    proportion = wilson_interval(sum(solved), 3)
    row = {"kind": "evaluation", **evaluation_metrics(rollouts)}
    assert outcome_interval(row) == proportion
    assert evaluation_result("p", Batch(tuple(rollouts))).outcome == proportion
    assert outcome_bounds(rollouts) == {
        "episode/outcome_reward_low": proportion.low, "episode/outcome_reward_high": proportion.high,
    }  # fmt: skip
    assert "eval/crafter_score" not in row
    repeated = [boxes(1, 2, "g1"), boxes(0, 1, "g1"), boxes(0, 0, "g2"), boxes(0, 0, "g2")]
    assert evaluation_result("p", Batch(tuple(repeated))).solved_in_any == wilson_interval(1, 2)


def test_a_number_of_achievements_is_no_proportion_even_if_none_has_two():
    rollouts = [rollout(seed, [unlocked], group=f"g{seed}") for seed, unlocked in enumerate([WOOD, (), ()])]
    assert evaluation_metrics(rollouts)["eval/outcome_reward_high"] == pytest.approx(1 / 3 + 4.303 / 3)
    assert evaluation_metrics(rollouts[1:])["eval/outcome_reward_high"] == 0.0


def test_no_count_of_an_evaluation_can_be_negative():
    figures = evaluation_result("p", Batch((rollout(10, [()]), rollout(11, [WOOD] + [()] * 9, group="g1"))))
    assert (figures.decisions.mean, figures.decisions.low, figures.env_steps.low) == (5.5, 0.0, 0.0)
    assert figures.spans[0].unique.low == 0.0


def test_in_crafter_the_outcome_is_the_unique_achievements():
    row = {"kind": "evaluation", **evaluation_metrics(LAST)}
    assert outcome_name(row) == "unique achievements"
    for bound in ("", "_low", "_high"):
        assert row[f"eval/outcome_reward{bound}"] == row[f"eval/unique_achievements{bound}"]


def test_a_row_of_before_outcomes_were_named_is_one_of_crafter():
    row = evaluation_row(0, LAST, 1.0, 3.0)
    old = {name: value for name, value in row.items() if "outcome_reward_" not in name}
    del old["eval/outcome_definition"]
    assert (outcome_name(old), outcome_meaning(old)) == ("unique achievements", "")
    assert outcome_interval(old) == outcome_interval(row)


def test_an_outcome_without_a_name_is_called_by_its_definition_or_just_an_outcome():
    row = {"kind": "iteration", "episode/outcome_definition": "1 when the number was found"}
    assert (outcome_name(row), outcome_meaning(row)) == ("1 when the number was found", "")
    assert (outcome_name(None), outcome_meaning(None)) == ("outcome", "")


def test_episodes_that_the_time_limit_cut_short_are_told_with_the_worlds_and_by_the_stage():
    late = finished(dialogue(0.0, stop_reason="deadline"), group="g9")
    assert count_worlds(evaluation_metrics([*RIGHT_AND_WRONG, late])).endswith(
        "worlds, 1 cut short by the time limit"
    )
    assert "eval/cut_short" not in evaluation_metrics(RIGHT_AND_WRONG)
    lines: list[str] = []
    LossCheck(say=lines.append).report(Batch((*RIGHT_AND_WRONG, late)), "evaluation")
    assert lines == [
        f"evaluation: 1 of {len(RIGHT_AND_WRONG) + 1} episodes were cut short by their time limit"
    ]
