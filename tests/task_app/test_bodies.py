"""What enters as JSON can be written out again; a body is bounded, and what is wrong with it is a problem.

Half a character that a model wrote breaks nothing; that of a request is refused (routes/test_content.py).
"""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from shared_schemas.json_text import MAX_DEPTH, MAX_MEMBERS, encodable_json, read_json
from shared_schemas.problem import Problem
from shared_schemas.rollouts import Rollout, RolloutAck, RolloutBatch
from shared_schemas.task_definition import TaskDefinitionModel
from shared_schemas.trajectory import Trajectory
from task_app.dialects.one_call.request import LegacyRollout
from task_app.episode.worker import RLRolloutWorker
from task_app.plugins import PlugBoards, default_plug_boards
from task_app.routes.interaction import InteractionRespond
from task_app.routes.snapshots import Branch
from task_app.routes.steps import EnvStepMany
from tests.task_app.counting import CountingEnvironment, PlannedPolicy, boards, rollout, running_app
from tests.task_app.fake_inference import fake_inference, raw
from tests.task_app.playing import new_policy, post
from tests.task_app.rollout_client import play

FINITE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("ab\\u0e3"), inner),
)  # fmt: skip


@settings(max_examples=60)
@given(FINITE)
def test_what_can_be_written_out_again_is_read_as_it_stands_and_its_encodable_copy_is_equal(value):
    assert encodable_json({"value": value}) == {"value": value}
    assert read_json(json.dumps(value)) == value
    assert read_json(json.dumps(value, ensure_ascii=False).encode()) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (rb'{"tag": "\ud83d"}', "half a character"),
        (rb'{"\udc00": 1}', "half a character"),
        (b'"\xed\xa0\xbd"', "column 2 is no UTF-8"),
        ('{"tag": "\ud83d"}', "no JSON: half a character .* at line 1 column 1"),
        (rb'{"a": [1, "x\u0000"]}', "a.1 holds U+0000"),
        (rb'{"a": {"\u0000": 1}}', "a holds a key with U+0000"),
        (b"[NaN]", "no JSON"),
        (b"[-Infinity]", "no JSON"),
        (b'{"a": [1e999]}', "a.0 holds a number beyond 1.8e308"),
        (b"-1E+400", "the value holds a number beyond"),
        (b"1" + b"0" * 250 + b"e99", "the value holds a number beyond"),
        (b"1" + b"0" * 400, "the value holds a number beyond"),
        (b"1" + b"0" * 5_000, "out of range"),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), f"more than {MAX_DEPTH} levels"),
        (json.dumps([dict.fromkeys(map(str, range(MAX_MEMBERS + 1)))]), "0 holds 10001 keys; at most 10000"),
        (b'\xef\xbb\xbf[{"a": 1, "a": 1}]', "the key 'a' comes twice"),
        ('{"a": 1}'.encode("utf-16"), "is UTF-16"),
        (b"", "no JSON"),
    ],
)
def test_what_could_not_be_stored_is_refused_with_its_place(text, words):
    with pytest.raises(ValueError, match=words.replace("+", r"\+")):
        read_json(text)


def test_text_that_only_looks_suspect_is_read():
    assert read_json(rb'["\\u0000", "e+999", "\ud83d\ude00", 1e-999]') == [r"\u0000", "e+999", "😀", 0.0]


@pytest.mark.parametrize(("text", "encodable"), [("\u00e4", "\u00e4"), ("a\ud800b", "a?b")])
def test_encodable_data_shares_no_list_with_its_source_whether_a_text_is_changed_or_not(text, encodable):
    inner = [1, 2.5, None]
    copy = encodable_json({text: (True, inner)})
    assert copy == {encodable: [True, [1, 2.5, None]]}
    inner.append(0)
    assert copy[encodable][1] == [1, 2.5, None]


HALF = "\ud83d"


def calling_with(arguments, name="add", content=None):
    """The body of a completion; json.dumps writes the half character as an escape, as a server does."""
    call = {"id": f"c{HALF}", "function": {"name": name, "arguments": arguments}}
    return raw(json.dumps({"choices": [{"message": {"content": content, "tool_calls": [call]}}]}))


async def test_a_trajectory_of_what_a_policy_wrote_can_be_serialised():
    call = {"id": HALF, "name": f"add{HALF}", "arguments": json.dumps({HALF: HALF})}
    broken = {"id": "1", "name": "add", "arguments": f'{{"{HALF}'}
    policy = PlannedPolicy(
        {"type": "tool_call", "tool_calls": [call, broken], "content": HALF, "thoughts": [HALF]},
        {"type": "text", "content": HALF, "invalid_reason": f"because {HALF}"},
        {"type": "tool_call", "name": "add", "arguments": {"names": [HALF]}},
        {"type": "terminate"},
    )
    worker = RLRolloutWorker(
        task_definition=TaskDefinitionModel(resource_type="counting"),
        environment=CountingEnvironment(),
        agent_policy=policy,
        seed=1,
    )
    _, messages, _ = await worker.run_episode()
    assert all(message.model_dump_json() for message in messages)
    trajectory = worker.trajectory()
    assert Trajectory.model_validate_json(trajectory.model_dump_json()) == trajectory
    first, second, third, _ = trajectory.steps
    assert first.action_taken["thoughts"] == ["?"]
    assert (first.raw_policy_output, second.step_info.invalid_reason) == ("?", "because ?")
    assert third.step_info.executed_actions == ("?",)


async def test_a_rollout_of_the_service_survives_a_model_that_writes_half_characters():
    answers = [
        calling_with(json.dumps({"actions": [HALF]}), "interact_many"),
        calling_with(f'{{"actions": ["{HALF}'),
        calling_with(json.dumps({HALF: 1}), "interact_many", content=HALF),
        calling_with(json.dumps({"actions": ["noop"]}), f"interact{HALF}"),
    ]
    async with fake_inference(*answers) as fake, running_app(default_plug_boards()) as client:
        policy = {"policy_name": "openai", **fake.asked_by()}
        body = rollout("a", env={"env_name": "crafter"}, policy=policy, limits={"max_decisions": 4})
        found = (await play(client, body))["a"]
    assert found.failure is None
    assert found.trajectory is not None
    assert len(found.trajectory.steps) == 4
    assert Rollout.model_validate_json(found.model_dump_json()) == found
    assert HALF not in json.dumps(fake.bodies, ensure_ascii=False), "the next prompt is clean too"


JSON = {"Content-Type": "application/json"}


def problem(answer):
    assert answer.headers["content-type"] == "application/problem+json"
    one = Problem.model_validate_json(answer.content)
    assert one.status == answer.status_code
    return one


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
