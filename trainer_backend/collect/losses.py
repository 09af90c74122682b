"""Counts the rollouts that a stage of a run lost, by cause, for the log, metrics, web pages and report."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from shared_schemas.rollouts import Rollout
from trainer_backend.core.metric import Metric, Row

# Keys of a metrics row that count failed and finished rollouts. In each pair, the second key is for branches.
FAILED = ("rollout/failed", "branch/failed")
FINISHED = ("rollout/finished", "branch/rollouts")
_CAUSES = ("rollout/lost_causes", "branch/lost_causes")
# Names of the stages before the first iteration, by the kind of their metrics rows.
NAMES_BEFORE_RL = {"teacher": "warm-up", "prompts": "prompts"}
_MOST_CAUSES = 3
_MOST_CHARS = 600
# Messages of the same cause may differ in numbers and quoted texts. The pattern also matches `file.py:line`,
# which `_keep_place` leaves in the message.
_DIFFERS = re.compile(r"\S+\.py:\d+|'[^']*'|\"[^\"]*\"|\d+")


METRICS = (
    Row(
        Metric("rollout/failure/*", "failures by code, with those that were planned again", "failures"),
        Metric("rollout/failed", "rollouts lost for good", "failures",
               {"iteration": "lost for good", "evaluation": "held-out, lost", "teacher": "warm-up, lost",
                "prompts": "prompts, lost"}),
        Metric("rollout/finished", "finished rollouts"),
    ),
    Row(
        Metric("rollout/lost_causes", "why they were lost: pairs of a number and a cause, the most common "
               "one first"),
        Metric("branch/lost_causes", "the same for branches"),
        note="Absent without losses. A stage that ends the run has these numbers in a row of the kind "
        "`lost`, until a resumed run plays it again",
    ),
)  # fmt: skip
BRANCH_METRICS = (
    Row(
        Metric("branch/rollouts", "branches that finished"),
        Metric("branch/failed", "branches that failed for good", "failures", "branches, lost"),
        Metric("branch/decisions", "decisions of the finished ones"),
        when="only with `branch` or `train_branches`",
    ),
)


@dataclass(frozen=True, slots=True)
class Losses:
    lost: int
    """The number of rollouts that failed and were not retried any more."""
    total: int
    causes: Sequence[tuple[int, str]] = ()
    """Pairs of a number of lost rollouts and the message of their cause, the most common cause first."""

    @classmethod
    def of(cls, failed: Sequence[Rollout], total: int) -> Self:
        """Count failed rollouts by cause.

        Failures have the same cause if their messages differ only in numbers and quoted texts.

        Args:
            failed: the rollouts that failed and are not retried.
            total: the number of all rollouts, including these.
        """
        words: dict[str, Counter[str]] = defaultdict(Counter)
        for rollout in failed:
            text = _text(rollout)
            words[_DIFFERS.sub(_keep_place, text)][text] += 1
        causes = [(texts.total(), texts.most_common(1)[0][0]) for texts in words.values()]
        causes.sort(key=lambda cause: -cause[0])
        return cls(len(failed), total, tuple(causes))

    @property
    def share(self) -> float:
        return self.lost / self.total if self.total else 0.0

    @property
    def count(self) -> str:
        """The number of lost rollouts and the total as a text, such as `180 of 200`."""
        return f"{self.lost:,} of {self.total:,}"

    def describe(self, stage: str) -> str:
        """Describe the losses: `iteration 3: 180 of 200 rollouts lost: environment.step raised ...`."""
        return f"{stage}: {self.count} rollouts lost: {self.explain()}"

    def explain(self) -> str:
        """Describe the most common causes. If there are several, give the number of rollouts of each."""
        if len(self.causes) == 1:
            return self.causes[0][1]
        shown = "; ".join(f"{count} x {cause}" for count, cause in self.causes[:_MOST_CAUSES])
        more = len(self.causes) - _MOST_CAUSES
        return f"{shown}; and {more} other causes" if more > 0 else shown or "no cause is known"

    def row(self, *, branches: bool = False) -> dict[str, Any]:
        """Return the counts and the causes of the losses, to be stored in a row of metrics.

        The causes are stored as a list, because every number in a dict would be drawn as a curve.

        Args:
            branches: whether to use the keys for branches.
        """
        counts = {FINISHED[branches]: float(self.total - self.lost), FAILED[branches]: float(self.lost)}
        return counts | ({_CAUSES[branches]: [list(cause) for cause in self.causes]} if self.lost else {})


def losses_in(row: Mapping[str, Any], *, branches: bool = False) -> Losses:
    """Read the losses from a row of metrics. Rows that an earlier version wrote contain no causes."""
    causes = tuple((int(count), str(cause)) for count, cause in row.get(_CAUSES[branches], ()))
    lost, finished = (int(row.get(names[branches], 0)) for names in (FAILED, FINISHED))
    return Losses(lost, lost + finished, causes)


def sum_losses(sums: Mapping[str, float]) -> Losses:
    """Return the losses of a run. `sums` maps the keys in FAILED and FINISHED to their sums over rows."""
    lost, finished = (int(sum(sums.get(name, 0.0) for name in names)) for names in (FAILED, FINISHED))
    return Losses(lost, lost + finished)


def _keep_place(found: re.Match[str]) -> str:
    return found[0] if ".py:" in found[0] and found[0][0] not in "'\"" else ""


def _text(rollout: Rollout) -> str:
    if rollout.failure is None:
        return rollout.status
    words = rollout.failure.detail.replace(rollout.rollout_id, "…")[:_MOST_CHARS]
    return words or rollout.failure.code
