"""The queue of a collection: which task app has which rollout, and the result of each. No I/O.

Each task app takes a group, then the next; if the queue is empty, it helps another app with its group. A
faster app has room again sooner, so it takes more.

Every rollout counts once, from whichever task app it comes first. A rollout lost with its task app is
requested again under the same id and seeds; a failed one is planned once more under a new id, with the same
seeds.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shared_schemas.rollouts import Rollout, RolloutFailure, RolloutRequest
from trainer_backend.collect.apps import App
from trainer_backend.collect.plan import retried
from trainer_backend.collect.wire import TaskAppLost

# The result of a plan: finished rollouts, failed ones, and the work of each task app.

# Called with the number of ended rollouts, and the total.
Progress = Callable[[int, int], None]
# Called with each finished rollout, before its task app may forget it.
Keep = Callable[[Rollout], None]


@dataclass(frozen=True, slots=True)
class AppFigures:
    """The work of a task app in a collection.

    Attributes:
        finished: finished rollouts from it that count.
        losses: rollouts that were lost with it and requested again.
        outages: how often it stopped answering.
        decisions: decisions in its finished rollouts.
        wall_s: total time of its finished rollouts, which overlap.
        answers: whether it answered at the end.
    """

    finished: int
    losses: int
    outages: int
    decisions: int
    wall_s: float
    answers: bool

    @property
    def seconds_per_decision(self) -> float | None:
        """Mean time of a decision, or None without decisions."""
        return self.wall_s / self.decisions if self.decisions else None


@dataclass(frozen=True, slots=True)
class Collection:
    """The result of a plan.

    Attributes:
        rollouts: finished ones, sorted by group and sibling, so the order of arrival has no effect.
        failed: rollouts that failed for good.
        failures: counts of failure codes, including retried rollouts.
        apps: by host and port.
        reused: ids of rollouts that an earlier start of the run collected.
    """

    rollouts: tuple[Rollout, ...]
    failed: tuple[Rollout, ...] = ()
    failures: Counter[str] = field(default_factory=Counter)
    apps: Mapping[str, AppFigures] = field(default_factory=dict)
    reused: frozenset[str] = frozenset()

    @property
    def all(self) -> tuple[Rollout, ...]:
        """Finished rollouts, then failed ones: everything to store and acknowledge."""
        return (*self.rollouts, *self.failed)


class Tally:
    """The rollouts that have ended so far, at all task apps."""

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

    def add_finished(self, rollout: Rollout) -> None:
        if self._keep is not None:
            self._keep(rollout)
        self._finished.append(rollout)
        self._tell()

    def count_failure(self, code: str) -> None:
        self._failures[code] += 1

    def add_failed(self, rollout: Rollout) -> None:
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


def with_earlier(collection: Collection, earlier: Sequence[Rollout]) -> Collection:
    """Add the finished rollouts of an earlier start to a collection."""
    rollouts = tuple(sorted((*earlier, *collection.rollouts), key=_place))
    return replace(collection, rollouts=rollouts, reused=frozenset(item.rollout_id for item in earlier))


def join_rounds(rounds: Sequence[Collection]) -> Collection:
    """Join the collections of one iteration, in the order of its rounds."""
    apps: dict[str, AppFigures] = {}
    for part in rounds:
        apps |= {name: _sum(apps.get(name), figures) for name, figures in part.apps.items()}
    return Collection(
        tuple(rollout for part in rounds for rollout in part.rollouts),
        tuple(rollout for part in rounds for rollout in part.failed),
        sum((part.failures for part in rounds), Counter()),
        apps,
        frozenset().union(*(part.reused for part in rounds)),
    )


def _place(rollout: Rollout) -> tuple[str, int, str]:
    return rollout.group_id, rollout.sibling, rollout.rollout_id


def _sum(before: AppFigures | None, after: AppFigures) -> AppFigures:
    if before is None:
        return after
    return AppFigures(
        before.finished + after.finished,
        before.losses + after.losses,
        before.outages + after.outages,
        before.decisions + after.decisions,
        before.wall_s + after.wall_s,
        after.answers,
    )


_MAX_ATTEMPTS = 2
# A rollout that takes down its task app each time must not take down all of them.
_MAX_LOSSES = 3


@dataclass(slots=True, eq=False)
class QueueEntry:
    """An unfinished rollout. `desk` has it (None: it waits); `failed_at` is where it failed last."""

    request: RolloutRequest
    desk: "Desk | None" = None
    failed_at: "Desk | None" = None
    failures: int = 0
    losses: int = 0

    @property
    def rollout_id(self) -> str:
        return self.request.rollout_id


@dataclass(slots=True, eq=False)
class Desk:
    """The part of a collection at one task app.

    Attributes:
        group: rollouts of its current group that no app has yet.
        entries: the rollouts that it has, by id.
        unsent: those of them not requested yet.
        requests: those of them requested, with the instance that accepted; "" before that.
        stale: rollouts that other apps have now, and that it may still run or hold.
        discard: results that it may forget at once.
        unacked: results that count, which it holds until they are stored.
        wake: set when there is something to send.
    """

    app: App
    group: deque[QueueEntry] = field(default_factory=deque)
    entries: dict[str, QueueEntry] = field(default_factory=dict)
    unsent: list[QueueEntry] = field(default_factory=list)
    requests: dict[str, str] = field(default_factory=dict)
    stale: set[str] = field(default_factory=set)
    discard: list[str] = field(default_factory=list)
    unacked: list[str] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    finished: int = 0
    losses: int = 0
    outages: int = 0
    decisions: int = 0
    wall_s: float = 0.0

    @property
    def open(self) -> bool:
        """Whether it takes work."""
        return self.app.fault is None and not self.app.retired

    def take_back(self, entry: QueueEntry) -> bool:
        """Take a rollout from this app; return whether the app may have received its request."""
        del self.entries[entry.rollout_id]
        entry.desk = None
        if self.requests.pop(entry.rollout_id, None) is not None:
            return True
        self.unsent.remove(entry)
        return False

    def figures(self) -> AppFigures:
        answers = self.app.fault is None
        return AppFigures(self.finished, self.losses, self.outages, self.decisions, self.wall_s, answers)


class Work:
    """The queue and the desks of one collection.

    Args:
        requests: all of one run.
        places: limit of unfinished rollouts at all task apps together.
        tally: receives the ended rollouts.
    """

    def __init__(self, requests: Sequence[RolloutRequest], *, places: int, tally: Tally) -> None:
        self.run_id = requests[0].run_id
        self.tally = tally
        self.desks: list[Desk] = []
        self.done = asyncio.Event()
        self._places = places
        self._open = {request.rollout_id: QueueEntry(request) for request in requests}
        groups: dict[str, deque[QueueEntry]] = {}
        for entry in self._open.values():
            groups.setdefault(entry.request.group_id, deque()).append(entry)
        self._groups = deque(groups.values())
        # Lost and failed rollouts come before new ones.
        self._again: deque[QueueEntry] = deque()

    def deal(self) -> None:
        """Let task apps with room take rollouts, until none can or all places are taken.

        The app with the fewest unfinished rollouts for its weight is next. An app without any is always next:
        otherwise it could never show that it has become fast or works again.
        """
        free = self._places - sum(len(desk.entries) for desk in self.desks)
        while free > 0 and self._take_one():
            free -= 1

    def end(self, desk: Desk, rollout: Rollout) -> None:
        """Record a rollout's end. It counts unless it has counted before, or another app has it now."""
        entry = self._open.get(rollout.rollout_id)
        desk.stale.discard(rollout.rollout_id)
        if entry is None or (entry.desk is not desk and rollout.status != "finished"):
            desk.discard.append(rollout.rollout_id)
            return
        # While an idle app waits for work, slower ones overtake it, which says nothing about its speed.
        if entry.desk is desk and all(other.entries for other in self.desks if other.open):
            desk.app.judge(finished=rollout.status == "finished")
        self._take_back(entry, but_from=desk)
        if rollout.status == "finished":
            desk.finished += 1
            if rollout.trajectory is not None:
                desk.decisions += len(rollout.trajectory.steps)
                desk.wall_s += rollout.trajectory.wall_s
            desk.unacked.append(rollout.rollout_id)
            self.tally.add_finished(rollout)
            self._close(entry)
        else:
            self._failed(entry, desk, rollout)

    def lose(self, desk: Desk, rollout_ids: Iterable[str], *, why: str) -> None:
        """Give rollouts that a task app lost, or that were lost with it, back to the queue."""
        for entry in [desk.entries[rollout_id] for rollout_id in reversed(list(rollout_ids))]:
            if desk.take_back(entry):
                entry.losses += 1
                desk.losses += 1
                self.tally.count_failure(TaskAppLost.code)
            if entry.losses < _MAX_LOSSES:
                self._again.appendleft(entry)
            else:
                self.tally.add_failed(_loss_record(entry.request, desk.app.instance_id, why))
                self._close(entry)
        self.deal()

    def _take_one(self) -> bool:
        """Let one task app take a rollout; return whether one could."""
        takers = [desk for desk in self.desks if desk.open and len(desk.entries) < desk.app.at_most]
        for desk in sorted(takers, key=lambda desk: len(desk.entries) / desk.app.weight):
            entry = self._next_for(desk)
            if entry is not None:
                entry.desk = desk
                desk.entries[entry.rollout_id] = entry
                desk.unsent.append(entry)
                desk.wake.set()
                return True
        return False

    def _next_for(self, desk: Desk) -> QueueEntry | None:
        """Take the next rollout for an app. Siblings stay together while other groups wait."""
        alone = sum(other.open for other in self.desks) == 1
        for entry in self._again:
            if alone or entry.failed_at is not desk:  # where it failed only if there is no other app
                self._again.remove(entry)
                return entry
        if not desk.group and self._groups:
            desk.group = self._groups.popleft()
        group = desk.group or max((other.group for other in self.desks), key=len)
        return group.popleft() if group else None

    def _take_back(self, entry: QueueEntry, *, but_from: Desk) -> None:
        """Take a rollout from the app that has it, and cancel it there if it may still be running."""
        desk = entry.desk
        if desk is None:
            self._again.remove(entry)
        elif desk.take_back(entry) and desk is not but_from:
            desk.stale.add(entry.rollout_id)
            desk.wake.set()

    def _failed(self, entry: QueueEntry, desk: Desk, rollout: Rollout) -> None:
        # If another party cancelled it, its task app is stopping: that is no fault of the rollout.
        entry.losses += rollout.status == "cancelled"
        if rollout.status != "cancelled":
            entry.failures += 1
            entry.failed_at = desk
        self.tally.count_failure(rollout.failure.code if rollout.failure else rollout.status)
        if entry.failures < _MAX_ATTEMPTS and entry.losses < _MAX_LOSSES:
            desk.discard.append(rollout.rollout_id)
            del self._open[rollout.rollout_id]
            entry.request = retried(entry.request)
            self._open[entry.rollout_id] = entry
            self._again.appendleft(entry)
        else:
            desk.unacked.append(rollout.rollout_id)
            self.tally.add_failed(rollout)
            self._close(entry)

    def _close(self, entry: QueueEntry) -> None:
        del self._open[entry.rollout_id]
        if not self._open:
            self.done.set()


def _loss_record(request: RolloutRequest, instance_id: str, why: str) -> Rollout:
    """Return the record of a rollout that no task app could finish."""
    detail = f"{_MAX_LOSSES} times a task app was lost with it; the last one: {why}"
    return Rollout(
        **request.model_dump(include={"rollout_id", "run_id", "iteration", "group_id", "sibling", "attempt"}),
        instance_id=instance_id,
        status="failed",
        failure=RolloutFailure(code=TaskAppLost.code, detail=detail),
    )
