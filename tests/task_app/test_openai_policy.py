"""OpenAIAgentPolicy against a server on a real port: what is asked where, what is read, what goes wrong."""

import asyncio
import json
import time
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from pydantic import SecretStr, ValidationError
from structlog.testing import capture_logs

from service_kit.http_client import HttpClient
from shared_schemas.chat import ROLLOUT_HEADER
from shared_schemas.messages import Message
from shared_schemas.task_definition import TaskDefinitionModel
from shared_schemas.trajectory import Sampling
from task_app.episode.actions import NO_TOOL_CALL
from task_app.episode.worker import RLRolloutWorker
from task_app.errors import ContextLengthExceeded, HostNotAllowed, InvalidRequest, PolicyUnavailable
from task_app.policies.openai import OpenAIAgentPolicy, decision_seed
from task_app.policies.openai_config import OpenAIConfig, chat_completions_url
from task_app.policies.replies import WITHHELD, retry_after_s
from task_app.protocols import PolicyObservation
from tests.task_app.counting import CountingEnvironment, rollout, running_app
from tests.task_app.fake_inference import calling, completion, fake_inference, raw, status, tokens
from tests.task_app.rollout_client import accept, play

SEEN = PolicyObservation((Message(role="user", content="hp9"),), {})
TOOLS = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}]
SENT = {"model": "job/actor", "messages": [{"role": "user", "content": "hp9"}], "tools": TOOLS}
QUICK = {"max_attempts": 2, "retry_budget_s": 2.0}


@asynccontextmanager
async def asking(
    *answers, key=None, silent=False, path="", max_reply_bytes=1 << 20, clock=time.monotonic, **config
):
    """A policy and the server that it asks."""
    async with fake_inference(*answers, silent=silent) as fake, HttpClient() as client:
        yield (
            fake,
            OpenAIAgentPolicy(
                OpenAIConfig(inference_url=fake.url + path, model="job/actor", **{**QUICK, **config}),
                client=client,
                allowed_hosts=["127.0.0.1"],
                rollout_id="run/train/0/1/2",
                inference_key=key and SecretStr(key),
                max_reply_bytes=max_reply_bytes,
                clock=clock,
            ),
        )


async def answer_to(*answers, **options):
    async with asking(*answers, **options) as (_, policy):
        return await policy.get_action(SEEN, TOOLS)


async def test_what_is_sent_and_that_nothing_is_that_is_off():
    options = {"temperature": 0.7, "top_k": 5, "seed": 4}
    async with asking(calling("a"), key="k-1", path="/v1?cid=3", **options) as (fake, policy):
        await policy.get_action(SEEN, TOOLS)
    assert fake.paths == ["/v1/chat/completions?cid=3"]
    sampling = {"temperature": 0.7, "top_p": 1.0, "top_k": 5, "max_tokens": 64, "seed": decision_seed(4, 1)}
    assert fake.bodies == [SENT | sampling | {"tool_choice": "auto", "return_token_ids": True}]
    assert fake.headers[0]["authorization"] == "Bearer k-1"
    assert fake.headers[0][ROLLOUT_HEADER.lower()] == "run/train/0/1/2"
    async with asking(calling("a"), ask_token_ids=False) as (fake, policy):
        await policy.get_action(SEEN, None)
    assert set(fake.bodies[0]) == {"model", "messages", "temperature", "top_p", "max_tokens"}
    assert "authorization" not in fake.headers[0]


async def test_a_third_party_server_is_asked_in_its_own_words():
    async with asking(
        calling("a"),
        ask_token_ids=False,
        seed=4,
        max_tokens_name="max_completion_tokens",
        leave_out=["temperature", "top_p", "seed", "tool_choice"],
        extra_body={"reasoning_effort": "low"},
    ) as (fake, policy):
        _, _, log_probs, _ = await policy.get_action(SEEN, TOOLS)
    assert fake.bodies == [SENT | {"max_completion_tokens": 64, "reasoning_effort": "low"}]
    assert ROLLOUT_HEADER.lower() not in fake.headers[0]
    assert log_probs["sampling"] is None  # the server's own temperature is unknown
    _, _, log_probs, _ = await answer_to(calling("a"), seed=4, leave_out=["seed"])
    assert log_probs["sampling"] == Sampling(seed=None), "what was not sent is not recorded"


@pytest.mark.parametrize("key", ["temperature", "messages", "stream", "logprobs", "max_completion_tokens"])
def test_what_the_policy_sets_cannot_be_set_past_it(key):
    with pytest.raises(ValidationError, match=f"'{key}'"):
        OpenAIConfig(inference_url="http://h", model="m", extra_body={key: 1})


async def test_a_server_that_repeats_the_key_does_not_get_it_recorded():
    key = "sk-very-secret-0123456789"
    message = {"content": f"You sent Bearer {key}."}
    action, raw_output, _, _ = await answer_to(completion(message), key=key)
    assert raw_output == action["content"] == "You sent Bearer [key]."
    assert (await answer_to(completion({"content": "EMPTY"}), key="EMPTY"))[1] == "EMPTY"  # no secret


async def test_the_key_of_one_policy_never_travels_with_another_on_the_same_session():
    async with fake_inference(calling("a")) as fake, HttpClient() as client:
        config = OpenAIConfig(inference_url=fake.url, model="m")
        for key in (SecretStr("k-1"), None):
            policy = OpenAIAgentPolicy(config, client=client, allowed_hosts=["127.0.0.1"], inference_key=key)
            await policy.get_action(SEEN)
    assert [headers.get("authorization") for headers in fake.headers] == ["Bearer k-1", None]


def test_each_decision_has_a_sampling_seed_of_its_own():
    seeds = [decision_seed(seed, turn) for seed in range(20) for turn in range(1, 21)]
    assert len(set(seeds)) == 400
    assert all(0 <= seed < 2**31 - 1 for seed in seeds)
    assert decision_seed(1, 12) != decision_seed(11, 2)
    assert decision_seed(7, 3) == 396149541, "one that changes gives every user other samples of the same job"


async def test_the_exact_tokens_of_our_gateway_are_read():
    first = calling("a", **tokens([1, 2, 3], 0, [7, 8]))
    second = calling("a", **tokens([9], 5, [7]))
    async with asking(first, second, seed=1) as (fake, policy):
        await policy.get_action(SEEN, TOOLS)
        action, raw_output, log_probs, value = await policy.get_action(SEEN, TOOLS)
    assert "return_token_ids" not in fake.bodies[1]
    assert action["tool_calls"] == [{"id": "call_7", "name": "add", "arguments": '{"names": ["a"]}'}]
    assert (raw_output, value) == ("", None)
    assert log_probs == {
        "prompt_ids_reused": 5,
        "prompt_token_ids": (9,),
        "token_ids": (7,),
        "logprobs": (-0.5,),
        "finish_reason": "length",
        "versions": ((0, 3),),
        "sampling": Sampling(seed=decision_seed(1, 2)),
        "model": "job/actor",
        "prompt_tokens": 4,
        "completion_tokens": 2,
    }


async def test_several_calls_of_a_message_are_one_action():
    given = [("add", "{"), ("other", "{}"), ("add", {"n": 1})]
    calls = [{"id": "", "type": "function", "function": {"name": n, "arguments": a}} for n, a in given]
    action, raw_output, _, _ = await answer_to(completion({"content": "ok", "tool_calls": [*calls, 3]}))
    read = [(one["name"], one["arguments"]) for one in action["tool_calls"]]
    assert read == [("add", "{"), ("other", "{}"), ("add", '{"n": 1}'), ("", "")]
    assert raw_output == "ok"


async def test_a_single_call_has_the_form_of_source_2_and_keeps_the_sampled_text():
    """Source 2, Task 2.2: {"type": "tool_call", "name": "tool_name", "arguments": {...}}."""
    sampled = '{"names":  ["a"]}'  # the next prompt has to repeat these two spaces
    call = {"id": "7", "type": "function", "function": {"name": "add", "arguments": sampled}}
    answer = completion({"content": None, "tool_calls": [call]})
    action, _, _, _ = await answer_to(answer)
    assert (action["type"], action["name"], action["arguments"]) == ("tool_call", "add", {"names": ["a"]})
    step = await recorded(answer)
    assert step.action_taken == {
        "type": "tool_call", "name": "add", "arguments": {"names": ["a"]}, "content": "",
    }  # fmt: skip
    assert (step.tool_calls[0].id, step.tool_calls[0].function.arguments) == ("7", sampled)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": "I would move."}, "I would move."),
        ({"content": None}, ""),
        ({}, ""),
        ({"content": None, "refusal": "I cannot."}, "I cannot."),
        ({"content": [{"type": "text", "text": "in "}, {"type": "text", "text": "parts"}]}, "in parts"),
        ({"content": "x", "tool_calls": []}, "x"),
        ({"content": "x", "tool_calls": "add"}, "x"),
    ],
)
async def test_a_message_without_a_call_is_text_with_a_reason(message, text):
    action, raw_output, _, _ = await answer_to(completion(message))
    assert action == {"type": "text", "content": text, "invalid_reason": NO_TOOL_CALL}
    assert raw_output == text


@pytest.mark.parametrize("tools", [[], None])
async def test_where_no_tool_is_offered_words_are_not_told_to_miss_a_call(tools):
    async with asking(completion({"content": "four"})) as (_, policy):
        action, _, _, _ = await policy.get_action(SEEN, tools)
    assert action == {"type": "text", "content": "four"}
    withheld = completion({"content": None}, choice={"finish_reason": "content_filter"})
    async with asking(withheld) as (_, policy):
        action, _, _, _ = await policy.get_action(SEEN, tools)
    assert action == {"type": "text", "content": "", "invalid_reason": WITHHELD}
    assert (await answer_to(withheld))[0] == action, "also where tools are offered"


async def test_the_raw_text_of_our_gateway_is_what_the_model_wrote():
    for raw_text in ("<call>add a</call>", ""):
        action, raw_output, _, _ = await answer_to(calling("a", choice={"raw_text": raw_text}))
        assert (raw_output, action["content"]) == (raw_text, "")


@pytest.mark.parametrize("finish_reason", ["length", "content_filter", "stop", None])
async def test_how_the_reply_ended_is_kept_without_any_tokens(finish_reason):
    choice = {"finish_reason": finish_reason}
    _, _, log_probs, _ = await answer_to(completion({"content": "x"}, choice=choice))
    assert log_probs["finish_reason"] == finish_reason
    step = await recorded(completion({"content": "x"}, choice=choice))
    assert (step.policy_logprobs, step.step_info.finish_reason) == (None, finish_reason)
    called, _, _, _ = await answer_to(calling("a", choice=choice))
    assert called["type"] == "tool_call", "a call counts however the reply ended"


async def recorded(*answers):
    """The first step of an episode that asks a server of this kind."""
    async with asking(*answers) as (_, policy):
        worker = RLRolloutWorker(
            task_definition=TaskDefinitionModel(resource_type="counting", max_episode_steps=2),
            environment=CountingEnvironment(),
            agent_policy=policy,
            seed=1,
        )
        steps, _, _ = await worker.run_episode()
    assert len(steps) == 2
    return steps[0]


GOOD = tokens([1], 0, [7, 8])


def spoilt(level, **changes):
    """A reply with exact tokens, but for what a test spoils in it."""
    return calling("a", **{**GOOD, level: {**GOOD[level], **changes}})


def told_later(seconds):
    return lambda asked: web.json_response({}, status=429, headers={"Retry-After": seconds})


SILENT = {"silent": True, "request_timeout_s": 0.05}
# Every wrong field of a reply is in tests/service_kit/test_wrong_replies.py.
FAILURES = [
    ("no JSON", [raw("<html>")], {}, "protocol", "answered nonsense", 1),
    ("deeply nested", [raw("[" * 100_000)], {}, "protocol", "answered nonsense", 1),
    ("other lengths", [spoilt("choice", token_logprobs=[-1.0])], {}, "protocol", "answered nonsense", 1),
    ("unseen ids", [calling("a", **tokens([9], 5, [7]))], {}, "protocol", "5 ids reused of 0", 1),
    ("endless", [raw("x" * 5_000)], {"max_reply_bytes": 1_000}, "protocol", "more than 1000 bytes", 1),
    ("busy", [status(503, {})], {}, "unavailable", "status 503", 2),
    ("asks for too long", [told_later("3"), calling("a")], {}, "unavailable", "status 429", 1),
    ("slow", [], SILENT, "unavailable", r"no answer within 0.05 s", 2),
    ("refuses", [status(404, {"error": {"message": "no model"}})], {}, "refused", "no model", 1),
]


@pytest.mark.parametrize(("answers", "options", "code", "words", "requests"), [one[1:] for one in FAILURES],
                         ids=[one[0] for one in FAILURES])  # fmt: skip
async def test_a_server_that_cannot_be_used_fails_with_its_code(answers, options, code, words, requests):
    async with asking(*answers, **options) as (fake, policy):
        with pytest.raises(PolicyUnavailable, match=words) as caught:
            await policy.get_action(SEEN, TOOLS)
    assert (caught.value.code, len(fake.bodies)) == (f"inference_{code}", requests)


@pytest.mark.parametrize("code", [429, 500, 503])
async def test_later_is_tried_again_and_then_asks_for_the_whole_prompt(code):
    async with asking(calling("a"), status(code, {"error": "busy"}), calling("b")) as (fake, policy):
        await policy.get_action(SEEN, TOOLS)
        action, _, _, _ = await policy.get_action(SEEN, TOOLS)
    assert json.loads(action["tool_calls"][0]["arguments"]) == {"names": ["b"]}
    assert [body.get("return_token_ids") for body in fake.bodies] == [True, None, True]


async def test_a_wait_counts_against_what_is_left_of_the_budget():
    later = told_later("0")
    async with asking(later, later, calling("a"), max_attempts=3) as (fake, policy):
        await policy.get_action(SEEN, TOOLS)
    assert len(fake.bodies) == 3, "who says when is asked then"
    # by the policy's clock all of its 60 seconds are gone when the second answer comes
    seconds = iter([0.0, 0.0, 60.5])
    budget = {"max_attempts": 5, "retry_budget_s": 60.0, "clock": lambda: next(seconds)}
    async with asking(later, later, calling("a"), **budget) as (fake, policy):
        with pytest.raises(PolicyUnavailable, match="status 429"):
            await policy.get_action(SEEN, TOOLS)
    assert len(fake.bodies) == 2


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("7", 7.0), (" 0 ", 0.0), (None, None), ("", None), ("-1", None), ("nan", None), ("1e9", None),
     ("Fri, 31 Dec 1999 23:59:59 GMT", None), ("9" * 30, None), ("²", None)],
)  # fmt: skip
def test_retry_after_is_read_as_seconds_alone(header, seconds):
    assert retry_after_s(header) == seconds


async def test_a_server_that_is_killed_in_its_reply_is_asked_the_same_again_and_nothing_is_lost():
    body = b'{"choices": [{"message": {"content": "whole"}}]}'
    parts = [body[:20], body]
    asked = []

    async def answer(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        asked.append(json.loads(await reader.readexactly(int(head.rpartition(b": ")[2]))))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), parts.pop(0)))
        writer.close()  # in the middle of the first reply

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    retries = []
    async with server, HttpClient() as client:
        config = OpenAIConfig(inference_url=url, model="m", seed=1, **QUICK)
        policy = OpenAIAgentPolicy(
            config, client=client, on_retry=lambda: retries.append(policy.pending_failure)
        )
        _, text, _, _ = await policy.get_action(SEEN)
    assert (text, len(retries), policy.pending_failure) == ("whole", 1, None)
    assert retries[0] is not None, "an outage is told while it lasts, and ends with the answer"
    assert len(asked) == 2 and asked[0] == asked[1]


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"code": "context_length_exceeded", "message": "9 > 8"}},
        {"code": "context_length_exceeded", "detail": "9 > 8", "status": 400},
        {"error": {"code": None, "message": "This model's maximum context length is 8 tokens."}},
    ],
)
async def test_a_prompt_that_does_not_fit_is_told_apart(body):
    with pytest.raises(ContextLengthExceeded):
        await answer_to(status(400, body))


async def test_what_is_left_of_an_episode_bounds_a_decision_and_is_recorded():
    async with asking(calling("a"), max_tokens=64) as (fake, policy):
        for left, sampled in ((5, 5), (100, 64), (None, 64)):
            seen = PolicyObservation(SEEN, {}, max_tokens=left)
            _, _, log_probs, _ = await policy.get_action(seen, TOOLS)
            assert fake.bodies[-1]["max_tokens"] == log_probs["sampling"].max_tokens == sampled


async def test_the_limit_of_the_job_goes_to_a_gateway_of_ours_alone():
    async with asking(calling("a"), max_model_length=4096) as (fake, policy):
        await policy.get_action(SEEN, TOOLS)
        assert (fake.bodies[0]["max_model_length"], policy.max_model_length) == (4096, 4096)
    async with asking(calling("a"), max_model_length=4096, ask_token_ids=False) as (fake, policy):
        await policy.get_action(SEEN, TOOLS)
        assert "max_model_length" not in fake.bodies[0]


def used(prompt: int, answer: int, reasoning: int = 0):
    details = {"completion_tokens_details": {"reasoning_tokens": reasoning}}
    usage = {"prompt_tokens": prompt, "completion_tokens": answer, **details}
    return completion({"role": "assistant", "content": "hm"}, reply={"usage": usage})


ANSWERED = (*SEEN, Message(role="assistant", content="hm"), Message(role="user", content="on"))


@pytest.mark.parametrize(
    ("first", "then", "refused"),
    [
        (used(20, 10), ANSWERED, False),  # 20 + 10 + 10 = 40: all of it fits
        (used(20, 11), ANSWERED, True),
        (used(20, 30, reasoning=20), ANSWERED, False),  # what was thought is not sent back
        (used(20, 11), (Message(role="user", content="[deleted]"), *ANSWERED[1:]), False),  # untold
        (used(20, 11), SEEN, False),  # the same prompt again is one that did fit
        (completion({"role": "assistant", "content": "hm"}, reply={"usage": None}), ANSWERED, False),
    ],
)
async def test_towards_another_server_a_prompt_that_only_grew_is_checked_by_the_last_counts(
    first, then, refused: bool
):
    limits = {"max_model_length": 40, "max_tokens": 10, "ask_token_ids": False}
    async with asking(first, **limits) as (fake, policy):
        await policy.get_action(SEEN, TOOLS)
        if refused:
            with pytest.raises(ContextLengthExceeded, match=r"at least 31 tokens .* = 41, but .* is 40"):
                await policy.get_action(PolicyObservation(then, {}), TOOLS)
        else:
            await policy.get_action(PolicyObservation(then, {}), TOOLS)
        assert len(fake.bodies) == (1 if refused else 2), "nothing is asked in vain"


HERE = ("127.0.0.1", "localhost", "::1")


@pytest.mark.parametrize(
    ("given", "full"),
    [
        ("http://127.0.0.1:1", "http://127.0.0.1:1/v1/chat/completions"),
        ("http://127.0.0.1:1/", "http://127.0.0.1:1/v1/chat/completions"),
        ("http://127.0.0.1:1/v1", "http://127.0.0.1:1/v1/chat/completions"),
        ("http://127.0.0.1:1/v1/", "http://127.0.0.1:1/v1/chat/completions"),
        ("http://127.0.0.1:1/v1/chat", "http://127.0.0.1:1/v1/chat/completions"),
        ("http://127.0.0.1:1/v1/chat/completions", "http://127.0.0.1:1/v1/chat/completions"),
        ("http://127.0.0.1:1/x?cid=7&a=b", "http://127.0.0.1:1/x/v1/chat/completions?cid=7&a=b"),
        ("https://LOCALHOST/v1#part", "https://LOCALHOST/v1/chat/completions"),
        ("http://[::1]:9", "http://[::1]:9/v1/chat/completions"),
        ("http://gpu-7:8000", "http://gpu-7:8000/v1/chat/completions"),
    ],
)
def test_a_base_url_is_completed_and_its_query_kept(given, full):
    assert chat_completions_url(given, allowed_hosts=(*HERE, "gpu-7:8000")) == full


@pytest.mark.parametrize(
    "given",
    [
        "http://169.254.169.254/latest", "http://127.0.0.1.evil.example/", "http://localhost.evil.example",
        "http://evil.example/?h=localhost", "http://evil.example#localhost", "http://0.0.0.0:1",
        # Other spellings of loopback: an operator who lists none of them allows none of them.
        "http://2130706433/", "http://0x7f000001/", "http://017700000001/", "http://127.1/",
        "http://[::ffff:127.0.0.1]/", "http://[0:0:0:0:0:0:0:1]/", "http://[::1%25eth0]/",
        "http://localhost./", "http://①27.0.0.1/",
        # What another parser might take for a listed host.
        "http://127.0.0.1\t.evil.example", "http://127.0.0.1\\.evil.example",
        "http://127.0.0.1%2eevil.example", "http://evil.example#@127.0.0.1", "http://evil.example?@127.0.0.1",
        "http://gpu-7:8001",
    ],
)  # fmt: skip
def test_a_host_that_is_not_listed_is_refused(given):
    with pytest.raises(HostNotAllowed, match="not on this task app's list"):
        chat_completions_url(given, allowed_hosts=(*HERE, "gpu-7:8000"))


@pytest.mark.parametrize(
    "given",
    ["", "localhost:1", "ftp://localhost", "file:///etc/passwd", "http://", "http://localhost:x", "http://[::1",
     "http://localhost:0", " http://localhost", "http://user:secret@localhost", "http://[::1]evil.example/",
     "http://127.0.0.1\\@evil.example", "http:127.0.0.1", "http://127.0.0.1:65536"],
)  # fmt: skip
def test_what_is_no_url_is_refused_without_repeating_it(given):
    with pytest.raises(InvalidRequest) as caught:
        chat_completions_url(given, allowed_hosts=HERE)
    assert "secret" not in caught.value.detail


KEY = "sk-a-very-secret-key-0123456789"


LEAK = f"Incorrect API key provided: {KEY[:8]}*****{KEY[-4:]}, that is {KEY}."
REFUSED_KEY = {"code": "invalid_api_key", "message": LEAK}
# Near the cut at 300 characters: cut before replacing, half of the key would stay.
REPEATED_KEY = {"code": f"bad {KEY}", "message": f"you sent {KEY} {'x' * 250} {KEY} again"}
ONLY_THE_CODE = "the inference server refused: status {} invalid_api_key"


@pytest.mark.parametrize(
    ("code", "error", "told"),
    [
        (401, REFUSED_KEY, ONLY_THE_CODE.format(401)),
        (403, REFUSED_KEY, ONLY_THE_CODE.format(403)),
        (400, REPEATED_KEY, "bad [key] you sent [key] x"),
        (503, REPEATED_KEY, "bad [key] you sent [key] x"),
    ],
)
async def test_of_a_refused_key_only_the_code_is_kept_and_one_that_is_repeated_is_replaced(code, error, told):
    with capture_logs() as logged:
        async with fake_inference(status(code, {"error": error})) as fake, running_app() as client:
            policy = {"policy_name": "openai", **fake.asked_by(max_attempts=2), "inference_key": KEY}
            failure = (await play(client, rollout("a", policy=policy)))["a"].failure
    written = str(logged)
    assert "rollout_failed" in written and told in failure.detail
    assert failure.detail == told or error is REPEATED_KEY
    assert not any(part in failure.detail + written for part in (KEY, KEY[:8], KEY[-4:]))


@pytest.mark.parametrize("key", ["k" * 501, "clé", "two\nlines", "nul\0"])
async def test_a_key_that_fits_no_header_is_refused_and_not_shown(client, key):
    policy = {"policy_name": "planned", "inference_key": key}
    answers = {
        "rollouts.0.policy.inference_key": await accept(client, rollout("a", policy=policy)),
        "inference_key": await client.post("/policy/create", json=policy),
    }
    for where, answer in answers.items():
        # U+0000 may stand nowhere in a body, and is refused before anybody reads what it belongs to.
        assert (answer.status_code, answer.json()["where"]) == (422, "body" if "\0" in key else where)
        assert key not in answer.json()["detail"]
