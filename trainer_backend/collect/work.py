"""The queue of a run's collections: which task app has which rollout, and the result of each. No I/O.

Each task app takes a group, then the next; if the queue is empty, it helps another app with its group. A
faster app has room again sooner, so it takes more. Several collections share the task apps: free places go
to the one of the lowest rank, and the next one fills what it leaves.

Every rollout counts once, from whichever task app it comes first. A rollout lost with its task app is
requested again under the same id and seeds; a failed one is planned once more under a new id, with the same
seeds.
"""

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from shared_schemas.rollouts import Rollout, RolloutFailure, RolloutRequest
from trainer_backend.collect.apps import App
from trainer_backend.collect.arrival import checked
from trainer_backend.collect.plan import retried
from trainer_backend.collect.wire import TaskAppLost

# The result of a plan: finished rollouts, failed ones, and the work of each task app.

# Called with the number of ended rollouts, and the total.
Progress = Callable[[int, int], None]
# Called with each finished rollout, before its task app may forget it.
Keep = Callable[[Rollout], None]


@dataclass(frozen=True, slots=True)
class AppFigures:
    """The work of a task app in a collection."""

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


@dataclass(frozen=True, slots=True)
class Collection:
    """The result of a plan."""

    rollouts: tuple[Rollout, ...]
    """The finished ones, sorted by group and sibling, so the order of arrival has no effect."""
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


class Tally:
    """The rollouts of one collection that have ended so far, at all task apps."""

    def __init__(self, total: int, progress: Progress | None = None, keep: Keep | None = None) -> None:
        self.total, self._progress, self._keep = total, progress, keep
        self._finished: list[Rollout] = []
        self._failed: list[Rollout] = []
        self._failures: Counter[str] = Counter()
        self._apps: dict[App, AppFigures] = {}

    @property
    def ended(self) -> int:
        return len(self._finished) + len(self._failed)

    def add_app(self, app: App) -> None:
        self._apps[app] = AppFigures()

    def add_finished(self, rollout: Rollout, app: App) -> None:
        if self._keep is not None:
            self._keep(rollout)
        self._finished.append(rollout)
        played = rollout.trajectory
        decisions, wall_s = (len(played.steps), played.wall_s) if played is not None else (0, 0.0)
        self.add_figures(app, AppFigures(finished=1, decisions=decisions, wall_s=wall_s))
        self._tell()

    def add_figures(self, app: App, figures: AppFigures) -> None:
        self._apps[app] = _sum(self._apps[app], figures)

    def count_failure(self, code: str) -> None:
        self._failures[code] += 1

    def add_failed(self, rollout: Rollout) -> None:
        self._failed.append(rollout)
        self._tell()

    def collection(self) -> Collection:
        return Collection(
            tuple(sorted(self._finished, key=_place)),
            tuple(sorted(self._failed, key=_place)),
            self._failures,
            {app.label: replace(work, answers=app.fault is None) for app, work in self._apps.items()},
        )

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(self.ended, self.total)


# The failure code of rollouts that were finished, and cannot be learned from.
REJECTED = "rollout_rejected"


def with_earlier(collection: Collection, earlier: Sequence[Rollout]) -> Collection:
    """Add the finished rollouts of an earlier start to a collection."""
    rollouts = tuple(sorted((*earlier, *collection.rollouts), key=_place))
    return replace(collection, rollouts=rollouts, reused=frozenset(item.rollout_id for item in earlier))


def without(collection: Collection, ids: Container[str]) -> Collection:
    """The collection without these finished rollouts. They count as REJECTED, and as no loss, since others
    are played in their place."""
    rest = tuple(rollout for rollout in collection.rollouts if rollout.rollout_id not in ids)
    count = len(collection.rollouts) - len(rest)
    failures = collection.failures + Counter({REJECTED: count} if count else {})
    return replace(collection, rollouts=rest, failures=failures)


def merge(collection: Collection, replacement: Collection) -> Collection:
    """Put the rollouts of another collection among these, each in its place; their failures add up."""
    joined = join_rounds([collection, replacement])
    return replace(joined, rollouts=tuple(sorted(joined.rollouts, key=_place)))


def join_rounds(rounds: Sequence[Collection]) -> Collection:
    """Join the collections of one iteration, in the order of its rounds."""
    apps: dict[str, AppFigures] = {}
    for part in rounds:
        apps |= {name: _sum(apps.get(name, AppFigures()), figures) for name, figures in part.apps.items()}
    return Collection(
        tuple(rollout for part in rounds for rollout in part.rollouts),
        tuple(rollout for part in rounds for rollout in part.failed),
        sum((part.failures for part in rounds), Counter()),
        apps,
        frozenset().union(*(part.reused for part in rounds)),
    )


def _place(rollout: Rollout) -> tuple[list[tuple[int, str]], int, str]:
    """The key of an order by numbers: group 2 is before group 10."""
    parts = rollout.group_id.split("/")
    # Of two numbers the one with fewer digits is the lower one; words come first, in their own order.
    group = [(len(part) if part.isdecimal() else 0, part) for part in parts]
    return group, rollout.sibling, rollout.rollout_id


def _sum(before: AppFigures, after: AppFigures) -> AppFigures:
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
    plan: "Plan"
    desk: "Desk | None" = None
    failed_at: "Desk | None" = None
    failures: int = 0
    losses: int = 0
    turn: int = 0

    @property
    def rollout_id(self) -> str:
        return self.request.rollout_id


@dataclass(slots=True, eq=False)
class Desk:
    """The part of the work at one task app."""

    app: App
    entries: dict[str, QueueEntry] = field(default_factory=dict)
    unsent: dict[str, QueueEntry] = field(default_factory=dict)
    requests: dict[str, str] = field(default_factory=dict)
    """Those of them requested, with the instance that accepted; "" before that."""
    stale: set[str] = field(default_factory=set)
    """Rollouts that it may still run or hold, and that other apps have now, or no plan needs."""
    discard: list[str] = field(default_factory=list)
    """Results that it may forget at once."""
    unacked: list[str] = field(default_factory=list)
    """Results that count, which it holds until they are stored."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is something to send."""

    @property
    def open(self) -> bool:
        """Whether it takes work."""
        return self.app.fault is None and not self.app.retired

    def take(self, entry: QueueEntry) -> None:
        entry.desk = self
        self.entries[entry.rollout_id] = self.unsent[entry.rollout_id] = entry
        self.wake.set()

    def take_back(self, entry: QueueEntry) -> bool:
        """Take a rollout from this app; return whether the app may have received its request."""
        del self.entries[entry.rollout_id]
        entry.desk = None
        self.unsent.pop(entry.rollout_id, None)
        return self.requests.pop(entry.rollout_id, None) is not None

    def stop(self, entry: QueueEntry) -> None:
        """Take a rollout that no plan needs from this app, which cancels it if it may be running."""
        if self.take_back(entry):
            self.stale.add(entry.rollout_id)
            self.wake.set()


class Plan:
    """The rollouts of one collection: the queue of those that wait, and the tally of those that ended.

    The requests are all of one run. The plan of the lowest rank is served first.
    """

    def __init__(self, requests: Sequence[RolloutRequest], tally: Tally, *, rank: int = 0) -> None:
        self.run_id = requests[0].run_id
        self.tally, self.rank = tally, rank
        # Set when every rollout has ended, or the collection, by `error` or because it was withdrawn.
        self.done = asyncio.Event()
        self.error: BaseException | None = None
        self.unfinished = {request.rollout_id: QueueEntry(request, self) for request in requests}
        groups: dict[str, deque[QueueEntry]] = {}
        for entry in self.unfinished.values():
            groups.setdefault(entry.request.group_id, deque()).append(entry)
        self._groups = deque(groups.values())
        # The rollouts of each app's current group that no app has yet.
        self._current: dict[Desk, deque[QueueEntry]] = {}
        # Lost and failed rollouts, by where they failed last. They come before new ones, the latest first.
        self._again: dict[Desk | None, dict[str, QueueEntry]] = {}
        self._turns = 0

    @property
    def waits(self) -> bool:
        """Whether a rollout waits for a task app."""
        return bool(self._groups) or any(self._current.values()) or any(self._again.values())

    def join(self, desk: Desk) -> None:
        self._current[desk] = deque()
        self.tally.add_app(desk.app)

    def put_back(self, entry: QueueEntry) -> None:
        self._turns += 1
        entry.turn = self._turns
        self._again.setdefault(entry.failed_at, {})[entry.rollout_id] = entry

    def drop(self, entry: QueueEntry) -> None:
        """Take a rollout that was put back from the queue."""
        del self._again[entry.failed_at][entry.rollout_id]

    def next_for(self, desk: Desk, *, alone: bool) -> QueueEntry | None:
        """Take the next rollout for an app; siblings stay together while other groups wait.

        An app that is `alone` gets rollouts that failed there, too.
        """
        again = [part for place, part in self._again.items() if part and (alone or place is not desk)]
        if again:
            return max(again, key=lambda part: next(reversed(part.values())).turn).popitem()[1]
        if not self._current[desk] and self._groups:
            self._current[desk] = self._groups.popleft()
        group = self._current[desk] or max(self._current.values(), key=len)
        return group.popleft() if group else None


def missing(plans: Iterable[Plan]) -> str:
    """Say how many rollouts of these plans have not ended."""
    tallies = [plan.tally for plan in plans]
    total, ended = sum(tally.total for tally in tallies), sum(tally.ended for tally in tallies)
    return f"{total - ended} of {total} rollouts were not finished"


class Work:
    """The plans of a run that are being collected, and the desks that share them.

    Args:
        places: limit of unfinished rollouts at all task apps together.
    """

    def __init__(self, run_id: str, *, places: float = math.inf) -> None:
        self.run_id = run_id
        # Those with unfinished rollouts, in the order in which they are served.
        self.plans: list[Plan] = []
        self.desks: list[Desk] = []
        self.any_withdrawn = False
        self._places = places

    def add(self, plan: Plan) -> None:
        """Begin to collect a plan, after the plans of the same rank."""
        if plan.run_id != self.run_id:
            raise ValueError(f"run {plan.run_id!r} must wait until run {self.run_id!r} is collected")
        for rollout_id in plan.unfinished:
            if self._entry(rollout_id) is not None:
                raise ValueError(f"rollout {rollout_id!r} is being collected already")
        self.plans.append(plan)
        self.plans.sort(key=lambda plan: plan.rank)
        for desk in self.desks:
            # New results get more weight than those of earlier plans.
            desk.app.weight = (desk.app.weight + 1) / 2
            plan.join(desk)
        self.deal()

    def withdraw(self, plan: Plan, error: BaseException | None = None) -> None:
        """End the collection of a plan before its last rollout: cancel the rest and drop the results.

        Args:
            error: the reason, if the caller that waits for the plan is to get it.
        """
        if plan not in self.plans:
            return
        self.plans.remove(plan)
        self.any_withdrawn = True
        for entry in plan.unfinished.values():
            if entry.desk is not None:
                entry.desk.stop(entry)
        for desk in self.desks:
            # Those of other plans too: they are kept by now (`Lane.run`).
            desk.discard += desk.unacked
            desk.unacked = []
            desk.wake.set()
        plan.error = error
        plan.done.set()
        self.deal()

    def join(self, desk: Desk) -> None:
        """Let a task app take part."""
        self.desks.append(desk)
        for plan in self.plans:
            plan.join(desk)

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
        entry = self._entry(rollout.rollout_id)
        desk.stale.discard(rollout.rollout_id)
        if entry is not None and rollout.status == "finished":
            rollout = checked(entry.request, rollout)
        if entry is None or (entry.desk is not desk and rollout.status != "finished"):
            desk.discard.append(rollout.rollout_id)
            return
        # While an idle app waits for work, slower ones overtake it, which says nothing about its speed.
        if entry.desk is desk and all(other.entries for other in self.desks if other.open):
            desk.app.judge(finished=rollout.status == "finished")
        self._take_back(entry, but_from=desk)
        with self._blame(entry.plan):
            if rollout.status == "finished":
                desk.unacked.append(rollout.rollout_id)
                entry.plan.tally.add_finished(rollout, desk.app)
                self._close(entry)
            else:
                self._failed(entry, desk, rollout)

    def lose(self, desk: Desk, rollout_ids: Iterable[str], *, why: str) -> None:
        """Give rollouts that a task app lost, or that were lost with it, back to the queue."""
        for entry in [desk.entries[rollout_id] for rollout_id in reversed(list(rollout_ids))]:
            if entry.desk is desk:  # else its plan has ended at the loss of another one
                with self._blame(entry.plan):
                    self._lost(entry, desk, why)
        self.deal()

    def lose_all(self, desk: Desk, *, why: str) -> None:
        """Give all rollouts of a task app that stopped answering to the others, or back to the queue."""
        for plan in self.plans:
            plan.tally.add_figures(desk.app, AppFigures(outages=1))
        desk.stale |= set(desk.requests)
        self.lose(desk, list(desk.entries), why=why)

    def _entry(self, rollout_id: str) -> QueueEntry | None:
        for plan in self.plans:
            if rollout_id in plan.unfinished:
                return plan.unfinished[rollout_id]
        return None

    def _take_one(self) -> bool:
        """Let one task app take a rollout; return whether one could."""
        takers = [desk for desk in self.desks if desk.open and len(desk.entries) < desk.app.at_most]
        takers.sort(key=lambda desk: len(desk.entries) / desk.app.weight)
        alone = sum(desk.open for desk in self.desks) == 1
        for plan in filter(lambda plan: plan.waits, self.plans):
            for desk in takers:
                entry = plan.next_for(desk, alone=alone)
                if entry is not None:
                    desk.take(entry)
                    return True
        return False

    def _take_back(self, entry: QueueEntry, *, but_from: Desk) -> None:
        """Take a rollout from the app that has it, and cancel it there if it may still be running."""
        if entry.desk is None:
            entry.plan.drop(entry)
        elif entry.desk is but_from:
            but_from.take_back(entry)
        else:
            entry.desk.stop(entry)

    def _failed(self, entry: QueueEntry, desk: Desk, rollout: Rollout) -> None:
        # If another party cancelled it, its task app is stopping: that is no fault of the rollout.
        entry.losses += rollout.status == "cancelled"
        if rollout.status != "cancelled":
            entry.failures += 1
            entry.failed_at = desk
        plan = entry.plan
        plan.tally.count_failure(rollout.failure.code if rollout.failure else rollout.status)
        if entry.failures < _MAX_ATTEMPTS and entry.losses < _MAX_LOSSES:
            desk.discard.append(rollout.rollout_id)
            del plan.unfinished[rollout.rollout_id]
            entry.request = retried(entry.request)
            plan.unfinished[entry.rollout_id] = entry
            plan.put_back(entry)
        else:
            desk.unacked.append(rollout.rollout_id)
            plan.tally.add_failed(rollout)
            self._close(entry)

    def _lost(self, entry: QueueEntry, desk: Desk, why: str) -> None:
        if desk.take_back(entry):
            entry.losses += 1
            entry.plan.tally.count_failure(TaskAppLost.code)
            entry.plan.tally.add_figures(desk.app, AppFigures(losses=1))
        if entry.losses < _MAX_LOSSES:
            entry.plan.put_back(entry)
        else:
            entry.plan.tally.add_failed(_loss_record(entry.request, desk.app.instance_id, why))
            self._close(entry)

    def _close(self, entry: QueueEntry) -> None:
        plan = entry.plan
        del plan.unfinished[entry.rollout_id]
        if not plan.unfinished:
            self.plans.remove(plan)
            plan.done.set()

    @contextmanager
    def _blame(self, plan: Plan) -> Iterator[None]:
        """Withdraw a plan at an error of its `progress` or `keep`; the others continue."""
        try:
            yield
        except Exception as error:
            self.withdraw(plan, error)


def _loss_record(request: RolloutRequest, instance_id: str, why: str) -> Rollout:
    """Return the record of a rollout that no task app could finish."""
    detail = f"{_MAX_LOSSES} times a task app was lost with it; the last one: {why}"
    return Rollout(
        **request.model_dump(include={"rollout_id", "run_id", "iteration", "group_id", "sibling", "attempt"}),
        instance_id=instance_id,
        status="failed",
        failure=RolloutFailure(code=TaskAppLost.code, detail=detail),
    )
