import pytest

from tests.trainer_backend.dialogues import dialogue, finished
from tests.trainer_backend.pages.hand_made import LAST, evaluation_row
from trainer_backend.collect.metrics import (
    evaluation_metrics,
    outcome_interval,
    outcome_meaning,
    outcome_name,
)
from trainer_backend.collect.work import Collection
from trainer_backend.evaluation.result import evaluation_result

RIGHT_AND_WRONG = [finished(dialogue(0.0, 1.0), 1), finished(dialogue(0.0), 2)]


def test_a_dialogue_is_told_by_its_outcome_and_has_no_achievements():
    row = {"kind": "evaluation", **evaluation_metrics(RIGHT_AND_WRONG)}
    # 1 and 0: mean 0.5, standard error 0.5, t of one degree of freedom 12.706
    found = outcome_interval(row)
    assert (found.mean, found.count) == (0.5, 2)
    assert found.high == pytest.approx(0.5 + 12.706 * 0.5)
    assert (outcome_name(row), outcome_meaning(row)) == ("last turn score", "of the last answer")
    assert row["interaction/score_by_turn"] == [0.0, 0.5]
    assert not [name for name in row if "achievements" in name or "rates" in name or "crafter" in name]


def test_an_evaluation_of_dialogues_holds_their_figures_and_none_of_achievements():
    found = evaluation_result("p", Collection(tuple(RIGHT_AND_WRONG)))
    assert (found.outcome.mean, found.unique, found.rates, found.spans) == (0.5, None, {}, ())
    assert found.conversation["interaction/answers"] == 1.5


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


def test_without_a_row_an_outcome_is_called_that():
    assert (outcome_name(None), outcome_meaning(None)) == ("outcome", "")


def test_a_definition_without_a_name_is_its_own_name():
    row = {"kind": "iteration", "episode/outcome_definition": "1 when the number was found"}
    assert (outcome_name(row), outcome_meaning(row)) == ("1 when the number was found", "")
