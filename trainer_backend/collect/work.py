"""The rollouts of a collection: one queue, which task app has which, and what becomes of each. No I/O.

The task apps share the queue out by themselves. Each takes a group, then the next; one that finds the queue
empty helps another app with its group. A faster app has room again sooner, and so takes more.

Every rollout counts once, whichever task app brings it first. One that goes with its task app is asked for
again, under the same id and seeds; one that fails is planned once more under a new id, with the same seeds.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shared_schemas.rollouts import Rollout, RolloutFailure, RolloutRequest
from trainer_backend.collect.apps import App
from trainer_backend.collect.plan import retried
from trainer_backend.collect.wire import TaskAppLost

# What came of a plan: finished rollouts, failed ones, and what each task app did for it.

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
    """The rollouts that have ended so far, over all task apps."""

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
    """Join a collection with the finished rollouts of an earlier start."""
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


_MAX_ATTEMPTS = 2
# A rollout that takes its task app with it each time must not go round them all.
_MAX_LOSSES = 3


@dataclass(slots=True, eq=False)
class Planned:
    """A rollout that has not ended; `desk` has it, None: it waits; `failed_at` is where it failed last."""

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
    """The part of a collection that one task app has.

    Attributes:
        group: what nobody has yet of the group that it took last.
        given: rollouts that it has, by id.
        unsent: of these, those that it is yet to be asked for.
        asked: of these, those that it was asked for, and the instance that accepted; "" before it has.
        unwanted: rollouts that others have now, and that it may still run or hold.
        settled: results that it may forget at once.
        unacked: results that count, and that it holds until they are stored.
        wake: set when there is something to send.
    """

    app: App
    group: deque[Planned] = field(default_factory=deque)
    given: dict[str, Planned] = field(default_factory=dict)
    unsent: list[Planned] = field(default_factory=list)
    asked: dict[str, str] = field(default_factory=dict)
    unwanted: set[str] = field(default_factory=set)
    settled: list[str] = field(default_factory=list)
    unacked: list[str] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    finished: int = 0
    lost: int = 0
    outages: int = 0
    decisions: int = 0
    wall_s: float = 0.0

    @property
    def open(self) -> bool:
        """Whether it takes work."""
        return self.app.lost is None and not self.app.retired

    def take_back(self, planned: Planned) -> bool:
        """Take a rollout from this app; return whether the app may have received its request."""
        del self.given[planned.rollout_id]
        planned.desk = None
        if self.asked.pop(planned.rollout_id, None) is not None:
            return True
        self.unsent.remove(planned)
        return False

    def figures(self) -> AppFigures:
        answers = self.app.lost is None
        return AppFigures(self.finished, self.lost, self.outages, self.decisions, self.wall_s, answers)


class Work:
    """
    Args:
        requests: all of one run.
        places: how many may be with task apps at a time.
        tally: is told what ended.
    """

    def __init__(self, requests: Sequence[RolloutRequest], *, places: int, tally: Tally) -> None:
        self.run_id = requests[0].run_id
        self.tally = tally
        self.desks: list[Desk] = []
        self.done = asyncio.Event()
        self._places = places
        self._open = {request.rollout_id: Planned(request) for request in requests}
        groups: dict[str, deque[Planned]] = {}
        for planned in self._open.values():
            groups.setdefault(planned.request.group_id, deque()).append(planned)
        self._groups = deque(groups.values())
        # What was lost or has failed is taken before anything new.
        self._again: deque[Planned] = deque()

    def deal(self) -> None:
        """Let the task apps that have room take what waits, until none can or no place is free.

        The app whose turn it is has the fewest unfinished rollouts for its weight. One that has none is
        always next: it could not show otherwise that it has become fast, or that it is in order again.
        """
        free = self._places - sum(len(desk.given) for desk in self.desks)
        while free > 0 and self._take_one():
            free -= 1

    def end(self, desk: Desk, rollout: Rollout) -> None:
        """A rollout has ended at a task app. It counts unless it has counted, or another app has it now."""
        planned = self._open.get(rollout.rollout_id)
        desk.unwanted.discard(rollout.rollout_id)
        if planned is None or (planned.desk is not desk and rollout.status != "finished"):
            desk.settled.append(rollout.rollout_id)
            return
        # An app that stands idle for want of work is overtaken by slower ones: that would tell nothing.
        if planned.desk is desk and all(other.given for other in self.desks if other.open):
            desk.app.judge(finished=rollout.status == "finished")
        self._take_back(planned, but_from=desk)
        if rollout.status == "finished":
            desk.finished += 1
            if rollout.trajectory is not None:
                desk.decisions += len(rollout.trajectory.steps)
                desk.wall_s += rollout.trajectory.wall_s
            desk.unacked.append(rollout.rollout_id)
            self.tally.finished(rollout)
            self._close(planned)
        else:
            self._failed(planned, desk, rollout)

    def lose(self, desk: Desk, rollout_ids: Iterable[str], *, why: str) -> None:
        """A task app has lost these, or was lost with them; others take them."""
        for planned in [desk.given[rollout_id] for rollout_id in reversed(list(rollout_ids))]:
            if desk.take_back(planned):
                planned.losses += 1
                desk.lost += 1
                self.tally.failed_once(TaskAppLost.code)
            if planned.losses < _MAX_LOSSES:
                self._again.appendleft(planned)
            else:
                self.tally.failed_for_good(_lost(planned.request, desk.app.instance_id, why))
                self._close(planned)
        self.deal()

    def _take_one(self) -> bool:
        """Whether a task app has taken a rollout."""
        takers = [desk for desk in self.desks if desk.open and len(desk.given) < desk.app.at_most]
        for desk in sorted(takers, key=lambda desk: len(desk.given) / desk.app.weight):
            planned = self._next_for(desk)
            if planned is not None:
                planned.desk = desk
                desk.given[planned.rollout_id] = planned
                desk.unsent.append(planned)
                desk.wake.set()
                return True
        return False

    def _next_for(self, desk: Desk) -> Planned | None:
        """Take it from the queue. Siblings stay together while there are other groups to take."""
        alone = sum(other.open for other in self.desks) == 1
        for planned in self._again:
            if alone or planned.failed_at is not desk:  # where it failed only if there is no other app
                self._again.remove(planned)
                return planned
        if not desk.group and self._groups:
            desk.group = self._groups.popleft()
        group = desk.group or max((other.group for other in self.desks), key=len)
        return group.popleft() if group else None

    def _take_back(self, planned: Planned, *, but_from: Desk) -> None:
        """Take a rollout from the app that has it, and cancel it there if it may still be running."""
        desk = planned.desk
        if desk is None:
            self._again.remove(planned)
        elif desk.take_back(planned) and desk is not but_from:
            desk.unwanted.add(planned.rollout_id)
            desk.wake.set()

    def _failed(self, planned: Planned, desk: Desk, rollout: Rollout) -> None:
        # A rollout that was cancelled, and not by us, was so by a task app that stops: no fault of its own.
        planned.losses += rollout.status == "cancelled"
        if rollout.status != "cancelled":
            planned.failures += 1
            planned.failed_at = desk
        self.tally.failed_once(rollout.failure.code if rollout.failure else rollout.status)
        if planned.failures < _MAX_ATTEMPTS and planned.losses < _MAX_LOSSES:
            desk.settled.append(rollout.rollout_id)
            del self._open[rollout.rollout_id]
            planned.request = retried(planned.request)
            self._open[planned.rollout_id] = planned
            self._again.appendleft(planned)
        else:
            desk.unacked.append(rollout.rollout_id)
            self.tally.failed_for_good(rollout)
            self._close(planned)

    def _close(self, planned: Planned) -> None:
        del self._open[planned.rollout_id]
        if not self._open:
            self.done.set()


def _lost(request: RolloutRequest, instance_id: str, why: str) -> Rollout:
    """The record of a rollout that no task app has brought to an end."""
    told = f"{_MAX_LOSSES} times a task app was lost with it; the last one: {why}"
    return Rollout(
        **request.model_dump(include={"rollout_id", "run_id", "iteration", "group_id", "sibling", "attempt"}),
        instance_id=instance_id,
        status="failed",
        failure=RolloutFailure(code=TaskAppLost.code, detail=told),
    )
