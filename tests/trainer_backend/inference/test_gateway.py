"""The gateway as the official `openai` client sees it, on a real port with a real engine."""

from collections.abc import Iterator

import httpx
import openai
import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from shared_schemas.chat import ROLLOUT_HEADER
from shared_schemas.problem import Problem
from shared_schemas.trajectory import PolicyLogprobs
from tests.trainer_backend.inference.chains import chain_model
from tests.trainer_backend.inference.served import KEY, MESSAGES, MODEL, Served, serving
from trainer_backend.inference.engine import LocalEngine
from trainer_backend.inference.gateway_app import create_gateway
from trainer_backend.inference.rendering import ChatRenderer
from trainer_backend.inference.served_policy import ServedPolicy

MAX_MODEL_LEN = 256
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def served(tokenizer: PreTrainedTokenizerFast) -> Iterator[Served]:
    model = chain_model(tokenizer, "<|assistant|>", "<|call|>", " do", " sleep", "<|end|>")
    with serving(model, tokenizer, version=4, max_model_len=MAX_MODEL_LEN) as served:
        yield served


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return served.client


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=served.url, headers=headers, timeout=20) as client:
        yield client


def ask(http: httpx.Client, *, rollout: str = "", **changes: object) -> httpx.Response:
    body = {"model": MODEL, "messages": MESSAGES, "temperature": 0, **changes}
    return http.post(CHAT, json=body, headers={ROLLOUT_HEADER: rollout} if rollout else {})


def test_a_request_that_names_two_rollouts_is_refused(http: httpx.Client):
    headers = [(ROLLOUT_HEADER, value) for value in ("r/1", "r/2~1")]
    reply = http.post(CHAT, json={"model": MODEL, "messages": MESSAGES}, headers=headers)
    assert (reply.status_code, reply.json()["where"]) == (400, f"header {ROLLOUT_HEADER}")


def test_the_openai_client_gets_tool_calls_and_logprobs(client, tools):
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


def test_the_reply_holds_the_exact_tokens_their_version_and_the_raw_end(http, tools, tokenizer):
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
    of_no_rollout = ask(http, tools=tools).json()
    assert "raw_text" in choice and "raw_text" not in of_no_rollout["choices"][0]
    assert "prompt_token_ids" not in of_no_rollout
    asked_for = ask(http, tools=tools, return_token_ids=True).json()
    assert asked_for["prompt_token_ids"] == body["prompt_token_ids"]


def test_a_prompt_that_continues_the_conversation_sends_only_what_is_new_and_is_counted_so(http, tools):
    def counted() -> dict[str, int]:
        (model,) = http.get("/v1/models").json()["data"]
        return model["conversations"]

    before = counted()
    first = ask(http, rollout="c", tools=tools).json()
    message = first["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "tree 3"}
    longer = [*MESSAGES, message, result]
    second = ask(http, rollout="c", tools=tools, messages=longer).json()
    seen = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    assert (first["prompt_ids_reused"], second["prompt_ids_reused"]) == (0, len(seen))
    ask(http, rollout="c", tools=tools, messages=[*MESSAGES, result])
    ask(http, tools=tools)  # of no rollout, so of no conversation
    after = counted()
    changed = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    # The template writes the call with other spaces than the chain; its tokens are as they are tokenised.
    drift = {"drift_checked": 1, "drift_text": 1}
    assert changed == {"prefix_extended": 1, "prefix_broken/fresh": 1, **drift}

    ask(http, rollout="d", tools=tools)
    full = ask(http, rollout="d", tools=tools, messages=longer, return_token_ids=True).json()
    assert full["prompt_token_ids"] == seen + second["prompt_token_ids"] and full["prompt_ids_reused"] == 0
    # the same prompt once more does not continue the last answer
    for rollout in ("d", "another"):
        assert ask(http, rollout=rollout, tools=tools, messages=longer).json()["prompt_ids_reused"] == 0


def test_a_call_that_cannot_be_read_comes_back_as_text_with_the_reason(http: httpx.Client):
    choice = ask(http).json()["choices"][0]  # no tools are offered, so the short form means nothing
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == "<|call|> do sleep"
    assert "expected a tool's name" in choice["message"]["tool_call_error"]


def test_tool_choice_none_hides_the_tools(http: httpx.Client, tools: list[dict[str, object]]):
    assert "tool_calls" not in ask(http, tools=tools, tool_choice="none").json()["choices"][0]["message"]


def test_models_are_listed_and_retrieved_with_the_version_that_serves(client: openai.OpenAI):
    (model,) = client.models.list().data
    assert (model.id, model.policy_version, model.max_model_len) == (MODEL, 4, MAX_MODEL_LEN)
    assert len(model.chat_template) == 12
    assert client.models.retrieve(MODEL) == model, "also where its name has a slash"
    with pytest.raises(openai.NotFoundError, match="Did you mean 'job/actor'"):
        client.models.retrieve("job/actr")


def test_what_clients_send_that_changes_nothing_is_taken(client: openai.OpenAI, http: httpx.Client):
    own = {"user": "u", "metadata": {"a": "b"}, "store": False, "parallel_tool_calls": True, "n": 1}
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, **own)
    again = [*MESSAGES, answer.choices[0].message.model_dump(), {"role": "user", "content": "wood 3"}]
    assert ask(http, messages=again).status_code == 200
    developer = [{**MESSAGES[0], "role": "developer"}, MESSAGES[1]]
    prompts = [ask(http, messages=m, return_token_ids=True).json() for m in (MESSAGES, developer)]
    assert prompts[0]["prompt_token_ids"] == prompts[1]["prompt_token_ids"], "the system's, in a newer word"


def test_without_the_key_nothing_is_served(served: Served):
    with httpx.Client(base_url=served.url) as http:
        for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
            for method, path in (("GET", "/v1/models"), ("POST", CHAT)):
                reply = http.request(method, path, headers=header)
                assert reply.status_code == 401 and KEY not in reply.text
                assert "TURNWISE_API_KEY, or the variable that --api-key-env names" in reply.text
                assert reply.headers["content-type"] == "application/problem+json"
                assert reply.json()["error"]["code"] == reply.json()["code"] == "invalid_api_key"
                assert reply.json()["error"]["type"] == "authentication_error"
    with (
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError, match="another key was given"),
    ):
        stranger.models.list()


def test_a_gateway_without_a_key_cannot_be_made(tokenizer: PreTrainedTokenizerFast, model: PreTrainedModel):
    with pytest.raises(ValueError, match="needs a key"):
        create_gateway({MODEL: ServedPolicy(LocalEngine(model, stop_ids=[]), tokenizer)}, key="")


def test_a_full_context_is_refused_with_the_counts(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=MAX_MODEL_LEN)
    assert caught.value.code == "context_length_exceeded"
    long = [{"role": "user", "content": "wood " * 300}]
    with pytest.raises(openai.BadRequestError, match=f"maximum context length is {MAX_MODEL_LEN} tokens"):
        client.chat.completions.create(model=MODEL, messages=long)


def test_a_job_may_allow_less_than_the_model_holds_and_no_more(http: httpx.Client):
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
    problem = ask(http, max_tokens=MAX_MODEL_LEN, max_model_length=10 * MAX_MODEL_LEN).json()
    assert problem["max_model_len"] == MAX_MODEL_LEN and "(the model's own)" in problem["detail"]
    # without max_tokens the room below the limit of the job is used
    assert ask(http, max_model_length=prompt + 1).json()["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("changes", "status", "where"),
    [
        ({"n": 0}, 400, "n"),
        ({"model": "job/actr"}, 404, "model"),
        ({"temprature": 1}, 400, "temprature"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, 400, "chat_template_kwargs"),
        ({"temperature": 1e-9}, 400, "temperature"),
        ({"padding": "x" * 200_000}, 413, "body"),
    ],
)
def test_bad_input_is_a_problem_with_its_place(http, changes, status, where):
    reply = ask(http, **changes)
    problem = reply.json()
    assert (reply.status_code, problem["status"], problem["where"]) == (status, status, where)
    Problem.model_validate({key: value for key, value in problem.items() if key != "error"})
    assert problem["detail"] in problem["error"]["message"]
    assert problem["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b'{"temperature": NaN}', b'"\\ud800"'])
def test_a_body_that_is_no_request_is_refused(http: httpx.Client, body: bytes):
    assert http.post(CHAT, content=body).status_code == 400


def test_a_body_without_a_declared_length_is_bounded_too(http: httpx.Client):
    chunks = (b"x" * 10_000 for _ in range(20))
    assert http.post(CHAT, content=chunks).json()["code"] == "body_too_large"


def test_unknown_routes_and_methods_answer_in_the_same_shape(http: httpx.Client):
    nothing = http.get("/v1/nothing").json()
    assert nothing["code"] == "not_found" and f"POST {CHAT}" in nothing["hint"]
    refused = http.get(CHAT)
    assert refused.status_code == 405 and refused.json()["code"] == "method_not_allowed"
    assert refused.headers["content-type"] == "application/problem+json"


def test_a_negative_seed_as_openai_allows_it_is_taken(http: httpx.Client):
    replies = [ask(http, temperature=1, seed=-1).json()["choices"] for _ in range(2)]
    assert replies[0] == replies[1]
