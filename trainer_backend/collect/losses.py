"""What a stage lost: how many of its rollouts, why, and when that ends the run."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared_schemas.rollouts import Rollout
from trainer_backend.collect.work import Collection
from trainer_backend.errors import JobTeachesNothing, NothingToLearnFrom, TooManyLost, TrainerError

# A stage of fewer rollouts may lose a large share by accident.
LEAST_ROLLOUTS = 8
# The numbers of a row that count what failed for good, and what was finished.
FAILED = ("rollout/failed", "branch/failed")
FINISHED = ("rollout/finished", "branch/rollouts")
# The share of missing or cut episodes from which on a stage says so.
NOTABLE_SHARE = 0.1
# By the kind of its row, how a stage before the first iteration is named.
NAMES_BEFORE_RL = {"teacher": "warm-up", "prompts": "prompts"}
_CAUSES = "lost_causes"
_MOST_CAUSES = 3
_MOST_CHARS = 600
# One cause writes other numbers and quotations for each rollout; its exception, file and line stay.
_DIFFERS = re.compile(r"\S+\.py:\d+|'[^']*'|\"[^\"]*\"|\d+")


@dataclass(frozen=True, slots=True)
class Losses:
    """The lost rollouts of a stage."""

    lost: int
    """Those that failed for good."""
    total: int
    causes: Sequence[tuple[int, str]] = ()
    """How many each cause has lost, and its words for one of them; the most common one first."""

    @property
    def share(self) -> float:
        return self.lost / self.total if self.total else 0.0

    @property
    def count(self) -> str:
        """`180 of 200`."""
        return f"{self.lost:,} of {self.total:,}"

    def describe(self, stage: str) -> str:
        """Return `iteration 3: 180 of 200 rollouts lost: environment.step raised ...`."""
        return f"{stage}: {self.count} rollouts lost: {self.explain()}"

    def explain(self) -> str:
        """The causes in words; their numbers where there are several."""
        if len(self.causes) == 1:
            return self.causes[0][1]
        shown = "; ".join(f"{count} x {cause}" for count, cause in self.causes[:_MOST_CAUSES])
        more = len(self.causes) - _MOST_CAUSES
        return f"{shown}; and {more} other causes" if more > 0 else shown or "no cause is known"

    def row(self, room: str = "rollout") -> dict[str, Any]:
        """The causes for a row of metrics, which has the counts too; empty without losses.

        A list, because sinks and the store make a curve of every number in a dict.
        """
        return {f"{room}/{_CAUSES}": [list(cause) for cause in self.causes]} if self.lost else {}


NO_LOSSES = Losses(0, 0)


def count_losses(collection: Collection) -> Losses:
    """Count the lost rollouts of a stage by their causes."""
    words: dict[str, Counter[str]] = defaultdict(Counter)
    for rollout in collection.failed:
        text = _text(rollout)
        words[_DIFFERS.sub(_keep_place, text)][text] += 1
    causes = [(texts.total(), texts.most_common(1)[0][0]) for texts in words.values()]
    causes.sort(key=lambda cause: -cause[0])
    return Losses(len(collection.failed), len(collection.all), tuple(causes))


def losses_in(row: Mapping[str, Any], *, branches: bool = False) -> Losses:
    """The losses that a row of metrics tells; rows of earlier versions tell no causes."""
    lost, finished = (int(row.get(names[branches], 0)) for names in (FAILED, FINISHED))
    room = FAILED[branches].partition("/")[0]
    causes = tuple((int(count), str(cause)) for count, cause in row.get(f"{room}/{_CAUSES}", ()))
    return Losses(lost, lost + finished, causes)


def sum_losses(sums: Mapping[str, float]) -> Losses:
    """All losses of a run, by the sums of FAILED and FINISHED over its rows."""
    lost, finished = (int(sum(sums.get(name, 0.0) for name in names)) for names in (FAILED, FINISHED))
    return Losses(lost, lost + finished)


def refuse_losses(collection: Collection, stage: str, *, most: float = 1.0, log: Path | None = None) -> None:
    """Raise the error of a stage that lost all of its rollouts, or more than an accident would.

    Args:
        stage: names it in the error.
        most: the largest share, `training.max_lost_share`; it applies from LEAST_ROLLOUTS on.
        log: the log of the job's own task app; absent: its operator knows where it is.

    Raises:
        JobTeachesNothing: every rollout failed in a way that recurs.
        NothingToLearnFrom: none was finished.
        TooManyLost: too many failed.
    """
    losses = count_losses(collection)
    recurs = all(item.failure is not None and item.failure.recurs for item in collection.failed)
    where = f"the task app's log ({log})" if log is not None and log.exists() else "the task app's log"
    if not collection.rollouts:
        raise (JobTeachesNothing if recurs and losses.lost else NothingToLearnFrom)(
            losses.describe(stage),
            hint=f"Each was tried twice, and a resumed run tries them again; {where} says more.",
        )
    if losses.total >= LEAST_ROLLOUTS and losses.share > most:
        error = TooManyLost(
            losses.describe(stage),
            hint=f"That is more than training.max_lost_share ({most:g}). A resumed run plays the lost ones "
            f"again; {where} says more.",
        )
        error.recurs = recurs
        raise error


@dataclass(frozen=True, slots=True)
class LossCheck:
    """Reports what the stages of a run lose, and refuses what is no accident."""

    say: Callable[[str], None]
    most: float
    """`training.max_lost_share`."""
    log: Path
    """The log of the job's own task app."""
    record: Callable[[dict[str, Any]], None]
    """Keeps the row of a stage that ends the run."""

    def report(self, collection: Collection, stage: str) -> None:
        losses = count_losses(collection)
        if losses.lost:
            self.say(losses.describe(stage))
        episodes = [item.trajectory for item in collection.rollouts if item.trajectory is not None]
        cut = sum(episode.stop_reason == "deadline" for episode in episodes)
        if episodes and cut / len(episodes) >= NOTABLE_SHARE:
            self.say(f"{stage}: {cut:,} of {len(episodes):,} episodes were cut short by their time limit")

    def refuse(self, collection: Collection, stage: str, iteration: int) -> None:
        """Raise what `refuse_losses` raises, with a row for the page and the report of the run."""
        try:
            refuse_losses(collection, stage, most=self.most, log=self.log)
        except TrainerError:
            losses = count_losses(collection)
            counts = zip((FAILED[0], FINISHED[0]), (losses.lost, losses.total - losses.lost), strict=True)
            row = {"iteration": iteration, "stage": stage}
            self.record(row | {name: float(count) for name, count in counts} | losses.row())
            raise


def _keep_place(found: re.Match[str]) -> str:
    return found[0] if ".py:" in found[0] and found[0][0] not in "'\"" else ""


def _text(rollout: Rollout) -> str:
    if rollout.failure is None:
        return rollout.status
    words = rollout.failure.detail.replace(rollout.rollout_id, "…")[:_MOST_CHARS]
    return words or rollout.failure.code
