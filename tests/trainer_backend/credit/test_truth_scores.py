"""Estimators against a file of measured advantages: what is read of it, and how it is shown."""

from pathlib import Path

import pytest
from rich.console import Console

from trainer_backend.core.truth import TrueAdvantage
from trainer_backend.credit.recredit import truth_page
from trainer_backend.credit.truth_scores import TruthScores
from trainer_backend.errors import RunDirectoryError
from trainer_backend.rundir.truth_file import TruthFile, TruthSetting

SETTING = TruthSetting(
    run_id="r", iteration=1, checkpoint="iteration_0", gamma=0.9, continuations=2, horizon=None,
    fresh_draws=False, seed=0, rewards={}, play={},
)  # fmt: skip
# Decisions 1 and 3 of rollout a and 1 of b were measured.
TRUTHS = [
    TrueAdvantage(rollout, turn, 0.0, value, 0.01, None, 4, 0, 2, 9)
    for rollout, turn, value in (("b", 1, 0.0), ("a", 3, -1.0), ("a", 1, 1.0))
]
RIGHT = {"a": [2.0, 9.0, -2.0], "b": [0.0]}
WRONG = {"a": [-1.0, 9.0, 1.0], "b": [0.0]}


def scores(advantages, truths=TRUTHS, **cosines):
    """Every rollout is of a group of its own."""
    compared = {(name, "truth"): value for name, value in cosines.items()}
    return TruthScores(TruthFile(Path("unused"), SETTING, truths), advantages, {}, compared)


def shown(found):
    """The rows of the table of scores, by estimator."""
    console = Console(width=300, record=True)
    console.print(found.tables())
    rows = [line.split("  ") for line in console.export_text().splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    begin = next(number for number, row in enumerate(cells) if row[:1] == ["against the truth"])
    return {row[0]: dict(zip(cells[begin], row, strict=True)) for row in cells[begin + 1 : begin + 3]}


def test_the_measured_decisions_of_each_rollout_are_compared_in_their_order():
    found = scores({"rloo": RIGHT})
    assert (found.true, found.advantages["rloo"]) == ([1.0, -1.0, 0.0], [2.0, -2.0, 0.0])
    with pytest.raises(RunDirectoryError, match="decision 3 of rollout 'a' was measured"):
        scores({"rloo": {**RIGHT, "a": [2.0, 9.0]}})


def test_the_best_comes_first_and_what_is_not_known_is_a_dash():
    rows = shown(scores({"rloo": WRONG, "grpo": RIGHT}, grpo=0.5))
    assert [*rows] == ["grpo", "rloo"]
    row = rows["grpo"]
    assert (row["correlation"], row["gradient"], rows["rloo"]["gradient"]) == ("+1.00", "+0.50", "-")
    assert (row["sign"], rows["rloo"]["sign"], row["of 0"]) == ("100%", "0%", "33%")
    assert row["95 %"] == "-", "without either group one constant is left, which has no correlation"
    assert row["unbiased"] == "-", "the std of grpo's estimate is not only noise"


def test_bounds_are_shown_where_three_groups_tell_them():
    values = {"a": [0.0, 0.5], "b": [1.0, 0.5], "c": [0.0, 1.0]}
    truths = [
        TrueAdvantage(rollout, turn, 0.0, value, 0.01, None, 4, 0, 2, 9)
        for rollout, row in values.items()
        for turn, value in enumerate(row, 1)
    ]
    played = {"a": [0.0, 1.0], "b": [1.0, 0.0], "c": [2.0, -1.0]}
    found = scores({"rloo": played, "grpo": played}, truths)
    score = found.scores["rloo"]
    assert shown(found)["rloo"]["95 %"] == f"{score.low:+.2f} {score.high:+.2f}"
    correlation = f"Correlation {score.correlation:+.2f} (95 %: {score.low:+.2f} to {score.high:+.2f})"
    noiseless = f"; without the noise of the truth {score.noiseless:+.2f}."
    unbiased = f"; an unbiased estimator as noisy would have {found.unbiased['rloo']:+.2f}"
    page = truth_page(found).decode()
    assert correlation + unbiased + noiseless in page and correlation + noiseless in page
