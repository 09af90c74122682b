"""What an agent asks of an answer, its form or a call: a server follows it, or it is told as dropped."""

import json
from contextlib import asynccontextmanager

import pytest

from task_app.policies.openai import OpenAIAgentPolicy
from task_app.policies.openai_config import OpenAIConfig
from tests.task_app.captures.test_dialects import ADD, TEXT, captured
from tests.task_app.counting import KEY, PlannedPolicy, boards, running_app
from tests.task_app.fake_inference import completion, fake_inference, raw, status

SCHEMA = {"type": "object", "properties": {"n": {"enum": [None, 1]}}, "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
OTHER = {"name": "other", "description": "", "parameters": {"type": "object"}}
ASKED = [{"role": "user", "content": "x"}]
CHAT_TOOLS = [{"type": "function", "function": one} for one in (ADD, OTHER)]
# A call of each API that asks for a form, for one of two tools, and for one call at a time.
CALLS = {
    "chat/completions": {
        "messages": ASKED, "tools": CHAT_TOOLS, "response_format": FORM, "parallel_tool_calls": False,
        "tool_choice": {"type": "function", "function": {"name": "add"}},
    },
    "responses": {
        "input": "x", "tools": [{"type": "function", **one} for one in (ADD, OTHER)],
        "tool_choice": {"type": "function", "name": "add"}, "parallel_tool_calls": False,
        "text": {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}},
    },
    "messages": {
        "messages": ASKED, "max_tokens": 9,
        "tools": [{"name": one["name"], "description": one["description"],
                   "input_schema": one["parameters"]} for one in (ADD, OTHER)],
        "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
}  # fmt: skip
OPTIONS = {"tool_choice": "required", "response_format": FORM, "parallel_tool_calls": False}
REPLY = completion({"role": "assistant", "content": "{}"})


@asynccontextmanager
async def asking(*answers, key=None, **config):
    """A client of a capture whose policy asks a server with this key, and that server."""
    async with fake_inference(*answers) as server, running_app(boards()) as client:
        spec = {"inference_url": server.url, "model": "m", **config}
        body = {"policy": {"policy_name": "openai", "config": spec, "inference_key": key}}
        capture = (await client.post("/captures", json=body)).json()
        client.headers = {"Authorization": f"Bearer {capture['key']}"}
        client.base_url = capture["capture_url"]
        yield client, server


@pytest.mark.parametrize("path", CALLS)
async def test_a_server_whose_tokens_are_not_recorded_gets_all_of_it(path):
    async with asking(REPLY, ask_token_ids=False) as (client, server):
        answer = await client.post(f"v1/{path}", json={"model": "any"} | CALLS[path])
        assert answer.status_code == 200 and "X-Turnwise-Ignored" not in answer.headers
        (body,) = server.bodies
        assert {name: body[name] for name in OPTIONS} == OPTIONS
        assert [tool["function"]["name"] for tool in body["tools"]] == ["add"]


async def test_where_tokens_are_recorded_nothing_that_needs_a_grammar_is_passed_on():
    async with asking(REPLY) as (client, server):
        for path, call in CALLS.items():
            answer = await client.post(f"v1/{path}", json={"model": "any"} | call)
            assert answer.headers["X-Turnwise-Ignored"] == "parallel_tool_calls, response_format"
        for body in server.bodies:
            assert [name for name in OPTIONS if body.get(name) == OPTIONS[name]] == ["tool_choice"]
        counts = (await client.get("http://task-app/metrics", headers={"X-API-Key": KEY})).text
        assert 'turnwise_options_dropped_total{option="response_format"} 3.0' in counts
        (warning, _) = (await client.post("end")).json()["trajectory"]["warnings"]
        assert "parallel_tool_calls, response_format" in warning
    config = OpenAIConfig(inference_url="http://h", model="m", exact_tokens="vllm")
    assert OpenAIAgentPolicy(config).call_options == frozenset(), "vLLM forces a call by a grammar"


async def test_a_call_that_our_gateway_could_not_force_is_told_too():
    def unforced(body):
        reply = REPLY(body)
        reply.headers["X-Turnwise-Ignored"] = "tool_choice, of_another_kind"
        return reply

    async with asking(unforced) as (client, _):
        call = CALLS["responses"] | {"text": {}, "parallel_tool_calls": True}
        answer = await client.post("v1/responses", json={"model": "any"} | call)
        assert answer.headers["X-Turnwise-Ignored"] == "tool_choice"
        (warning, _) = (await client.post("end")).json()["trajectory"]["warnings"]
        assert warning.endswith(": tool_choice")


@pytest.mark.parametrize("path", CALLS)
async def test_a_form_is_a_400_where_the_operator_rejects_what_nothing_enforces(path):
    policy = PlannedPolicy(TEXT)
    async with running_app(boards(mine=lambda: policy), structured_output="reject") as client:
        capture = (await client.post("/captures", json={"policy": {"policy_name": "mine"}})).json()
        key = {"Authorization": f"Bearer {capture['key']}"}
        answer = await client.post(
            f"{capture['base_url']}/{path}", json={"model": "any"} | CALLS[path], headers=key
        )
        assert answer.status_code == 400 and not policy.seen
        message = answer.json()["error"]["message"]
        assert "no form of the answer is enforced" in message and "TURNWISE_STRUCTURED_OUTPUT" in message
        state = await client.get(capture["capture_url"], headers=key)
        assert (state.json()["status"], state.json()["calls"]) == ("open", 0)


@pytest.mark.parametrize(
    ("path", "changes", "sentence"),
    [
        ("chat/completions", {"tool_choice": {"type": "function", "function": {"name": "x"}}}, "add, other"),
        ("messages", {"tool_choice": {"type": "any"}, "tools": []}, "tools holds none"),
        ("responses", {"tool_choice": "sometimes"}, "'required', or a function"),
        ("responses", {"text": {"format": {"type": "grammar"}}}, "text, json_object, json_schema"),
    ],
)
async def test_a_wish_that_means_nothing_is_a_400_with_what_is_allowed(path, changes, sentence):
    async with captured(TEXT) as (client, _, _):
        answer = await client.post(f"v1/{path}", json={"model": "any"} | CALLS[path] | changes)
        assert answer.status_code == 400 and sentence in answer.json()["error"]["message"]


async def test_allowed_tools_leave_the_others_out_and_what_the_config_sets_or_leaves_out_is_without_effect():
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "other"}}]}
    call = CALLS["chat/completions"] | {"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
    async with asking(REPLY, ask_token_ids=False) as (client, server):
        await client.post("v1/chat/completions", json={"model": "any"} | call)
        (body,) = server.bodies
        assert [tool["function"]["name"] for tool in body["tools"]] == ["other"]
        assert body["tool_choice"] == "auto"
    config = {"extra_body": {"response_format": {"type": "text"}}, "leave_out": ["tool_choice"]}
    async with asking(REPLY, ask_token_ids=False, **config) as (client, server):
        answer = await client.post("v1/chat/completions", json={"model": "any"} | CALLS["chat/completions"])
        assert answer.headers["X-Turnwise-Ignored"] == "response_format, tool_choice"
        (body,) = server.bodies
        assert body["response_format"] == {"type": "text"} and "tool_choice" not in body


async def test_no_key_breaks_the_header_that_names_it():
    async with captured(TEXT) as (client, _, _):
        keys = {"a\r\nSet-Cookie: b": 1, "\x00日": 1} | {f"key {i}": 1 for i in range(2_000)}
        answer = await client.post("v1/chat/completions", json={"model": "m", "messages": ASKED} | keys)
        ignored = answer.headers["X-Turnwise-Ignored"]
        assert ignored.startswith(r"a\r\nSet-Cookie: b, \x00\u65e5, key 0, ") and len(ignored) < 4_000


COUNTS = {"messages/count_tokens": "messages", "responses/input_tokens": "responses"}


@pytest.mark.parametrize("route", COUNTS)
@pytest.mark.parametrize(
    ("config", "reply", "path"),
    [
        ({}, '{"count": 41, "max_model_len": 9, "tokens": []}', "/tokenize"),
        ({"exact_tokens": "vllm"}, '{"count": 41}', "/tokenize"),
        ({"ask_token_ids": False}, '{"usage": {"prompt_tokens": 41}}', "/v1/chat/completions"),
    ],
)
async def test_the_tokens_of_a_prompt_are_counted_by_its_server_without_a_decision(
    route, config, reply, path
):
    async with asking(raw(reply), **config) as (client, server):
        answer = await client.post(f"v1/{route}", json={"model": "any"} | CALLS[COUNTS[route]])
        assert answer.json()["input_tokens"] == 41, answer.text
        assert server.paths == [path] and server.bodies[0]["messages"] == ASKED
        assert "x-turnwise-rollout" not in server.headers[0], "the conversation is not touched"
        assert (await client.get(str(client.base_url)[:-1])).json()["calls"] == 0


async def test_a_count_is_of_the_prompt_that_the_config_makes():
    shown = {"chat_template_kwargs": {"enable_thinking": False}}
    vllm = {"exact_tokens": "vllm", "temperature": 0.5} | shown
    other = {"ask_token_ids": False, "max_tokens_name": "max_completion_tokens", "extra_body": {"effort": 1}}
    for config, reply, expected in (
        (vllm, '{"count": 1}', {"model": "m", "messages": ASKED} | shown),
        (other, '{"usage": {"prompt_tokens": 1}}', {"max_completion_tokens": 1, "effort": 1}),
    ):
        async with asking(raw(reply), **config) as (client, server):
            await client.post("v1/messages/count_tokens", json={"model": "any", "messages": ASKED})
            (body,) = server.bodies
            assert expected.items() <= body.items() and ("temperature" in body) == (config is other)


async def test_a_policy_or_server_that_counts_no_tokens_says_so_and_not_the_key_that_a_server_repeats():
    async def counted(client):
        return await client.post("v1/messages/count_tokens", json={"model": "m"} | CALLS["messages"])

    async with captured(TEXT) as (client, _, _):
        answer = await counted(client)
        assert answer.status_code == 400 and "'planned' counts no tokens" in answer.json()["error"]["message"]
    async with asking(status(404, {"error": {"message": "no route"}})) as (client, _):
        answer = await counted(client)
        assert answer.status_code == 502 and answer.json()["type"] == "error"
        assert (await client.get(str(client.base_url)[:-1])).json()["status"] == "open"
    key = "sk-of-the-server-0123456789"
    repeated = raw(json.dumps({"usage": {"prompt_tokens": key}}))
    async with asking(repeated, key=key, ask_token_ids=False) as (client, _):
        answer = await counted(client)
        assert answer.status_code == 502 and key not in answer.text and "[key]" in answer.text


ANTHROPIC = {"anthropic-version": "2023-06-01"}


@pytest.mark.parametrize(
    ("method", "path", "headers", "status_code"),
    [
        ("POST", "v1/embeddings", {}, 404),
        ("POST", "v1/messages/batches", {}, 404),
        ("POST", "v1/complete", ANTHROPIC, 404),
        ("DELETE", "v1/models/gpt", {}, 405),
        ("GET", "v1/messages", {}, 405),
        ("POST", "v1/chat/completions", {"Authorization": "Bearer wrong"}, 401),
        ("POST", "v1/messages", {"Authorization": "Bearer wrong"}, 401),
        ("POST", "v1/messages", {"Content-Length": "99999999"}, 413),
    ],
)
async def test_every_error_below_v1_has_the_form_that_the_library_reads(method, path, headers, status_code):
    async with captured(TEXT) as (client, _, _):
        answer = await client.request(method, path, headers=headers)
        assert (answer.status_code, answer.headers["content-type"]) == (status_code, "application/json")
        body = answer.json()
        assert body["error"]["message"]
        is_anthropic = path.startswith("v1/messages") or headers == ANTHROPIC
        assert (body.get("type") == "error", "code" in body["error"]) == (is_anthropic, not is_anthropic)
        assert "WWW-Authenticate" in answer.headers or status_code != 401


async def test_models_have_the_form_of_both_clients_and_any_name_is_the_policy_unless_some_are_listed():
    async with captured(TEXT) as (client, _, _):
        model = (await client.get("v1/models/org/gpt-4o")).json()
        assert (model["id"], model["object"], model["type"]) == ("org/gpt-4o", "model", "model")
        whole = (await client.get("v1/models")).json()
        assert (whole["object"], whole["has_more"], whole["first_id"]) == ("list", False, "policy")
    async with captured(TEXT, models=["small"]) as (client, _, _):
        assert [one["id"] for one in (await client.get("v1/models")).json()["data"]] == ["small"]
        call = {"model": "large", "messages": ASKED}
        for answer in (
            await client.get("v1/models/large"),
            await client.post("v1/responses/input_tokens", json={"model": "large", "input": "x"}),
            await client.post("v1/chat/completions", json=call),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
            assert "known: small" in answer.json()["error"]["message"]
