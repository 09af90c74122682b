"""What came of a plan: finished rollouts, failed ones, and what each task app did for it."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shared_schemas.rollouts import Rollout

# Called with how many rollouts have ended, and of how many.
Progress = Callable[[int, int], None]
# Called with each rollout that has finished, before its task app is told to forget it.
Keep = Callable[[Rollout], None]


@dataclass(frozen=True, slots=True)
class AppFigures:
    """What a task app did in a collection.

    Attributes:
        finished: rollouts that it brought and that count.
        lost: rollouts that went with it, and were asked for again.
        outages: how often it stopped answering.
        decisions: of the rollouts that it brought and that count.
        wall_s: what those rollouts took, summed; they run beside each other.
        answers: whether it answered at the end.
    """

    finished: int
    lost: int
    outages: int
    decisions: int
    wall_s: float
    answers: bool

    @property
    def seconds_per_decision(self) -> float | None:
        """None where it brought no decision."""
        return self.wall_s / self.decisions if self.decisions else None


@dataclass(frozen=True, slots=True)
class Collection:
    """What came of a plan.

    Attributes:
        rollouts: finished ones, sorted by group and sibling, so that arrival order never matters.
        failed: those that failed for good.
        failures: how often each failure code was met, retried ones included.
        apps: by host and port.
        reused: ids of those that an earlier start of the run has collected.
    """

    rollouts: tuple[Rollout, ...]
    failed: tuple[Rollout, ...] = ()
    failures: Counter[str] = field(default_factory=Counter)
    apps: Mapping[str, AppFigures] = field(default_factory=dict)
    reused: frozenset[str] = frozenset()

    @property
    def all(self) -> tuple[Rollout, ...]:
        """Finished ones, then failed ones: what is stored and acknowledged."""
        return (*self.rollouts, *self.failed)


class Tally:
    """What has ended so far, over all task apps."""

    def __init__(self, total: int, progress: Progress | None, keep: Keep | None = None) -> None:
        self._total, self._progress, self._keep = total, progress, keep
        self._finished: list[Rollout] = []
        self._failed: list[Rollout] = []
        self._failures: Counter[str] = Counter()

    @property
    def ended(self) -> int:
        return len(self._finished) + len(self._failed)

    @property
    def missing(self) -> str:
        return f"{self._total - self.ended} of {self._total} rollouts were not finished"

    def finished(self, rollout: Rollout) -> None:
        if self._keep is not None:
            self._keep(rollout)
        self._finished.append(rollout)
        self._tell()

    def failed_once(self, code: str) -> None:
        self._failures[code] += 1

    def failed_for_good(self, rollout: Rollout) -> None:
        self._failed.append(rollout)
        self._tell()

    def collection(self, apps: Mapping[str, AppFigures]) -> Collection:
        return Collection(
            tuple(sorted(self._finished, key=_place)),
            tuple(sorted(self._failed, key=_place)),
            self._failures,
            apps,
        )

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(self.ended, self._total)


def with_reused(found: Collection, left: Sequence[Rollout]) -> Collection:
    """What was collected, beside finished rollouts that an earlier start of the run has left."""
    rollouts = tuple(sorted((*left, *found.rollouts), key=_place))
    return replace(found, rollouts=rollouts, reused=frozenset(item.rollout_id for item in left))


def joined(rounds: Sequence[Collection]) -> Collection:
    """The collections of one iteration as one, in the order of its rounds."""
    apps: dict[str, AppFigures] = {}
    for part in rounds:
        apps |= {name: _added(apps.get(name), figures) for name, figures in part.apps.items()}
    return Collection(
        tuple(rollout for part in rounds for rollout in part.rollouts),
        tuple(rollout for part in rounds for rollout in part.failed),
        sum((part.failures for part in rounds), Counter()),
        apps,
        frozenset().union(*(part.reused for part in rounds)),
    )


def _place(rollout: Rollout) -> tuple[str, int, str]:
    return rollout.group_id, rollout.sibling, rollout.rollout_id


def _added(before: AppFigures | None, after: AppFigures) -> AppFigures:
    if before is None:
        return after
    return AppFigures(
        before.finished + after.finished,
        before.lost + after.lost,
        before.outages + after.outages,
        before.decisions + after.decisions,
        before.wall_s + after.wall_s,
        after.answers,
    )
