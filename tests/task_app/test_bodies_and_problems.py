"""Every error is problem+json; no body is larger than the bound."""

import pytest
from pydantic import ValidationError

from shared_schemas.problem import Problem
from shared_schemas.rollouts import RolloutAck, RolloutBatch
from task_app.dialects.one_call.request import LegacyRollout
from task_app.plugins import PlugBoards
from task_app.routes.interaction import InteractionRespond
from task_app.routes.snapshots import Branch
from task_app.routes.steps import EnvStepMany
from tests.task_app.counting import PlannedPolicy, boards, rollout, running_app
from tests.task_app.playing import new_policy, post

JSON = {"Content-Type": "application/json"}


def problem(answer):
    assert answer.headers["content-type"] == "application/problem+json"
    one = Problem.model_validate_json(answer.content)
    assert one.status == answer.status_code
    return one


async def test_a_body_may_begin_with_a_byte_order_mark_and_utf_16_is_named(client):
    body = '{"env_name": "counting", "seed": 1}'
    answers = [
        await client.post("/env/create", content=body.encode(encoding), headers=JSON)
        for encoding in ("utf-8-sig", "utf-16")
    ]
    assert answers[0].status_code == 200, answers[0].text
    one = problem(answers[1])
    assert (one.status, one.where) == (422, "body")
    assert one.detail == "the text is UTF-16; save or send it as UTF-8"


async def test_unknown_paths_and_methods_are_problems(client):
    missing = problem(await client.get("/nope"))
    answers = [await client.put(path) for path in ("/env/create", "/", "/rollouts", "/rollouts/r1")]
    assert (missing.status, missing.code, missing.where) == (404, "not_found", "/nope")
    assert {problem(answer).code for answer in answers} == {"method_not_allowed"}
    allowed = [(answer.status_code, answer.headers["allow"]) for answer in answers]
    assert allowed == [(405, "POST"), (405, "GET, HEAD"), (405, "GET, POST"), (405, "DELETE, GET")]


async def test_a_body_is_refused_by_its_length_and_one_without_a_length_is_counted():
    async def chunks():
        for _ in range(100):
            yield b" " * 100

    async with running_app(max_body_bytes=2_000) as client:
        for content, detail in (
            (b" " * 10_000_000, "the body has 10000000 bytes, which is more than 2000 bytes"),
            (chunks(), "the body is larger than 2000 bytes"),
        ):
            one = problem(await client.post("/rollouts", content=content))
            assert (one.status, one.code, one.where) == (413, "body_too_large", "body")
            assert one.detail == detail and "TURNWISE_MAX_BODY_BYTES" in one.hint
        ok = await client.post("/rollouts", content=b" " * 2_000, headers=JSON)
        assert ok.status_code == 422, "exactly the bound is read"


async def test_a_broken_policy_is_named_unless_the_caller_gave_it_what_broke_it():
    async with running_app(boards(broken=lambda: PlannedPolicy(KeyError("its text")))) as client:
        env_id = (await post(client, "/env/create", env_name="counting"))["env_id"]
        told = []
        for body in ({"bound_env_id": env_id}, {}):
            step = {"policy_id": await new_policy(client, "broken", **body), "observation": {"text": "x"}}
            told.append(problem(await client.post("/policy/step", json=step)))
    # Of the second the observation is the caller's.
    assert [(one.status, one.code) for one in told] == [(424, "critical_error"), (422, "invalid_request")]
    assert "KeyError: 'its text'" in told[0].detail and "its text" not in told[1].detail


class BrokenBoards(PlugBoards):
    """Fails where no plug-in is called."""

    def policy_name(self, name, *, where=""):
        raise RuntimeError("hidden detail")


async def test_an_error_of_the_service_itself_is_a_problem_that_hides_its_inside():
    async with running_app(BrokenBoards({}, {})) as client:
        one = problem(await client.post("/policy/create", json={"policy_name": "broken"}))
    assert (one.status, one.code) == (500, "internal_error")
    assert "hidden" not in one.model_dump_json()


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "-0.5"])
async def test_numbers_that_are_no_seconds_are_refused(client, number):
    one = problem(await client.get("/rollouts", params={"run_id": "r", "wait_s": number}))
    assert (one.status, one.where) == (422, "wait_s")


MANY = 50_000


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (RolloutBatch, {"rollouts": [{}] * MANY}),
        (RolloutBatch, {"rollouts": [rollout("a", state_keys=[1] * MANY, snapshot_turns=["x"] * MANY)]}),
        (RolloutAck, {"run_id": "r", "rollout_ids": [1] * MANY}),
        (EnvStepMany, {"steps": [{}] * MANY}),
        (EnvStepMany, {"steps": [{"env_id": "e", "tool_calls": [1] * MANY}]}),
        (Branch, {"env_ids": [1] * MANY}),
        (InteractionRespond, {"interaction_id": "i", "messages": [{"role": "assistant"}, *[{}] * MANY]}),
        (LegacyRollout, {"run_id": "r", "env": {}, "policy": {}, "ops": [1] * MANY}),
    ],
)
def test_a_list_is_read_up_to_its_first_bad_element(model, body):
    # An error an element was 10 s and 2 GB for a megabyte of {}.
    with pytest.raises(ValidationError) as refused:
        model.model_validate(body)
    assert refused.value.error_count() <= 6, "one element has at most so many fields that are wrong"


async def test_many_unknown_keys_are_counted_before_they_are_compared(client):
    keys = {f"sed{number}": 1 for number in range(101)}
    created = problem(await client.post("/env/create", json={"env_name": "counting", **keys}))
    body = {"run_id": "r", "policy": {"policy_name": "planned", "config": keys}, "ops": ["agent", "env"]}
    played = problem(await client.post("/rollout", json=body | {"env": {"env_name": "counting"}}))
    assert "101 unknown keys; at most 100" in created.detail
    assert "policy.config has 101 unknown keys; at most 100" in played.detail
