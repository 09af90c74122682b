"""What came back of requested rollouts: finished ones, failed ones, and the work of each task app."""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from shared_schemas.rollouts import Rollout
from trainer_backend.collect.losses import Losses
from trainer_backend.errors import JobTeachesNothing, NothingToLearnFrom, TooManyLost

# The failure code of rollouts that were finished, and cannot be learned from.
REJECTED = "rollout_rejected"
# A batch of fewer rollouts may lose a large share by accident.
LEAST_ROLLOUTS = 8
# The share of missing or cut episodes from which on a stage says so.
NOTABLE_SHARE = 0.1


@dataclass(slots=True)
class AppFigures:
    """The work of a task app in a batch."""

    finished: int = 0
    losses: int = 0
    """Rollouts that were lost with it and requested again."""
    outages: int = 0
    """How often it stopped answering."""
    decisions: int = 0
    wall_s: float = 0.0
    """Total time of its finished rollouts, which overlap."""
    answers: bool = False
    """Whether it answered at the end."""

    def __add__(self, later: "AppFigures") -> "AppFigures":
        names = ("finished", "losses", "outages", "decisions", "wall_s")
        return replace(later, **{name: getattr(self, name) + getattr(later, name) for name in names})


@dataclass(frozen=True, slots=True)
class Batch:
    """What came back."""

    rollouts: tuple[Rollout, ...] = ()
    """The finished ones, by group and sibling, so the order of arrival has no effect."""
    failed: tuple[Rollout, ...] = ()
    """Those that failed for good."""
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
        """Join the batches of one iteration, in the order of its rounds."""
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
        """Put the rollouts of another batch among these, each in its place."""
        joined = Batch.join([self, other])
        return replace(joined, rollouts=in_order(joined.rollouts))

    def without(self, ids: Container[str]) -> Self:
        """The batch without these finished rollouts. They count as REJECTED, and as no loss, since others are
        played in their place."""
        rest = tuple(rollout for rollout in self.rollouts if rollout.rollout_id not in ids)
        count = len(self.rollouts) - len(rest)
        failures = self.failures + Counter({REJECTED: count} if count else {})
        return replace(self, rollouts=rest, failures=failures)


def in_order(rollouts: Iterable[Rollout]) -> tuple[Rollout, ...]:
    """Sort by group and sibling, as numbers: group 2 is before group 10."""
    return tuple(sorted(rollouts, key=_place))


def _place(rollout: Rollout) -> tuple[list[tuple[int, str]], int, str]:
    parts = rollout.group_id.split("/")
    # Of two numbers the one with fewer digits is the lower one; words come first, in their own order.
    group = [(len(part) if part.isdecimal() else 0, part) for part in parts]
    return group, rollout.sibling, rollout.rollout_id


@dataclass(frozen=True, slots=True)
class LossCheck:
    """Reports what stages lose, and refuses what is no accident."""

    log: Path | None = None
    """The log of the job's own task app; None: its operator knows where it is."""
    most: float = 1.0
    """The largest share, `training.max_lost_share`; it applies from LEAST_ROLLOUTS on."""
    say: Callable[[str], None] = lambda _: None
    record: Callable[[dict[str, Any]], None] = lambda _: None
    """Keeps the row of a stage that ends the run."""

    def report(self, batch: Batch, stage: str) -> None:
        if batch.losses.lost:
            self.say(batch.losses.describe(stage))
        episodes = [item.trajectory for item in batch.rollouts if item.trajectory is not None]
        cut = sum(episode.stop_reason == "deadline" for episode in episodes)
        if episodes and cut / len(episodes) >= NOTABLE_SHARE:
            self.say(f"{stage}: {cut:,} of {len(episodes):,} episodes were cut short by their time limit")

    def refuse(self, batch: Batch, stage: str, iteration: int = 0) -> None:
        """End a stage that lost all of its rollouts, or more than an accident would.

        Raises:
            JobTeachesNothing: every rollout failed in a way that recurs.
            NothingToLearnFrom: none was finished.
            TooManyLost: too many failed.
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
