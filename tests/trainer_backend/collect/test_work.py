"""How task apps share out one queue: apps of known speed play it in simulated time."""

from collections import Counter
from collections.abc import Sequence

import pytest
from pydantic import SecretStr

from shared_schemas.rollouts import Rollout, RolloutRequest, RolloutStatus
from tests.trainer_backend.collect.scripted_task_app import answer_to, request_of
from trainer_backend.collect.apps import App
from trainer_backend.collect.client import TaskAppClient
from trainer_backend.collect.work import Desk, Plan, Tally, Work


def app(number: int, *, at_most: int = 64) -> App:
    made = App(TaskAppClient(f"http://task-app-{number}", SecretStr(""), timeout_s=1.0))
    made.at_most = at_most
    return made


def plan(groups: int, *, siblings: int) -> list[RolloutRequest]:
    return [request_of(group * siblings + n, group=group) for group in range(groups) for n in range(siblings)]


def dealt(apps: Sequence[App], requests: Sequence[RolloutRequest], *, places: int) -> Work:
    work = Work("run", places=places)
    for member in apps:
        work.join(Desk(member))
    work.add(Plan(requests, Tally(len(requests))))
    return work


def end_first(work: Work, desk: Desk, *, status: RolloutStatus = "finished") -> None:
    """End the rollout that the app was given first."""
    request = next(iter(desk.entries.values())).request
    desk.unsent.clear()
    desk.requests = dict.fromkeys(desk.entries, "i")
    work.end(desk, answer_to(request, status=status))
    work.deal()


def seconds_to_play(work: Work, rates: Sequence[float]) -> float:
    """Each app ends one rollout every 1 / rate seconds while it has any, however many it has."""
    now, next_s = 0.0, [1 / rate for rate in rates]
    while work.plans:
        busy = [number for number, desk in enumerate(work.desks) if desk.entries]
        first = min(busy, key=lambda number: next_s[number])
        now = next_s[first]
        idle = [number for number in range(len(rates)) if number not in busy]
        end_first(work, work.desks[first])
        next_s[first] = now + 1 / rates[first]
        for number in idle:
            next_s[number] = now + 1 / rates[number]
    return now


def homes(work: Work) -> dict[str, Counter[int]]:
    """How many rollouts of each group each task app has."""
    found: dict[str, Counter[int]] = {}
    for number, desk in enumerate(work.desks):
        for planned in desk.entries.values():
            found.setdefault(planned.request.group_id, Counter())[number] += 1
    return found


@pytest.mark.parametrize(
    ("rates", "groups", "places"), [((3.0, 1.0), 16, 64), ((1.0, 8.0), 16, 16), ((2.0, 1.0, 1.0), 32, 48)]
)
def test_a_faster_app_plays_more_and_the_slowest_is_not_waited_for(rates, groups, places):
    work = dealt([app(number) for number in range(len(rates))], plan(groups, siblings=8), places=places)
    (dealt_plan,) = work.plans
    took_s = seconds_to_play(work, rates)
    assert took_s < 1.1 * groups * 8 / sum(rates)  # the least that is possible, and a tenth
    # the slowest has its part of it: the bound says that nobody can have had more, nor much less
    figures = dealt_plan.tally.collection().apps.values()
    assert all(part.finished <= took_s * rate + 1 for part, rate in zip(figures, rates, strict=True))


def test_an_app_that_was_slow_in_one_collection_begins_the_next_with_less():
    # all is given out at once: only the weights of before can say that it should be 48 and 16
    apps = [app(0), app(1)]
    first = dealt(apps, plan(8, siblings=8), places=64)
    assert [len(desk.entries) for desk in first.desks] == [32, 32]
    assert seconds_to_play(first, (3.0, 1.0)) == pytest.approx(32.0)
    second = dealt(apps, plan(8, siblings=8), places=64)
    assert seconds_to_play(second, (3.0, 1.0)) < 20.0


def test_an_app_that_has_become_fast_gets_more_again():
    apps = [app(0), app(1)]
    seconds_to_play(dealt(apps, plan(16, siblings=8), places=16), (9.0, 1.0))
    slow = dealt(apps, plan(16, siblings=8), places=16)
    assert len(slow.desks[1].entries) >= 1  # or it could not show it
    took_s = [seconds_to_play(dealt(apps, plan(16, siblings=8), places=16), (1.0, 9.0)) for _ in range(3)]
    assert took_s[-1] < 1.2 * 128 / 10


def test_siblings_stay_together_while_there_are_other_groups_to_take():
    apps = [app(0), app(1), app(2)]
    assert homes(dealt(apps, plan(6, siblings=4), places=24)) == {
        f"train/1/{group}": Counter({group % 3: 4}) for group in range(6)
    }
    # the third group is nobody's yet, and both that have played theirs take of it
    assert homes(dealt(apps[:2], plan(3, siblings=4), places=12))["train/1/2"] == Counter({0: 2, 1: 2})
    # one group is no reason to stand idle
    assert homes(dealt(apps[:2], plan(1, siblings=10), places=3))["train/1/0"] == Counter({0: 2, 1: 1})


def test_an_app_runs_no_more_than_it_can():
    work = dealt([app(0, at_most=2), app(1, at_most=3)], plan(4, siblings=4), places=16)
    assert [len(desk.entries) for desk in work.desks] == [2, 3]
    end_first(work, work.desks[0])
    assert [len(desk.entries) for desk in work.desks] == [2, 3]


def test_an_app_that_fails_all_it_gets_soon_has_one_at_a_time_and_everything_is_played():
    work = dealt([app(0), app(1)], plan(8, siblings=5), places=8)
    failing, other = work.desks
    tally = work.plans[0].tally
    for _ in range(4):
        end_first(work, failing, status="failed")
    assert [len(failing.entries), len(other.entries)] == [1, 7]
    while work.plans:
        if failing.entries:
            end_first(work, failing, status="failed")
        end_first(work, other)
    assert [part.finished for part in tally.collection().apps.values()] == [0, 40]


def test_what_is_collected_is_sorted_by_numbers():
    requests = plan(12, siblings=1)
    tally = Tally(len(requests))
    for request in reversed(requests):
        base = request.model_dump(
            include={"rollout_id", "run_id", "iteration", "group_id", "sibling", "attempt"}
        )
        tally.add_failed(Rollout(**base, instance_id="i", status="failed"))
    assert [item.group_id for item in tally.collection().failed] == [item.group_id for item in requests]


def test_collections_at_the_same_time_are_of_one_run_and_have_no_rollout_in_common():
    work = dealt([app(0)], plan(2, siblings=2), places=4)
    with pytest.raises(ValueError, match="run 'other' must wait until run 'run' is collected"):
        work.add(Plan([request_of(9).model_copy(update={"run_id": "other"})], Tally(1)))
    with pytest.raises(ValueError, match=r"rollout 'run/train/1/0/3' is being collected already"):
        work.add(Plan([request_of(4), request_of(3)], Tally(2)))
    assert len(work.plans) == 1
