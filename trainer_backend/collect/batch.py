"""The results of requested rollouts: finished ones, failed ones, and the work of each task app."""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import StopReason, Trajectory
from trainer_backend.collect.losses import Losses
from trainer_backend.errors import JobTeachesNothing, NothingToLearnFrom, TooManyLost

# The failure code of finished rollouts that cannot be learned from.
REJECTED = "rollout_rejected"
# A batch of fewer rollouts may lose a large share by accident.
LEAST_ROLLOUTS = 8
# A stage reports missing or cut episodes from this share on.
NOTABLE_SHARE = 0.1


@dataclass(slots=True)
class AppFigures:
    """The work of a task app in a batch."""

    finished: int = 0
    losses: int = 0
    """Rollouts that were lost with the app and requested again."""
    outages: int = 0
    """How often the app stopped answering."""
    decisions: int = 0
    wall_s: float = 0.0
    """Total time of the app's finished rollouts, which overlap."""
    answers: bool = False
    """Whether the app answered at the end."""

    def __add__(self, later: "AppFigures") -> "AppFigures":
        names = ("finished", "losses", "outages", "decisions", "wall_s")
        return replace(later, **{name: getattr(self, name) + getattr(later, name) for name in names})


@dataclass(frozen=True, slots=True)
class Batch:
    rollouts: tuple[Rollout, ...] = ()
    """The finished rollouts, by group and sibling, so that the order of arrival has no effect."""
    failed: tuple[Rollout, ...] = ()
    """The rollouts that failed for good."""
    failures: Counter[str] = field(default_factory=Counter)
    """Counts of failure codes, including retried rollouts."""
    apps: Mapping[str, AppFigures] = field(default_factory=dict)
    """The work of each task app, by its label."""
    reused: frozenset[str] = frozenset()
    """Ids of rollouts that an earlier start of the run collected."""

    @property
    def all(self) -> tuple[Rollout, ...]:
        """Finished rollouts, then failed ones: everything to store and acknowledge."""
        return (*self.rollouts, *self.failed)

    @property
    def losses(self) -> Losses:
        return Losses.of(self.failed, len(self.all))

    @classmethod
    def join(cls, batches: Iterable["Batch"]) -> "Batch":
        """Join the batches of one iteration, in the order of the iteration's rounds."""
        joined = cls()
        for batch in batches:
            apps = {name: joined.apps.get(name, AppFigures()) + work for name, work in batch.apps.items()}
            joined = Batch(
                (*joined.rollouts, *batch.rollouts),
                (*joined.failed, *batch.failed),
                joined.failures + batch.failures,
                {**joined.apps, **apps},
                joined.reused | batch.reused,
            )
        return joined

    def merge(self, other: "Batch") -> "Batch":
        """Join another batch, and sort the rollouts by group and sibling."""
        joined = Batch.join([self, other])
        return replace(joined, rollouts=in_order(joined.rollouts))

    def without(self, ids: Container[str]) -> Self:
        """Remove these finished rollouts. They count as REJECTED, not as lost, since others replace them."""
        rest = tuple(rollout for rollout in self.rollouts if rollout.rollout_id not in ids)
        count = len(self.rollouts) - len(rest)
        failures = self.failures + Counter({REJECTED: count} if count else {})
        return replace(self, rollouts=rest, failures=failures)


def in_order(rollouts: Iterable[Rollout]) -> tuple[Rollout, ...]:
    """Sort by group and sibling in numeric order: group 2 is before group 10."""
    return tuple(sorted(rollouts, key=_place))


def _place(rollout: Rollout) -> tuple[list[tuple[int, str]], int, str]:
    parts = rollout.group_id.split("/")
    # A number with fewer digits is lower; words come first, in alphabetical order.
    group = [(len(part) if part.isdecimal() else 0, part) for part in parts]
    return group, rollout.sibling, rollout.rollout_id


def count_cut_short(episodes: Iterable[Trajectory]) -> int:
    """Count the episodes that their time limit cut short."""
    return sum(episode.stop_reason is StopReason.DEADLINE for episode in episodes)


@dataclass(frozen=True, slots=True)
class LossCheck:
    """Reports the lost rollouts of stages, and ends a run that loses too many."""

    log: Path | None = None
    """The log of the job's own task app; None if the job has no task app of its own."""
    most: float = 1.0
    """The largest share that may be lost (`training.max_lost_share`), in stages of LEAST_ROLLOUTS or more."""
    say: Callable[[str], None] = lambda _: None
    record: Callable[[dict[str, Any]], None] = lambda _: None
    """Stores the metrics row of a stage that ends the run."""

    def report(self, batch: Batch, stage: str) -> None:
        if batch.losses.lost:
            self.say(batch.losses.describe(stage))
        episodes = [item.trajectory for item in batch.rollouts if item.trajectory is not None]
        cut = count_cut_short(episodes)
        if episodes and cut / len(episodes) >= NOTABLE_SHARE:
            self.say(f"{stage}: {cut:,} of {len(episodes):,} episodes were cut short by their time limit")

    def refuse(self, batch: Batch, stage: str, iteration: int = 0) -> None:
        """Raise an error if a stage lost all or too many of its rollouts.

        Raises:
            JobTeachesNothing: every rollout failed in a way that recurs.
            NothingToLearnFrom: no rollout was finished.
            TooManyLost: a larger share than `most` failed.
        """
        losses = batch.losses
        too_many = losses.total >= LEAST_ROLLOUTS and losses.share > self.most
        if batch.rollouts and not too_many:
            return
        self.record({"iteration": iteration, "stage": stage, **losses.row()})
        recurs = all(item.failure is not None and item.failure.recurs for item in batch.failed)
        has_log = self.log is not None and self.log.exists()
        where = f"the task app's log ({self.log})" if has_log else "the task app's log"
        if not batch.rollouts:
            raise (JobTeachesNothing if recurs and losses.lost else NothingToLearnFrom)(
                losses.describe(stage),
                hint=f"Each was tried twice, and a resumed run tries them again; {where} says more.",
            )
        error = TooManyLost(
            losses.describe(stage),
            hint=f"That is more than training.max_lost_share ({self.most:g}). A resumed run plays the lost "
            f"ones again; {where} says more.",
        )
        error.recurs = recurs
        raise error
