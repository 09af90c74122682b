"""The results of a batch of requested rollouts, and the check whether too many of the rollouts failed."""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import StopReason, Trajectory
from trainer_backend.collect.losses import Losses
from trainer_backend.errors import JobTeachesNothing, NothingToLearnFrom, TooManyLost

# The failure code of rollouts that finished, but cannot be used for training.
REJECTED = "rollout_rejected"
# The limit on the lost share applies from this many rollouts on, because a small batch may lose a large share
# by chance.
LEAST_ROLLOUTS = 8
# A stage reports episodes that were cut short if their share is at least this large.
NOTABLE_SHARE = 0.1


@dataclass(slots=True)
class AppFigures:
    """Counts of what one task app did for a batch."""

    finished: int = 0
    losses: int = 0
    """How many rollouts the app lost before they ended. A lost rollout is requested again, up to a limit."""
    outages: int = 0
    """How many times the app stopped answering."""
    decisions: int = 0
    wall_s: float = 0.0
    """Sum of the durations of the app's finished rollouts. It exceeds the elapsed time if they overlap."""
    answers: bool = False
    """Whether the app answered when the batch ended."""

    def __add__(self, later: "AppFigures") -> "AppFigures":
        names = ("finished", "losses", "outages", "decisions", "wall_s")
        return replace(later, **{name: getattr(self, name) + getattr(later, name) for name in names})


@dataclass(frozen=True, slots=True)
class Batch:
    rollouts: tuple[Rollout, ...] = ()
    """The finished rollouts, sorted by group and sibling, so that the order of arrival has no effect."""
    failed: tuple[Rollout, ...] = ()
    """The rollouts that failed and are not retried any more."""
    failures: Counter[str] = field(default_factory=Counter)
    """Number of failures by failure code. Attempts that were retried, and rejected rollouts, are included."""
    apps: Mapping[str, AppFigures] = field(default_factory=dict)
    """Figures of each task app, by the label of the app."""
    reused: frozenset[str] = frozenset()
    """Ids of rollouts that were collected before the run was resumed."""

    @property
    def all(self) -> tuple[Rollout, ...]:
        """The finished rollouts, followed by the failed ones; all of them are stored and acknowledged."""
        return (*self.rollouts, *self.failed)

    @property
    def losses(self) -> Losses:
        return Losses.of(self.failed, len(self.all))

    @classmethod
    def join(cls, batches: Iterable["Batch"]) -> "Batch":
        """Concatenate the batches of one iteration, given in the order in which they were requested."""
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
        """Return the union of this and another batch, with finished rollouts sorted by group and sibling."""
        joined = Batch.join([self, other])
        return replace(joined, rollouts=in_order(joined.rollouts))

    def without(self, ids: Container[str]) -> Self:
        """Return a copy without the finished rollouts that have these ids.

        `failures` counts each removed rollout under the code REJECTED; `losses` does not count it as lost.
        """
        rest = tuple(rollout for rollout in self.rollouts if rollout.rollout_id not in ids)
        count = len(self.rollouts) - len(rest)
        failures = self.failures + Counter({REJECTED: count} if count else {})
        return replace(self, rollouts=rest, failures=failures)


def in_order(rollouts: Iterable[Rollout]) -> tuple[Rollout, ...]:
    """Sort rollouts by group and sibling. Numbers in group ids are compared as numbers: 2 comes before 10."""
    return tuple(sorted(rollouts, key=_place))


def _place(rollout: Rollout) -> tuple[list[tuple[int, str]], int, str]:
    parts = rollout.group_id.split("/")
    # Numbers are compared by the count of digits first, which gives numeric order. Words count as having no
    # digits, so that they come before numbers, in alphabetical order.
    group = [(len(part) if part.isdecimal() else 0, part) for part in parts]
    return group, rollout.sibling, rollout.rollout_id


def count_cut_short(episodes: Iterable[Trajectory]) -> int:
    """Count the episodes that ended because their time limit was reached."""
    return sum(episode.stop_reason is StopReason.DEADLINE for episode in episodes)


@dataclass(frozen=True, slots=True)
class LossCheck:
    """Reports how many rollouts a stage of a run lost, and raises an error if it lost too many."""

    log: Path | None = None
    """Log file of the task app that the job started itself; None if the job did not start one."""
    most: float = 1.0
    """The largest share of rollouts that a stage may lose (`training.max_lost_share`). The limit applies only
    to stages of at least LEAST_ROLLOUTS rollouts."""
    say: Callable[[str], None] = lambda _: None
    record: Callable[[dict[str, Any]], None] = lambda _: None
    """Called by `refuse` with a row of metrics, before `refuse` raises an error."""

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
            JobTeachesNothing: every rollout failed, and each failure would occur again in a new attempt.
            NothingToLearnFrom: no rollout finished, but a new attempt may succeed.
            TooManyLost: some rollouts finished, but a larger share than `most` failed.
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
