"""The client and the dispatcher against a real server that misbehaves; what answers a request."""

from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from pydantic import SecretStr

from shared_schemas.evaluate_result import EvaluateResult
from shared_schemas.rollouts import EnvSpec, Rollout, RolloutRequest, Start
from shared_schemas.trajectory import ObservationData, StepData, UserReward
from tests.trainer_backend.collect.scripted_task_app import (
    ScriptedTaskApp,
    answer_to,
    collected,
    ids,
    make_request,
    plan,
    served,
    wrap,
)
from trainer_backend.collect.arrival import checked
from trainer_backend.collect.client import TaskAppClient
from trainer_backend.collect.dispatcher import Dispatcher
from trainer_backend.collect.wire import (
    DEFAULT_BODY_BYTES,
    BackendFailed,
    PluginFailed,
    Refused,
    TaskAppLost,
    slices,
)
from trainer_backend.errors import JobError, TaskAppError

pytestmark = pytest.mark.usefixtures("tries_without_waits")

PROBLEM = {
    "title": "Failed",
    "code": "critical_error",
    "detail": "environment.step raised KeyError: 'a' (p.py:3)",
}


async def test_task_apps_share_the_work_and_all_comes_back_sorted_whatever_the_order_of_arrival():
    first, second = ScriptedTaskApp(), ScriptedTaskApp()
    seen: list[tuple[int, int]] = []
    async with served(first) as a, served(second) as b:
        dispatcher = Dispatcher(wrap([a, b]), timeout_s=30)
        found = await dispatcher.collect(
            [make_request(number) for number in (4, 0, 3, 1, 2)], lambda *counts: seen.append(counts)
        )
        await dispatcher.ack("run", found.rollouts)
    assert [rollout.sibling for rollout in found.rollouts] == [0, 1, 2, 3, 4]
    assert seen == [(number, 5) for number in range(1, 6)]
    assert (len(first.ended), len(second.ended)) == (3, 2)
    assert len(first.acked) == len(second.acked) == 5


async def test_an_infrastructure_failure_is_planned_once_more_and_counted_and_its_first_attempt_is_let_go():
    task_app = ScriptedTaskApp(fails={"run/train/1/0/1": 1, "run/train/1/0/2": 9})
    found = await collected(plan(0, 3), task_app)
    assert [rollout.rollout_id for rollout in found.rollouts] == ["run/train/1/0/0", "run/train/1/0/1:1"]
    assert [rollout.rollout_id for rollout in found.failed] == ["run/train/1/0/2:1"]
    assert found.failures == {"inference_unavailable": 3}
    assert sorted(task_app.acked) == ids(1, 2)


async def test_what_a_killed_start_left_is_ended_at_each_app_that_answers():
    told: list[str] = []

    async def abort(request: web.Request) -> web.Response:
        told.append((await request.json())["run_id"])
        return web.json_response({"ok": True})

    first, second = ScriptedTaskApp(), ScriptedTaskApp()
    async with served(first, routes={"/run/abort": abort}) as a, served(second) as b:
        await Dispatcher(wrap([a, b]), timeout_s=30).abort("run.1")  # b does not know the route
    assert told == ["run.1"]


def test_the_gateway_key_reaches_the_task_app_although_the_request_hides_it():
    request = make_request(0)
    ((sent,),) = slices([request], max_body_bytes=DEFAULT_BODY_BYTES, url="http://a")
    assert sent["policy"]["inference_key"] == "the-gateway-key"
    assert "the-gateway-key" not in repr(request) + request.model_dump_json()


@pytest.mark.parametrize("statuses", [[503, 429], [502]])
async def test_a_task_app_that_says_later_is_asked_again(statuses: list[int]):
    task_app = ScriptedTaskApp()
    task_app.answer_first_with = [*statuses]
    async with served(task_app) as client:
        await client.submit([make_request(0)])
    assert (len(task_app.ended), task_app.answer_first_with) == (1, [])


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (424, PROBLEM, PluginFailed),
        (502, PROBLEM, BackendFailed),
        (504, PROBLEM, BackendFailed),
        (504, {**PROBLEM, "code": "deadline_exceeded"}, TaskAppLost),  # a retry gets its answer
        (422, PROBLEM, Refused),
        (502, {"message": "a proxy's"}, TaskAppLost),
        (500, {**PROBLEM, "code": "internal_error"}, TaskAppLost),
    ],
)
async def test_what_a_plug_in_or_a_server_behind_a_task_app_says_is_no_loss_of_the_task_app(
    status: int, body: dict[str, str], kind: type[TaskAppError]
):
    async def snapshot(request: web.Request) -> web.Response:
        return web.json_response({**body, "status": status}, status=status)

    async with served(ScriptedTaskApp(), routes={"/env/snapshot": snapshot}) as client:
        with pytest.raises(TaskAppError) as caught:
            await client.snapshot("e")
    assert type(caught.value) is kind
    assert str(body.get("detail") or body["message"]) in str(caught.value)


async def test_a_malformed_answer_is_told_with_its_route_and_what_may_listen_there():
    class OtherService(ScriptedTaskApp):
        async def accept(self, request: web.Request) -> web.Response:
            return web.json_response({"status": "ok"})

    async with served(OtherService()) as client:
        with pytest.raises(TaskAppError) as caught:
            await client.submit([make_request(0)])
    hint = "Another service may listen at this address, or a task app of another version."
    told = f"{client.url}: POST /rollouts: accepted is missing; the reader needs it. {hint}"
    assert str(caught.value) == told


async def test_an_empty_plan_asks_no_app():
    client = TaskAppClient("http://127.0.0.1:9", SecretStr("k"), timeout_s=1)  # never opened
    assert (await Dispatcher(wrap([client]), timeout_s=1).collect([])).rollouts == ()
    with pytest.raises(ValueError, match="at least one task app"):
        Dispatcher(wrap([]), timeout_s=1)


async def test_requests_with_large_documents_are_sent_in_bodies_that_this_task_app_takes():
    def about(size: int, number: int) -> RolloutRequest:
        env = EnvSpec(env_name="documents", config={"document_content": "\u00e9" * size})
        return make_request(number).model_copy(update={"env": env, "group_id": f"train/1/0/row/{number}"})

    sizes: list[int] = []

    class Counting(ScriptedTaskApp):
        max_body_bytes = 200_000

        async def accept(self, request: web.Request) -> web.Response:
            sizes.append(len(await request.read()))
            return await super().accept(request)

    async with served(Counting()) as client:
        await client.about()
        # Six bytes a letter, as JSON in ASCII.
        with pytest.raises(
            JobError, match=r"data.path, row 'row/7': its request has 24\d,\d+ bytes, and the "
        ):
            await client.submit([about(40_000, 7)])
        await client.submit([about(30_000, number) for number in (8, 9)])
    assert [size // 10_000 for size in sizes] == [18, 18]


def test_a_body_holds_64_requests_and_half_a_mib_at_most():
    sizes = {0: 200_000, 1: 200_000, 2: 200_000, 3: 800_000}
    requests = [
        make_request(n).model_copy(update={"start": Start(snapshot="x" * sizes.get(n, 1))}) for n in range(70)
    ]
    parts = list(slices(requests, max_body_bytes=DEFAULT_BODY_BYTES, url="http://a"))
    assert [len(part) for part in parts] == [2, 1, 1, 64, 2]
    assert [item["sibling"] for part in parts for item in part] == list(range(70))


REQUEST = make_request(3)
STEP = StepData(turn=1, observation_data=ObservationData(), action_taken={"type": "text"}, env_rewards=(1.0,))


def played(**changes: Any) -> Callable[[RolloutRequest], Rollout]:
    return lambda request: answer_to(request, **{"steps": (STEP,), **changes})


def scored(environments_own: float) -> UserReward:
    return UserReward(
        reward_function="f",
        result=EvaluateResult(score=1.0),
        environment_outcome_reward=environments_own,
        environment_outcome_definition="",
    )


def step(**changes: Any) -> tuple[StepData]:
    return (STEP.model_copy(update=changes),)


def test_an_honest_answer_stays_as_it_is():
    honest = played()(REQUEST)
    assert checked(REQUEST, honest) is honest


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (played(seed=4), "it was played in the world of seed 4; seed 3 was asked for"),
        (played(parent_rollout_id="x"), "it continues 'x'; None was asked for"),
        (lambda request: answer_to(make_request(4)), "its sibling is 4, and 3 was asked for"),
        (lambda request: played()(request).model_copy(update={"trajectory": None}), "it has no trajectory"),
        (played(outcome_reward=float("nan")), "its outcome_reward is nan, beyond +-1e+15"),
        (played(steps=step(env_rewards=(0.0, float("inf")))), "its env_reward at turn 1 is inf, beyond"),
        # Finite, and sums and squares of it are not.
        (played(outcome_reward=-1e308), "its outcome_reward is -1e+308, beyond"),
        (played(user_reward=scored(float("nan"))), "its environment_outcome_reward is nan"),
        (played(steps=step(base_reward=float("nan"))), "its base_reward at turn 1"),
        (played(steps=step(policy_value_estimate=float("nan"))), "its policy_value_estimate at turn 1"),
    ],
)
def test_another_or_a_broken_episode_is_a_failure_that_says_why(answer: Any, told: str):
    found = checked(REQUEST, answer(REQUEST))
    assert (found.status, found.trajectory) == ("failed", None)
    assert found.failure is not None and told in found.failure.detail
    assert (found.failure.code, found.failure.recurs) == ("wrong_rollout", False)
