"""However several collections interleave, no rollout is lost, mixed up or counted twice."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

from hypothesis import given, settings
from hypothesis import strategies as st

from shared_schemas.rollouts import Rollout, RolloutRequest
from tests.trainer_backend.collect.scripted_task_app import answer_to, request_of
from tests.trainer_backend.collect.test_work import app
from trainer_backend.collect.work import Desk, Plan, Tally, Work

PLACES = 6
AT_MOST = (2, 2, 4)
MOST_PLANS = 3
STATUSES = ("finished", "finished", "failed", "cancelled")


Item = TypeVar("Item")


def base_of(rollout_id: str) -> str:
    """The id without its attempt."""
    return rollout_id.partition(":")[0]


class Planned:
    """A collection as its caller sees it.

    Attributes:
        kept: ids that `keep` received.
        is_broken: whether `keep` and `progress` raise from now on.
    """

    def __init__(self, requests: list[RolloutRequest], *, rank: int) -> None:
        self.ids = {request.rollout_id for request in requests}
        self.kept: list[str] = []
        self.ended: list[int] = []
        self.is_broken = False
        self.plan = Plan(requests, Tally(len(requests), self.progress, self.keep), rank=rank)

    def progress(self, ended: int, _: int) -> None:
        if self.is_broken:
            raise OSError("no space left")
        self.ended.append(ended)

    def keep(self, rollout: Rollout) -> None:
        if self.is_broken:
            raise OSError("no space left")
        self.kept.append(rollout.rollout_id)


class Play:
    """Task apps take, end, repeat, lose and fail rollouts; collections begin, are cancelled and break."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.work = Work("run", places=PLACES)
        self.desks = [Desk(app(number, at_most=most)) for number, most in enumerate(AT_MOST)]
        for desk in self.desks:
            self.work.join(desk)
        # What each task app runs, which may be more than what it was last asked for.
        self.held: dict[Desk, dict[str, RolloutRequest]] = {desk: {} for desk in self.desks}
        self.results: list[tuple[Desk, Rollout]] = []
        self.all: list[Planned] = []
        self.number = 0

    @property
    def under_way(self) -> list[Planned]:
        return [item for item in self.all if item.plan in self.work.plans]

    @property
    def up(self) -> list[Desk]:
        return [desk for desk in self.desks if desk.app.fault is None]

    def begin(self) -> None:
        if len(self.under_way) == MOST_PLANS:
            return
        groups, siblings = self.chance.randint(1, 3), self.chance.randint(1, 4)
        numbers = range(self.number, self.number + groups * siblings)
        self.number = numbers.stop
        requests = [request_of(number, group=number // siblings) for number in numbers]
        self.all.append(Planned(requests, rank=self.chance.randint(0, 2)))
        self.work.add(self.all[-1].plan)

    def send(self) -> None:
        for desk in self.up:
            self.send_from(desk)

    def send_from(self, desk: Desk) -> None:
        for name in desk.stale:
            self.held[desk].pop(name, None)
        desk.stale.clear()
        for name, entry in desk.unsent.items():
            self.held[desk][name] = entry.request
            desk.requests[name] = "i"
        desk.unsent.clear()

    def end(self) -> None:
        for desk in some(self.chance, [desk for desk in self.up if self.held[desk]]):
            self.end_one(desk, self.chance.choice(list(self.held[desk])))

    def end_one(self, desk: Desk, name: str, *, status: str = "") -> None:
        request = self.held[desk].pop(name)
        status = status or self.chance.choice(STATUSES)
        rollout = answer_to(request, status=status)
        counts = status == "finished" or name in desk.entries
        before = self.failures()
        self.results.append((desk, rollout))
        self.work.end(desk, rollout)
        assert counts or self.failures() == before, "it is for another app to say how it ends"
        self.work.deal()

    def failures(self) -> int:
        return sum(item.plan.tally.collection().failures["c"] for item in self.all)

    def answer_again(self) -> None:
        # A task app that holds an old result under this id would not have run it anew.
        old = [(desk, rollout) for desk, rollout in self.results if rollout.rollout_id not in desk.entries]
        for desk, rollout in some(self.chance, old):
            self.work.end(desk, rollout)
            self.work.deal()

    def lose_some(self) -> None:
        for desk in some(self.chance, [desk for desk in self.desks if desk.requests]):
            names = list(desk.requests)[: self.chance.randint(1, 4)]
            for name in names:
                self.held[desk].pop(name, None)
            self.work.lose(desk, names, why="forgotten")

    def stop_answering(self) -> None:
        for desk in some(self.chance, self.up):
            desk.app.fault = "gone"
            self.work.lose_all(desk, why="gone")

    def answer_anew(self) -> None:
        for desk in some(self.chance, [desk for desk in self.desks if desk not in self.up]):
            if self.chance.random() < 0.3:  # another process: it knows nothing
                self.held[desk].clear()
                desk.stale.clear()
            else:  # the lane fetches what it has, before it takes more
                for name in list(self.held[desk])[1:]:
                    self.end_one(desk, name)
                self.send_from(desk)
            desk.app.fault = None
            self.work.deal()

    def cancel(self) -> None:
        for item in some(self.chance, self.under_way):
            left = item.plan.unfinished
            running = [(name, desk) for desk in self.desks for name in desk.requests if name in left]
            self.work.withdraw(item.plan)
            assert all(name in desk.stale for name, desk in running)
            assert not any(name in desk.entries for desk in self.desks for name in left)

    def break_keep(self) -> None:
        for item in some(self.chance, self.under_way):
            item.is_broken = True

    def places_are_kept(self) -> None:
        assert sum(len(desk.entries) for desk in self.desks) <= PLACES
        assert all(len(desk.entries) <= desk.app.at_most for desk in self.desks)

    def no_place_is_free_while_a_rollout_waits(self) -> None:
        open_desks = [desk for desk in self.desks if desk.open]
        takers = [desk for desk in open_desks if len(desk.entries) < desk.app.at_most]
        if sum(len(desk.entries) for desk in self.desks) < PLACES and takers:
            for item in self.under_way:
                for entry in item.plan.unfinished.values():
                    assert entry.desk or (takers == [entry.failed_at] and len(open_desks) > 1)

    def each_has_its_own_and_each_rollout_once(self) -> None:
        for item in self.all:
            collection = item.plan.tally.collection()
            ended = Counter(base_of(rollout.rollout_id) for rollout in collection.all)
            left = Counter(base_of(name) for name in item.plan.unfinished)
            assert item.kept == [rollout.rollout_id for rollout in sorted_by(collection.rollouts, item.kept)]
            assert item.ended == list(range(1, len(item.ended) + 1))
            assert sum(part.finished for part in collection.apps.values()) == len(collection.rollouts)
            if item.plan.error is None:
                assert ended + left == Counter(item.ids)
                assert len(item.ended) == len(collection.all)
            else:
                assert isinstance(item.plan.error, OSError)
            assert item.plan.done.is_set() == (item not in self.under_way)
        entries = [entry for desk in self.desks for entry in desk.entries.values()]
        assert all(entry.plan.unfinished[entry.rollout_id] is entry for entry in entries)

    def finish(self) -> None:
        """Let task apps, each started anew, end what they have: whatever is under way comes to its end."""
        for item in self.under_way:
            item.is_broken = False
        unfinished = {item: {*item.plan.unfinished} for item in self.under_way}
        for desk in self.desks:
            desk.app.fault = None
            self.held[desk].clear()
            desk.stale.clear()
            self.work.lose(desk, list(desk.entries), why="started anew")
        self.work.deal()
        for _ in range(sum(map(len, unfinished.values()))):
            for desk in self.desks:
                self.send_from(desk)
                for name in list(desk.requests):
                    self.end_one(desk, name, status="finished")
        assert not self.work.plans
        self.each_has_its_own_and_each_rollout_once()
        assert not any(item.plan.unfinished for item in unfinished)


def sorted_by(rollouts: tuple[Rollout, ...], ids: list[str]) -> list[Rollout]:
    return sorted(rollouts, key=lambda rollout: ids.index(rollout.rollout_id))


def some(chance: random.Random, items: Sequence[Item]) -> Sequence[Item]:
    """One of the items, if there is any."""
    return [chance.choice(items)] if items else []


STEPS = [Play.begin, Play.send, Play.end, Play.end, Play.answer_again, Play.lose_some, Play.stop_answering]
STEPS += [Play.answer_anew, Play.answer_anew, Play.send, Play.end, Play.cancel, Play.break_keep]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.sampled_from(STEPS), min_size=30, max_size=60), st.integers(0, 2**32))
def test_no_rollout_of_several_collections_is_lost_mixed_up_or_counted_twice(steps, seed):
    play = Play(random.Random(seed))
    for step in steps:
        step(play)
        play.places_are_kept()
        play.no_place_is_free_while_a_rollout_waits()
        play.each_has_its_own_and_each_rollout_once()
    play.finish()
