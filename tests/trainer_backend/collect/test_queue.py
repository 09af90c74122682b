"""How task apps share out one queue: apps of known speed play it in simulated time."""

from collections import Counter
from collections.abc import Sequence

import pytest
from pydantic import SecretStr

from shared_schemas.rollouts import RolloutRequest, RolloutStatus
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
