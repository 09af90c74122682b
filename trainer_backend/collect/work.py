"""The rollouts of a collection: which wait, which task app has which, and what becomes of each. No I/O.

Every rollout counts once, whichever task app brings it first. One that goes with its task app is asked for
again, under the same id and seeds; one that fails is planned once more under a new id, with the same seeds.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from shared_schemas.rollouts import Rollout, RolloutFailure, RolloutRequest
from trainer_backend.collect.answers import TaskAppLost
from trainer_backend.collect.apps import App
from trainer_backend.collect.balance import Load, choose, fair_shares
from trainer_backend.collect.collection import AppFigures, Tally
from trainer_backend.collect.plan import retried

_MAX_ATTEMPTS = 2
# A rollout that takes its task app with it each time must not go round them all.
_MAX_LOSSES = 3


@dataclass(slots=True, eq=False)
class Planned:
    """A rollout that has not ended; `desk` has it, None: it waits; `failed_at` is where it failed last."""

    request: RolloutRequest
    desk: "Desk | None" = None
    failed_at: "Desk | None" = None
    given_s: float = 0.0
    failures: int = 0
    losses: int = 0

    @property
    def rollout_id(self) -> str:
        return self.request.rollout_id


@dataclass(slots=True, eq=False)
class Desk:
    """What one task app has of a collection.

    Attributes:
        open: whether it takes work.
        given: rollouts that it has, by id.
        unsent: of these, those that it is yet to be asked for.
        asked: of these, those that it was asked for, and the instance that accepted; "" before it has.
        unwanted: rollouts that others have now, and that it may still run or hold.
        settled: results that it may forget at once.
        unacked: results that count, and that it holds until they are stored.
        wake: set when there is something to send.
    """

    app: App
    open: bool = False
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

    def take_back(self, planned: Planned) -> bool:
        """It is not this app's any more; whether it may have been asked for it."""
        del self.given[planned.rollout_id]
        planned.desk = None
        if self.asked.pop(planned.rollout_id, None) is not None:
            return True
        self.unsent.remove(planned)
        return False

    def figures(self) -> AppFigures:
        seconds = self.app.seconds_per_decision
        return AppFigures(self.finished, self.lost, self.outages, seconds, self.app.lost is None)


class Work:
    """
    Args:
        requests: all of one run.
        places: how many may be with task apps at a time.
        tally: is told what ended.
        clock: seconds that only grow.
    """

    def __init__(
        self, requests: Sequence[RolloutRequest], *, places: int, tally: Tally, clock: Callable[[], float]
    ) -> None:
        self.run_id = requests[0].run_id
        self.tally = tally
        self.desks: list[Desk] = []
        self.done = asyncio.Event()
        self._places, self._clock = places, clock
        self._waiting = deque(Planned(request) for request in requests)
        self._open = {planned.rollout_id: planned for planned in self._waiting}
        self._group_sizes = Counter(request.group_id for request in requests)
        self._homes: dict[str, Desk] = {}

    def deal(self) -> None:
        """Give what waits to the task apps that have room."""
        desks = [desk for desk in self.desks if desk.open and not desk.app.retired]
        free = self._places - sum(len(desk.given) for desk in self.desks)
        if not (self._waiting and desks and free > 0):
            return
        shares = self._shares(desks)
        while self._waiting and free > 0:
            first = self._waiting[0]
            # Once more at the app where it failed only if there is no other. Shares are then without it, or
            # others that have none beside it would leave the rollout waiting for ever.
            others = [desk for desk in desks if desk is not first.failed_at] or desks
            own = shares if len(others) == len(desks) else self._shares(others)
            chosen = self._choose(first, others, own)
            if chosen is None:
                return
            desk, count = chosen
            count = min(count, free, 1 if first.failed_at else self._siblings_at_the_front())
            self._give(desk, count)
            free -= count

    def end(self, desk: Desk, rollout: Rollout) -> None:
        """A rollout has ended at a task app. It counts unless it has counted, or another app has it now."""
        planned = self._open.get(rollout.rollout_id)
        desk.unwanted.discard(rollout.rollout_id)
        if planned is None or (planned.desk is not desk and rollout.status != "finished"):
            desk.settled.append(rollout.rollout_id)
            return
        was_here = planned.desk is desk
        self._take_back(planned, but_from=desk)
        if rollout.status == "finished":
            if was_here:
                steps = rollout.trajectory.steps if rollout.trajectory else ()
                desk.app.took(self._clock() - planned.given_s, len(steps))
            desk.finished += 1
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
                self._waiting.appendleft(planned)
            else:
                self.tally.failed_for_good(_lost(planned.request, desk.app.instance_id, why))
                self._close(planned)
        self.deal()

    def _shares(self, desks: Sequence[Desk]) -> list[int]:
        return fair_shares(
            self._places,
            [desk.app.seconds_per_decision for desk in desks],
            [desk.app.at_most for desk in desks],
            [desk.app.trust for desk in desks],
        )

    def _choose(
        self, first: Planned, desks: Sequence[Desk], shares: Sequence[int]
    ) -> tuple[Desk, int] | None:
        group_id = first.request.group_id
        home = self._homes.get(group_id)
        loads = [
            Load(len(desk.given), share, desk.app.at_most) for desk, share in zip(desks, shares, strict=True)
        ]
        chosen = choose(self._group_sizes[group_id], desks.index(home) if home in desks else None, loads)
        if chosen is None:
            return None
        self._homes[group_id] = desks[chosen[0]]
        return desks[chosen[0]], chosen[1]

    def _siblings_at_the_front(self) -> int:
        group_id = self._waiting[0].request.group_id
        return sum(1 for _ in takewhile(lambda item: item.request.group_id == group_id, self._waiting))

    def _give(self, desk: Desk, count: int) -> None:
        for _ in range(count):
            planned = self._waiting.popleft()
            planned.desk, planned.given_s = desk, self._clock()
            desk.given[planned.rollout_id] = planned
            desk.unsent.append(planned)
        desk.wake.set()

    def _take_back(self, planned: Planned, *, but_from: Desk) -> None:
        """From whoever has it; an app that may be running it and has not brought it is told to stop."""
        desk = planned.desk
        if desk is None:
            self._waiting.remove(planned)
        elif desk.take_back(planned) and desk is not but_from:
            desk.unwanted.add(planned.rollout_id)
            desk.wake.set()

    def _failed(self, planned: Planned, desk: Desk, rollout: Rollout) -> None:
        # A rollout that was cancelled, and not by us, was so by a task app that stops: no fault of its own.
        planned.losses += rollout.status == "cancelled"
        if rollout.status != "cancelled":
            planned.failures += 1
            planned.failed_at = desk
            desk.app.failed()
        self.tally.failed_once(rollout.failure.code if rollout.failure else rollout.status)
        if planned.failures < _MAX_ATTEMPTS and planned.losses < _MAX_LOSSES:
            desk.settled.append(rollout.rollout_id)
            del self._open[rollout.rollout_id]
            planned.request = retried(planned.request)
            self._open[planned.rollout_id] = planned
            self._waiting.appendleft(planned)
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
