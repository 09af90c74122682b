"""How task apps share out one queue, in simulated time, and several batches at the same time."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

from shared_schemas.rollouts import Rollout, RolloutRequest, RolloutStatus
from tests.trainer_backend.collect.scripted_task_app import answer_to, make_request, wrap
from trainer_backend.collect.batch import in_order
from trainer_backend.collect.client import TaskAppClient
from trainer_backend.collect.dispatcher import Dispatcher, Queue


def new_app(number: int, *, at_most: int = 64) -> TaskAppClient:
    made = TaskAppClient(f"http://task-app-{number}", SecretStr(""), timeout_s=1.0)
    made.at_most = at_most
    return made


def plan(groups: int, *, siblings: int) -> list[RolloutRequest]:
    return [
        make_request(group * siblings + n, group=group) for group in range(groups) for n in range(siblings)
    ]


def dealt(apps: Sequence[TaskAppClient], requests: Sequence[RolloutRequest], *, places: int) -> Dispatcher:
    dispatcher = Dispatcher(wrap(apps), timeout_s=1.0, max_running=places)
    dispatcher.add(Queue(requests))
    return dispatcher


def end_first(dispatcher: Dispatcher, app: TaskAppClient, *, status: RolloutStatus = "finished") -> None:
    """End the rollout that the app was given first."""
    request = next(iter(app.requests.values()))
    app.unsent.clear()
    app.accepted = dict.fromkeys(app.requests, "i")
    dispatcher.end(app, answer_to(request, status=status))
    dispatcher.deal()


def seconds_to_play(apps: Sequence[TaskAppClient], dispatcher: Dispatcher, rates: Sequence[float]) -> float:
    """Each app ends one rollout every 1 / rate seconds while it has any, however many it has."""
    now, next_s = 0.0, [1 / rate for rate in rates]
    while dispatcher.queues:
        busy = [number for number, app in enumerate(apps) if app.requests]
        first = min(busy, key=lambda number: next_s[number])
        now = next_s[first]
        idle = [number for number in range(len(rates)) if number not in busy]
        end_first(dispatcher, apps[first])
        next_s[first] = now + 1 / rates[first]
        for number in idle:
            next_s[number] = now + 1 / rates[number]
    return now


def homes(
    apps: Sequence[TaskAppClient], requests: Sequence[RolloutRequest], *, places: int
) -> dict[str, Counter[int]]:
    """How many rollouts of each group each task app has."""
    dealt(apps, requests, places=places)
    found: dict[str, Counter[int]] = {}
    for number, app in enumerate(apps):
        for request in app.requests.values():
            found.setdefault(request.group_id, Counter())[number] += 1
    return found


@pytest.mark.parametrize(
    ("rates", "groups", "places"), [((3.0, 1.0), 16, 64), ((1.0, 8.0), 16, 16), ((2.0, 1.0, 1.0), 32, 48)]
)
def test_a_faster_app_plays_more_and_the_slowest_is_not_waited_for(rates, groups, places):
    apps = [new_app(number) for number in range(len(rates))]
    dispatcher = dealt(apps, plan(groups, siblings=8), places=places)
    (queue,) = dispatcher.queues
    took_s = seconds_to_play(apps, dispatcher, rates)
    assert took_s < 1.1 * groups * 8 / sum(rates)  # the least that is possible, and a tenth
    # the slowest has its part of it: the bound says that no app can have had more, nor much less
    figures = queue.batch().apps.values()
    assert all(part.finished <= took_s * rate + 1 for part, rate in zip(figures, rates, strict=True))


def test_an_app_that_was_slow_in_one_batch_begins_the_next_with_less():
    # all is given out at once: only the weights of before can say that it should be 48 and 16
    apps = [new_app(0), new_app(1)]
    first = dealt(apps, plan(8, siblings=8), places=64)
    assert [len(app.requests) for app in apps] == [32, 32]
    assert seconds_to_play(apps, first, (3.0, 1.0)) == pytest.approx(32.0)
    second = dealt(apps, plan(8, siblings=8), places=64)
    assert seconds_to_play(apps, second, (3.0, 1.0)) < 20.0


def test_an_app_that_has_become_fast_gets_more_again():
    apps = [new_app(0), new_app(1)]
    seconds_to_play(apps, dealt(apps, plan(16, siblings=8), places=16), (9.0, 1.0))
    dealt(apps, plan(16, siblings=8), places=16)
    assert len(apps[1].requests) >= 1  # or it could not show it
    took_s = [
        seconds_to_play(apps, dealt(apps, plan(16, siblings=8), places=16), (1.0, 9.0)) for _ in range(3)
    ]
    assert took_s[-1] < 1.2 * 128 / 10


def test_siblings_stay_together_while_there_are_other_groups_to_take():
    apps = [new_app(0), new_app(1), new_app(2)]
    assert homes(apps, plan(6, siblings=4), places=24) == {
        f"train/1/{group}": Counter({group % 3: 4}) for group in range(6)
    }
    # no app has the third group yet, and both that have played theirs take of it
    assert homes(apps[:2], plan(3, siblings=4), places=12)["train/1/2"] == Counter({0: 2, 1: 2})
    # one group is no reason to stand idle
    assert homes(apps[:2], plan(1, siblings=10), places=3)["train/1/0"] == Counter({0: 2, 1: 1})


def test_an_app_runs_no_more_than_it_can():
    apps = [new_app(0, at_most=2), new_app(1, at_most=3)]
    dispatcher = dealt(apps, plan(4, siblings=4), places=16)
    assert [len(app.requests) for app in apps] == [2, 3]
    end_first(dispatcher, apps[0])
    assert [len(app.requests) for app in apps] == [2, 3]


def test_an_app_that_fails_all_it_gets_soon_has_one_at_a_time_and_everything_is_played():
    failing, other = new_app(0), new_app(1)
    dispatcher = dealt([failing, other], plan(8, siblings=5), places=8)
    (queue,) = dispatcher.queues
    for _ in range(4):
        end_first(dispatcher, failing, status="failed")
    assert [len(failing.requests), len(other.requests)] == [1, 7]
    while dispatcher.queues:
        if failing.requests:
            end_first(dispatcher, failing, status="failed")
        end_first(dispatcher, other)
    assert [part.finished for part in queue.batch().apps.values()] == [0, 40]


def test_what_is_collected_is_sorted_by_numbers():
    requests = plan(12, siblings=1)
    rollouts = [answer_to(request) for request in reversed(requests)]
    assert [item.group_id for item in in_order(rollouts)] == [item.group_id for item in requests]


def test_batches_at_the_same_time_are_of_one_run_and_have_no_rollout_in_common():
    dispatcher = dealt([new_app(0)], plan(2, siblings=2), places=4)
    with pytest.raises(ValueError, match="run 'other' must wait until run 'run' is collected"):
        dispatcher.add(Queue([make_request(9).model_copy(update={"run_id": "other"})]))
    with pytest.raises(ValueError, match=r"rollout 'run/train/1/0/3' is being collected already"):
        dispatcher.add(Queue([make_request(4), make_request(3)]))
    assert len(dispatcher.queues) == 1


# However several batches interleave, no rollout is lost, mixed up or counted twice.

PLACES = 6
AT_MOST = (2, 2, 4)
MOST_BATCHES = 3
STATUSES = ("finished", "finished", "failed", "cancelled")


def strip_attempt(rollout_id: str) -> str:
    """The id without its attempt."""
    return rollout_id.partition(":")[0]


class Planned:
    """A batch as its caller sees it.

    Attributes:
        kept: ids that `keep` received.
        is_broken: whether `keep` and `progress` raise from now on.
    """

    def __init__(self, requests: list[RolloutRequest], *, rank: int) -> None:
        self.ids = {request.rollout_id for request in requests}
        self.kept: list[str] = []
        self.ended: list[int] = []
        self.is_broken = False
        requests = [request.model_copy(update={"iteration": rank}) for request in requests]
        self.queue = Queue(requests, self.progress, self.keep)

    def progress(self, ended: int, _: int) -> None:
        if self.is_broken:
            raise OSError("no space left")
        self.ended.append(ended)

    def keep(self, rollout: Rollout) -> None:
        if self.is_broken:
            raise OSError("no space left")
        self.kept.append(rollout.rollout_id)


class Play:
    """Task apps take, end, repeat, lose and fail rollouts; batches begin, are cancelled and break."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.apps = [new_app(number, at_most=most) for number, most in enumerate(AT_MOST)]
        self.dispatcher = Dispatcher(wrap(self.apps), timeout_s=1.0, max_running=PLACES)
        # What each task app runs, which may be more than what it was last asked for.
        self.held: dict[TaskAppClient, dict[str, RolloutRequest]] = {app: {} for app in self.apps}
        self.results: list[tuple[TaskAppClient, Rollout]] = []
        self.all: list[Planned] = []
        self.number = 0

    @property
    def under_way(self) -> list[Planned]:
        return [item for item in self.all if item.queue in self.dispatcher.queues]

    @property
    def up(self) -> list[TaskAppClient]:
        return [app for app in self.apps if app.fault is None]

    def begin(self) -> None:
        if len(self.under_way) == MOST_BATCHES:
            return
        groups, siblings = self.chance.randint(1, 3), self.chance.randint(1, 4)
        numbers = range(self.number, self.number + groups * siblings)
        self.number = numbers.stop
        requests = [make_request(number, group=number // siblings) for number in numbers]
        self.all.append(Planned(requests, rank=self.chance.randint(0, 2)))
        self.dispatcher.add(self.all[-1].queue)

    def send(self) -> None:
        for app in self.up:
            self.send_from(app)

    def send_from(self, app: TaskAppClient) -> None:
        for name in app.stale:
            self.held[app].pop(name, None)
        app.stale.clear()
        for name, request in app.unsent.items():
            self.held[app][name] = request
            app.accepted[name] = "i"
        app.unsent.clear()

    def end(self) -> None:
        for app in some(self.chance, [app for app in self.up if self.held[app]]):
            self.end_one(app, self.chance.choice(list(self.held[app])))

    def end_one(self, app: TaskAppClient, name: str, *, status: str = "") -> None:
        request = self.held[app].pop(name)
        status = status or self.chance.choice(STATUSES)
        rollout = answer_to(request, status=status)
        counts = status == "finished" or name in app.requests
        before = self.failures()
        self.results.append((app, rollout))
        self.dispatcher.end(app, rollout)
        assert counts or self.failures() == before, "it is for another app to say how it ends"
        self.dispatcher.deal()

    def failures(self) -> int:
        return sum(item.queue.batch().failures["c"] for item in self.all)

    def answer_again(self) -> None:
        # A task app that holds an old result under this id would not have run it again.
        old = [(app, rollout) for app, rollout in self.results if rollout.rollout_id not in app.requests]
        for app, rollout in some(self.chance, old):
            self.dispatcher.end(app, rollout)
            self.dispatcher.deal()

    def lose_some(self) -> None:
        for app in some(self.chance, [app for app in self.apps if app.accepted]):
            names = list(app.accepted)[: self.chance.randint(1, 4)]
            for name in names:
                self.held[app].pop(name, None)
            self.dispatcher.lose(app, names, why="forgotten")

    def stop_answering(self) -> None:
        for app in some(self.chance, self.up):
            app.fault = "gone"
            self.dispatcher.lose_all(app, why="gone")

    def recover(self) -> None:
        for app in some(self.chance, [app for app in self.apps if app not in self.up]):
            if self.chance.random() < 0.3:  # another process: it knows nothing
                self.held[app].clear()
                app.stale.clear()
            else:  # the dispatcher fetches what it has, before it takes more
                for name in list(self.held[app])[1:]:
                    self.end_one(app, name)
                self.send_from(app)
            app.fault = None
            self.dispatcher.deal()

    def cancel(self) -> None:
        for item in some(self.chance, self.under_way):
            left = item.queue.unfinished
            running = [(name, app) for app in self.apps for name in app.accepted if name in left]
            self.dispatcher.withdraw(item.queue)
            assert all(name in app.stale for name, app in running)
            assert not any(name in app.requests for app in self.apps for name in left)

    def break_keep(self) -> None:
        for item in some(self.chance, self.under_way):
            item.is_broken = True

    def places_are_kept(self) -> None:
        assert sum(len(app.requests) for app in self.apps) <= PLACES
        assert all(len(app.requests) <= app.at_most for app in self.apps)

    def no_place_is_free_while_a_rollout_waits(self) -> None:
        open_apps = [app for app in self.apps if app.is_open]
        takers = [app for app in open_apps if len(app.requests) < app.at_most]
        if sum(len(app.requests) for app in self.apps) < PLACES and takers:
            for item in self.under_way:
                for entry in item.queue.unfinished.values():
                    assert entry.app or (takers == [entry.failed_at] and len(open_apps) > 1)

    def each_has_its_own_and_each_rollout_once(self) -> None:
        for item in self.all:
            batch = item.queue.batch()
            ended = Counter(strip_attempt(rollout.rollout_id) for rollout in batch.all)
            left = Counter(strip_attempt(name) for name in item.queue.unfinished)
            assert sorted(item.kept) == sorted(rollout.rollout_id for rollout in batch.rollouts)
            assert item.ended == list(range(1, len(item.ended) + 1))
            assert sum(part.finished for part in batch.apps.values()) == len(batch.rollouts)
            if item.queue.error is None:
                assert ended + left == Counter(item.ids)
                assert len(item.ended) == len(batch.all)
            else:
                assert isinstance(item.queue.error, OSError)
            assert item.queue.done.is_set() == (item not in self.under_way)
        owners = {name: entry.app for item in self.under_way for name, entry in item.queue.unfinished.items()}
        assert all(owners[name] is app for app in self.apps for name in app.requests)
        assert all(app is None or name in app.requests for name, app in owners.items())

    def finish(self) -> None:
        """Let task apps, each started again, end what they have: all that is under way comes to its end."""
        for item in self.under_way:
            item.is_broken = False
        unfinished = {item: {*item.queue.unfinished} for item in self.under_way}
        for app in self.apps:
            app.fault = None
            self.held[app].clear()
            app.stale.clear()
            self.dispatcher.lose(app, list(app.requests), why="started again")
        self.dispatcher.deal()
        for _ in range(sum(map(len, unfinished.values()))):
            for app in self.apps:
                self.send_from(app)
                for name in list(app.accepted):
                    self.end_one(app, name, status="finished")
        assert not self.dispatcher.queues
        self.each_has_its_own_and_each_rollout_once()
        assert not any(item.queue.unfinished for item in unfinished)


def some(chance: random.Random, items: Sequence[Any]) -> Sequence[Any]:
    """One of the items, if there is any."""
    return [chance.choice(items)] if items else []


STEPS = [Play.begin, Play.send, Play.end, Play.end, Play.answer_again, Play.lose_some, Play.stop_answering]
STEPS += [Play.recover, Play.recover, Play.send, Play.end, Play.cancel, Play.break_keep]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.sampled_from(STEPS), min_size=30, max_size=60), st.integers(0, 2**32))
def test_no_rollout_of_several_batches_is_lost_mixed_up_or_counted_twice(steps, seed):
    play = Play(random.Random(seed))
    for step in steps:
        step(play)
        play.places_are_kept()
        play.no_place_is_free_while_a_rollout_waits()
        play.each_has_its_own_and_each_rollout_once()
    play.finish()
