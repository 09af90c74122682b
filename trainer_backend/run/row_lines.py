"""Formats rows of metrics as the lines that the terminal and run.log show."""

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from trainer_backend.collect.metrics import count_worlds, outcome_interval, outcome_name
from trainer_backend.core.mixture_history import OUTCOME, metric_name
from trainer_backend.core.policies import ACTOR

Row = Mapping[str, Any]

_OUTCOME = "episode/outcome_reward"
_REWARDED = "decision/nonzero_frac"
_OF_A_POLICY = re.compile(metric_name(r"[^/]+", OUTCOME))
# Columns that appear if a row contains their metric.
_COLUMNS = (
    ("iteration", "iteration", "{:.0f}"),
    (_OUTCOME, "outcome", "{:.2f}"),
    ("reward/mean", "reward", "{:.2f}"),
    (_REWARDED, "rewarded", "{:.1%}"),
    ("episode/invalid_frac", "refused", "{:.1%}"),
    ("interaction/answers", "answers", "{:.1f}"),
    ("statelm/segments", "segments", "{:.1f}"),
    ("statelm/peak_context", "context", "{:.0f}"),
    ("statelm/context_length_exceeded", "ran over", "{:.1%}"),
    ("loss/entropy", "entropy", "{:.2f}"),
    ("loss/approx_kl", "kl", "{:.4f}"),
    ("rollout/policy_choice", "by the actor", "{:.0%}"),
    ("mixture/counted_share", "fixed counted", "{:.1%}"),
)
# The last columns, to the right of `_COLUMNS` and of the outcomes of fixed policies.
_TIMES = (("time/collect_s", "collect s", "{:.1f}"), ("time/update_s", "update s", "{:.1f}"))


class Pace:
    """Counts a run's iterations and estimates the time that is left."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends_s: list[float] = []
        self._last, self._iterations = 0, 0

    def finish(self, iteration: int, iterations: int | None) -> None:
        """Count an iteration that has just ended; `iterations` is the total, None if unknown."""
        self._ends_s.append(self._clock())
        self._last, self._iterations = iteration, iterations or 0

    def count(self) -> str:
        """Return text with the last finished iteration and the total; empty if none has finished."""
        total = f" of {self._iterations}" if self._iterations else ""
        return f"iteration {self._last}{total}" if self._ends_s else ""

    def left(self) -> str:
        """Return text with the remaining time at the mean pace so far; empty if unknown."""
        rest = self._iterations - self._last
        if rest <= 0 or len(self._ends_s) < 2:
            return ""
        seconds = rest * (self._ends_s[-1] - self._ends_s[0]) / (len(self._ends_s) - 1)
        return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"


def word_iteration(row: Row, pace: Pace) -> str:
    """Describe an iteration with its figures. Call `pace.finish` for this iteration first."""
    cells = "  ".join(f"{title} {form.format(row[key])}" for key, title, form in columns_for(row)[1:])
    return "  ".join(filter(None, (pace.count(), cells, pace.left())))


def word_evaluation(row: Row) -> str:
    """Describe an evaluation in a sentence, with the most frequent achievements first."""
    rates = sorted(row.get("eval/success_rates", {}).items(), key=lambda item: -item[1])
    achievements = ", ".join(f"{name} {rate:.0%}" for name, rate in rates if rate > 0)
    held_out = f"held-out after iteration {row['iteration']}: {word_outcome(row)}{word_episodes(row)}"
    return f"{held_out}: {achievements}" if achievements else held_out


def word_episodes(row: Row) -> str:
    """Return `count_worlds` with a comma before it, to append to an evaluation's result."""
    return f", {count_worlds(row)}"


def word_outcome(row: Row) -> str:
    """Describe an evaluation's mean outcome with its interval, and its score and progress if present."""
    return f"{outcome_interval(row).word()} {outcome_name(row)}{_score_and_progress(row)}"


def columns_for(row: Row) -> list[tuple[str, str, str]]:
    """Return key, title and format of each figure that the row contains; the iteration comes first."""
    # The outcome of each fixed policy; the actor's is in `_COLUMNS`.
    keys = [key for key in row if _OF_A_POLICY.fullmatch(key) and key != metric_name(ACTOR, OUTCOME)]
    outcomes = [(key, key.split("/")[1], "{:.2f}") for key in keys]
    columns = [
        (key, outcome_name(row) if key == _OUTCOME else title, form)
        for key, title, form in (*_COLUMNS, *outcomes, *_TIMES)
    ]
    has_achievements = "episode/unique_achievements" in row
    return [column for column in columns if column[0] in row and (has_achievements or column[0] != _REWARDED)]


def _score_and_progress(row: Row) -> str:
    """Describe the Crafter score and progress; empty without achievements and in rows of earlier versions."""
    if "eval/progress" not in row:
        return ""
    score = row.get("eval/crafter_score")
    of_crafter = "" if score is None else f" Crafter score {score:.1f} %,"
    return f";{of_crafter} progress {row['eval/progress']:.1f} %"
