"""The gateway as the official `openai` client sees it, on a real port with a real engine."""

import json
from collections.abc import Iterator

import httpx
import openai
import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from service_kit.server import Listener, ServerThread
from shared_schemas.chat import ROLLOUT_HEADER
from shared_schemas.problem import Problem
from shared_schemas.trajectory import PolicyLogprobs
from tests.trainer_backend.inference.chains import chain_model
from trainer_backend.inference.engine import LocalEngine
from trainer_backend.inference.gateway_app import GatewayLimits, create_gateway
from trainer_backend.inference.keys import EngineKeys
from trainer_backend.inference.rendering import ChatRenderer
from trainer_backend.inference.served_policy import ServedPolicy

KEY = "key of this job"
MODEL = "crafter/actor"
MESSAGES = [{"role": "system", "content": "play"}, {"role": "user", "content": "wood 2 tree 1"}]
MAX_MODEL_LEN = 256


@pytest.fixture(scope="module")
def url(tokenizer: PreTrainedTokenizerFast) -> Iterator[str]:
    engine = LocalEngine(
        chain_model(tokenizer, "<|assistant|>", "<|call|>", " do", " sleep", "<|end|>"),
        stop_ids=[tokenizer.eos_token_id],
        version=4,
        keys=EngineKeys(max_model_len=MAX_MODEL_LEN),
    )
    limits = GatewayLimits(max_body_bytes=100_000, default_max_tokens=16)
    app = create_gateway(
        {MODEL: ServedPolicy(engine, tokenizer)}, key=KEY, limits=limits, clock=lambda: 1000.0
    )
    engine.start()
    with ServerThread(app, Listener("127.0.0.1", 0)) as base:
        yield base
    engine.stop()


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=20) as client:
        yield client


def ask(http: httpx.Client, *, rollout: str = "", **changes: object) -> httpx.Response:
    body = {"model": MODEL, "messages": MESSAGES, "temperature": 0, **changes}
    return http.post("/v1/chat/completions", json=body, headers={ROLLOUT_HEADER: rollout} if rollout else {})


def test_a_request_that_names_two_rollouts_is_refused(http: httpx.Client):
    headers = [(ROLLOUT_HEADER, value) for value in ("r/1", "r/2~1")]
    reply = http.post("/v1/chat/completions", json={"model": MODEL, "messages": MESSAGES}, headers=headers)
    assert (reply.status_code, reply.json()["where"]) == (400, f"header {ROLLOUT_HEADER}")


def test_the_openai_client_gets_tool_calls_and_logprobs(
    client: openai.OpenAI, tools: list[dict[str, object]]
):
    reply = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=tools, temperature=0, logprobs=True, tool_choice="auto"
    )
    (choice,) = reply.choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("interact_many", '{"actions": ["do", "sleep"]}')
    assert (choice.finish_reason, choice.message.content, reply.created) == ("tool_calls", None, 1000)
    assert [entry.token for entry in choice.logprobs.content] == ["<|call|>", " do", " sleep", "<|end|>"]
    assert [entry.logprob for entry in choice.logprobs.content] == choice.token_logprobs
    assert reply.usage.completion_tokens == 4
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 4


def test_the_reply_holds_the_exact_tokens_their_version_and_the_raw_end(
    http: httpx.Client, tools: list[dict[str, object]], tokenizer: PreTrainedTokenizerFast
):
    body = ask(http, rollout="r", tools=tools).json()
    (choice,) = body["choices"]
    renderer = ChatRenderer(tokenizer)
    assert renderer.decode(choice["token_ids"]) == "<|call|> do sleep<|end|>"
    assert renderer.decode(body["prompt_token_ids"]) == renderer.prompt_text(MESSAGES, tools)
    assert choice["sampling_finish_reason"] == "stop" and choice["logprobs"] is None
    PolicyLogprobs(
        prompt_ids_reused=body["prompt_ids_reused"], prompt_token_ids=body["prompt_token_ids"],
        token_ids=choice["token_ids"], logprobs=choice["token_logprobs"], finish_reason="stop",
        versions=choice["versions"],
    )  # fmt: skip
    assert choice["versions"] == [[0, 4]]


def test_log_probs_before_and_after_truncation_do_not_come_in_one_reply(http: httpx.Client):
    refused = ask(http, processed_logprobs=True, logprobs=True, top_logprobs=2)
    assert (refused.status_code, refused.json()["where"]) == (400, "top_logprobs")
    assert "processed_logprobs asks for those after" in refused.json()["detail"]


def test_prompt_ids_are_sent_only_when_asked_for(http: httpx.Client):
    assert "prompt_token_ids" not in ask(http).json()
    assert len(ask(http, return_token_ids=True).json()["prompt_token_ids"]) > 0


def test_a_prompt_that_continues_the_conversation_sends_only_what_is_new(
    http: httpx.Client, tools: list[dict[str, object]]
):
    first = ask(http, rollout="c", tools=tools).json()
    message = first["choices"][0]["message"]
    longer = [*MESSAGES, message, {"role": "tool", "tool_call_id": "1", "content": "tree 3"}]
    second = ask(http, rollout="c", tools=tools, messages=longer).json()
    seen = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    assert (first["prompt_ids_reused"], second["prompt_ids_reused"]) == (0, len(seen))
    full = ask(http, rollout="c", tools=tools, messages=longer, return_token_ids=True).json()
    assert full["prompt_token_ids"] == seen + second["prompt_token_ids"] and full["prompt_ids_reused"] == 0
    # the same prompt once more does not continue the last answer
    assert ask(http, rollout="c", tools=tools, messages=longer).json()["prompt_ids_reused"] == 0
    assert ask(http, rollout="another", tools=tools, messages=longer).json()["prompt_ids_reused"] == 0


def test_a_call_that_cannot_be_read_comes_back_as_text_with_the_reason(http: httpx.Client):
    choice = ask(http).json()["choices"][0]  # no tools are offered, so the short form means nothing
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == "<|call|> do sleep"
    assert "expected a tool's name" in choice["message"]["tool_call_error"]


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        ("sometimes", "tool_choice is 'sometimes' (str); allowed: 'auto', 'none', 'required', or a function"),
        ({"type": "function", "function": {"name": "x"}}, "tool_choice names 'x'; tools: interact_many"),
        ({"type": "allowed_tools", "allowed_tools": {"tools": [{}]}}, "tool_choice names no function"),
    ],
)
def test_a_wrong_tool_choice_is_refused_with_what_is_allowed(
    http: httpx.Client, tools: list[dict[str, object]], choice: object, sentence: str
):
    reply = ask(http, tools=tools, tool_choice=choice)
    assert (reply.status_code, reply.json()["where"]) == (400, "tool_choice")
    assert reply.json()["detail"].startswith(sentence)


def test_tool_choice_none_hides_the_tools(http: httpx.Client, tools: list[dict[str, object]]):
    assert "tool_calls" not in ask(http, tools=tools, tool_choice="none").json()["choices"][0]["message"]


def test_models_are_listed_with_the_version_that_serves(client: openai.OpenAI):
    (model,) = client.models.list().data
    assert (model.id, model.policy_version, model.max_model_len) == (MODEL, 4, MAX_MODEL_LEN)


def test_a_model_is_retrieved_by_its_name_which_has_a_slash(client: openai.OpenAI):
    assert client.models.retrieve(MODEL) == client.models.list().data[0]
    with pytest.raises(openai.NotFoundError, match="Did you mean 'crafter/actor'"):
        client.models.retrieve("crafter/actr")


def test_what_clients_send_that_changes_nothing_is_taken(client: openai.OpenAI, http: httpx.Client):
    own = {"user": "u", "metadata": {"a": "b"}, "store": False, "parallel_tool_calls": True, "n": 1}
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, **own)
    again = [*MESSAGES, answer.choices[0].message.model_dump(), {"role": "user", "content": "wood 3"}]
    assert ask(http, messages=again).status_code == 200
    developer = [{**MESSAGES[0], "role": "developer"}, MESSAGES[1]]
    prompts = [ask(http, messages=m, return_token_ids=True).json() for m in (MESSAGES, developer)]
    assert prompts[0]["prompt_token_ids"] == prompts[1]["prompt_token_ids"], "the system's, in a newer word"


def test_an_error_has_the_type_by_which_clients_know_it(http: httpx.Client, url: str):
    assert httpx.get(f"{url}/v1/models").json()["error"]["type"] == "authentication_error"
    for changes in ({"n": 0}, {"model": "x"}, {"max_tokens": MAX_MODEL_LEN}):
        assert ask(http, **changes).json()["error"]["type"] == "invalid_request_error"


def test_health_needs_no_key(url: str):
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}])
@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/models"), ("POST", "/v1/chat/completions")])
def test_without_the_key_nothing_is_served(url: str, header: dict[str, str], method: str, path: str):
    reply = httpx.request(method, f"{url}{path}", headers=header)
    assert reply.status_code == 401 and KEY not in reply.text
    assert "TURNWISE_API_KEY, or the variable that --api-key-env names" in reply.text
    assert reply.headers["content-type"] == "application/problem+json"
    assert reply.json()["error"]["code"] == reply.json()["code"] == "invalid_api_key"


def test_the_openai_client_understands_a_refusal(url: str):
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError, match="another key was given"),
    ):
        stranger.models.list()


def test_a_full_context_is_refused_with_the_counts(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=MAX_MODEL_LEN)
    assert caught.value.code == "context_length_exceeded"
    long = [{"role": "user", "content": "wood " * 300}]
    with pytest.raises(openai.BadRequestError, match=f"maximum context length is {MAX_MODEL_LEN} tokens"):
        client.chat.completions.create(model=MODEL, messages=long)


def test_a_job_may_allow_less_than_the_model_holds(http: httpx.Client):
    prompt = ask(http).json()["usage"]["prompt_tokens"]
    assert ask(http, max_tokens=7, max_model_length=prompt + 7).status_code == 200
    problem = ask(http, max_tokens=7, max_model_length=prompt + 6).json()
    assert problem["code"] == "context_length_exceeded"
    assert (problem["prompt_tokens"], problem["max_tokens"]) == (prompt, 7)
    assert problem["max_model_len"] == prompt + 6
    assert problem["detail"] == (
        f"This model's maximum context length is {prompt + 6} tokens (max_model_length), and a prompt of "
        f"{prompt} tokens + max_tokens 7 = {prompt + 7} were asked for"
    )


def test_a_job_cannot_allow_more_than_the_model_holds(http: httpx.Client):
    problem = ask(http, max_tokens=MAX_MODEL_LEN, max_model_length=10 * MAX_MODEL_LEN).json()
    assert problem["max_model_len"] == MAX_MODEL_LEN and "(the model's own)" in problem["detail"]


def test_without_max_tokens_the_room_below_the_limit_of_the_job_is_used(http: httpx.Client):
    prompt = ask(http).json()["usage"]["prompt_tokens"]
    assert ask(http, max_model_length=prompt + 1).json()["usage"]["completion_tokens"] == 1


def test_what_became_of_prefixes_is_counted_by_model(http: httpx.Client, tools: list[dict[str, object]]):
    def counted() -> dict[str, int]:
        (model,) = http.get("/v1/models").json()["data"]
        assert len(model["chat_template"]) == 12
        return model["conversations"]

    before = counted()
    message = ask(http, rollout="counted", tools=tools).json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "wood 3"}
    ask(http, rollout="counted", tools=tools, messages=[*MESSAGES, message, result])
    ask(http, rollout="counted", tools=tools, messages=[MESSAGES[0], MESSAGES[1], result])
    ask(http, tools=tools)  # of no rollout, so of no conversation
    after = counted()
    changed = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    # The template writes the call with other spaces than the chain; its tokens are as they are tokenised.
    drift = {"drift_checked": 1, "drift_text": 1}
    assert changed == {"prefix_extended": 1, "prefix_broken/fresh": 1, **drift}


@pytest.mark.parametrize(
    ("changes", "status", "where"),
    [
        ({"max_model_length": 0}, 400, "max_model_length"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "usr", "content": "a"}]}, 400, "messages.0.role"),
        ({"messages": [{"content": "a"}]}, 400, "messages.0.role"),
        ({"messages": [*MESSAGES, {"role": "user", "contnt": "a"}]}, 400, "messages.2.contnt"),
        ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, 400, "messages.0.audio"),
        ({"model": "crafter/actr"}, 404, "model"),
        ({"temprature": 1}, 400, "temprature"),
        ({"parallel_tool_calls": False}, 400, "parallel_tool_calls"),
        ({"store": True}, 400, "store"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, 400, "chat_template_kwargs"),
        ({"n": 0}, 400, "n"),
        ({"n": 65}, 400, "n"),
        ({"stop": ["a", "b", "c", "d", "e"]}, 400, "stop"),
        ({"stop": ["a", ""]}, 400, "stop.1"),
        ({"top_logprobs": 5}, 400, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, 400, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
        ({"stream": True, "stream_options": {"obfuscate": True}}, 400, "stream_options.obfuscate"),
        ({"stop_token_ids": [3]}, 400, "stop_token_ids"),
        ({"min_tokens": 3}, 400, "min_tokens"),
        ({"logit_bias": {"3": 100}}, 400, "logit_bias"),
        ({"frequency_penalty": 1}, 400, "frequency_penalty"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": -5}, 400, "max_tokens"),
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": 1e-9}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"top_k": -2}, 400, "top_k"),
        ({"top_k": 2**63}, 400, "top_k"),
        ({"seed": 2**64}, 400, "seed"),
        ({"temperature": 1e30}, 400, "temperature"),
        ({"max_tokens": 2**63}, 400, "max_tokens"),
        ({"max_completion_tokens": 2**63}, 400, "max_completion_tokens"),
        ({"max_model_length": 2**63}, 400, "max_model_length"),
        ({"padding": "x" * 200_000}, 413, "body"),
    ],
)
def test_bad_input_is_refused_with_its_place(
    http: httpx.Client, changes: dict[str, object], status: int, where: str
):
    reply = ask(http, **changes)
    problem = reply.json()
    assert (reply.status_code, problem["status"], problem["where"]) == (status, status, where)
    Problem.model_validate({key: value for key, value in problem.items() if key != "error"})
    assert problem["detail"] in problem["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b'{"temperature": NaN}', b'"\\ud800"'])
def test_a_body_that_is_no_request_is_refused(http: httpx.Client, body: bytes):
    assert http.post("/v1/chat/completions", content=body).status_code == 400


def test_a_body_without_a_declared_length_is_bounded_too(http: httpx.Client):
    chunks = (b"x" * 10_000 for _ in range(20))
    assert http.post("/v1/chat/completions", content=chunks).json()["code"] == "body_too_large"


def test_unknown_routes_and_methods_answer_in_the_same_shape(http: httpx.Client):
    nothing = http.get("/v1/nothing").json()
    assert nothing["code"] == "not_found" and "POST /v1/chat/completions" in nothing["hint"]
    refused = http.get("/v1/chat/completions")
    assert refused.status_code == 405 and refused.json()["code"] == "method_not_allowed"
    assert refused.headers["content-type"] == "application/problem+json"


def test_a_negative_seed_as_openai_allows_it_is_taken(http: httpx.Client):
    replies = [ask(http, temperature=1, seed=-1).json()["choices"] for _ in range(2)]
    assert replies[0] == replies[1]


def test_a_gateway_without_a_key_cannot_be_made(tokenizer: PreTrainedTokenizerFast, model: PreTrainedModel):
    with pytest.raises(ValueError, match="needs a key"):
        create_gateway({MODEL: ServedPolicy(LocalEngine(model, stop_ids=[]), tokenizer)}, key="")


def test_the_reply_is_compact_json(http: httpx.Client):
    text = ask(http).text
    assert text == json.dumps(json.loads(text), separators=(",", ":"))
