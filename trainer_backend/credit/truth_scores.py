"""`turnwise recredit --truth`: compares estimators with the measured true advantages of decisions."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich.console import Group
from rich.table import Table
from rich.text import Text

from trainer_backend.core.truth import (
    Noise,
    TrueAdvantage,
    TruthScore,
    measure_noise,
    truth_score,
    unbiased_correlation,
)
from trainer_backend.errors import RunDirectoryError
from trainer_backend.plugins import estimator
from trainer_backend.rundir.truth_file import TruthFile, TruthSetting

TRUTH = "truth"
# A standard error of 0.3 times the spread lowers a correlation to 96 % of its noiseless value.
_GOAL = 0.3
# Width in characters of the widest cells: a pair of bounds, or a bias with its error.
_WIDEST = 12
_TITLES = ("correlation", "95 %", "unbiased", "noiseless", "rank", "sign", "explained", "of 0")


class TruthScores:
    """Scores estimators by how well their advantages agree with the measured true advantages.

    Args:
        file: the true advantages of one or more decisions.
        advantages: advantages of all decisions, by estimator and rollout id.
        groups: group ids, by rollout id.
        cosines: cosine of the gradients of two estimators, or of an estimator and TRUTH, by pair of names.

    Attributes:
        true: true advantages of the measured decisions.
        advantages: advantages of the same decisions, in the same order, by estimator.
        scores: the score of each estimator.
        unbiased: by estimator, the correlation that an unbiased estimator with the same std would reach. None
            for a biased estimator, because its std does not measure noise in reward units.
        cosines: cosine between an estimator's gradient and the truth's, by estimator; may be empty.
    """

    def __init__(
        self,
        file: TruthFile,
        advantages: Mapping[str, Mapping[str, Sequence[float]]],
        groups: Mapping[str, str],
        cosines: Mapping[tuple[str, str], float] | None = None,
    ) -> None:
        # Sorted, so that the numbers do not depend on the order in which decisions were measured.
        self.setting, truths = file.setting, [file.truths[key] for key in sorted(file.truths)]
        group_ids = [groups.get(item.rollout_id, item.rollout_id) for item in truths]
        self.noise = measure_noise(truths)
        self.true = [item.advantage for item in truths]
        self.advantages = {name: _select_measured(rows, truths) for name, rows in advantages.items()}
        self.scores = {
            name: truth_score(values, truths, group_ids) for name, values in self.advantages.items()
        }
        self.unbiased = {
            name: None if estimator(name).bias else unbiased_correlation(score.std, self.noise)
            for name, score in self.scores.items()
        }
        self.cosines = {name: cosine for (name, other), cosine in (cosines or {}).items() if other == TRUTH}

    def figures(self) -> dict[str, object]:
        """Return the numbers of the tables as JSON values."""
        return {
            "setting": self.setting.model_dump(mode="json"),
            "noise": {**asdict(self.noise), "ratio": self.noise.ratio},
            "estimators": {
                name: {
                    **asdict(score),
                    "unbiased": self.unbiased[name],
                    "gradient_cosine": self.cosines.get(name),
                }
                for name, score in self.scores.items()
            },
        }

    def tables(self) -> Group:
        """Return lines about the noise, a table of scores, best estimator first, and a table of biases."""
        return Group(noise_lines(self.setting, self.noise), "", self._scores(), "", _biases(self.scores))

    def _scores(self) -> Table:
        table = _table("against the truth", self.scores, (*_TITLES, *(("gradient",) if self.cosines else ())))
        for name, score in sorted(self.scores.items(), key=lambda item: -(item[1].correlation or 0.0)):
            bounds = "-" if score.low is None else f"{score.low:+.2f} {score.high:+.2f}"
            table.add_row(
                name, _number(score.correlation), bounds, _number(self.unbiased[name]),
                _number(score.noiseless), _number(score.rank),
                "-" if score.sign_agreement is None else f"{score.sign_agreement:.0%}",
                _number(score.explained), f"{score.zero_share:.0%}",
                *([_number(self.cosines.get(name))] if self.cosines else []),
            )  # fmt: skip
        return table


def _select_measured(rows: Mapping[str, Sequence[float]], truths: Sequence[TrueAdvantage]) -> list[float]:
    values = []
    for item in truths:
        row_T = rows.get(item.rollout_id, ())
        if item.turn > len(row_T):
            raise RunDirectoryError(
                f"decision {item.turn} of rollout {item.rollout_id!r} was measured, but is no longer stored"
            )
        values.append(row_T[item.turn - 1])
    return values


def noise_lines(setting: TruthSetting, noise: Noise) -> Text:
    """Return sentences that say what was measured, and how large the standard error is."""
    horizon = "to the end of their episodes" if setting.horizon is None else f"of {setting.horizon} decisions"
    draws = "own draws of the world" if setting.fresh_draws else "the draws that the stored episode met"
    against = f", {noise.ratio:.2f} of their spread {noise.spread:.3f}" if noise.ratio is not None else ""
    pairs = noise.pairs_for(_GOAL, setting.continuations)
    goal = f" About {pairs} pairs each would bring it to {_GOAL:g} of the spread." if pairs else ""
    lost = f"; {noise.failed} pairs failed and are not counted" if noise.failed else ""
    return Text(
        f"{noise.decisions} decisions of iteration {setting.iteration}, by {setting.continuations} pairs of "
        f"continuations {horizon} with {draws}, gamma {setting.gamma:g}, policy {setting.checkpoint}: "
        f"{noise.played} decisions were played{lost}.\n"
        f"True advantages have a standard error of {noise.error:.3f}{against}; the sign of "
        f"{noise.known:.0%} is known (95 %).{goal}"
    )


def _biases(scores: Mapping[str, TruthScore]) -> Table:
    names = [bias.name for bias in next(iter(scores.values())).biases] if scores else []
    table = _table("bias", scores, names)
    for name, score in scores.items():
        cells = [
            f"{bias.mean:+.2f}" + ("" if bias.error is None else f" ± {bias.error:.2f}")
            for bias in score.biases
        ]
        table.add_row(name, *cells)
    return table


def _table(title: str, scores: Mapping[str, TruthScore], columns: Sequence[str]) -> Table:
    """Return an empty table for one row per estimator; its columns do not shrink in a narrow terminal."""
    table = Table(box=None, pad_edge=False)
    table.add_column(title, no_wrap=True, min_width=max(map(len, (title, *scores))))
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True, min_width=max(len(column), _WIDEST))
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}"
