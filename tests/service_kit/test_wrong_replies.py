"""Every field that a client reads with every wrong value: an error of ours names it, or it is unread."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any

import pytest
from pydantic import SecretStr

from service_kit.errors import ServiceError
from service_kit.replies import ReplyInvalid
from shared_schemas.replay import ReplayRequest
from shared_schemas.rollouts import RolloutRequest
from shared_schemas.trajectory import Sampling
from tests.service_kit.clients import CLIENTS, Ask, app, policy, remote, sample, terminal, vllm
from tests.service_kit.wrong_replies import Reading, served, wrong_replies
from tests.trainer_backend.collect.scripted_task_app import wrap
from trainer_backend.collect.arrival import WRONG_ROLLOUT, checked, read_page
from trainer_backend.collect.client import TaskAppClient
from trainer_backend.collect.dispatcher import Dispatcher, Queue
from trainer_backend.core.segments import build_segments
from trainer_backend.errors import TaskAppError
from trainer_backend.inference.vllm_engine import VllmEngine
from trainer_backend.learner.scoring import refuse_unknown_ids
from trainer_backend.terminal.jobs_client import JobsReply, LogReply

GENERATE, COMPLETIONS, CHAT = "/inference/v1/generate", "/v1/completions", "/v1/chat/completions"


async def become_fit(engine: VllmEngine) -> str:
    line = await engine.refuse_unfit()
    await engine.check_receiver()
    return line


async def learn_from(client: TaskAppClient) -> Any:
    """A page as the trainer takes it: each rollout is compared with its request, and cut into segments."""
    page = await client.poll("run", None, wait_s=0)
    if not page.rollouts:
        raise TaskAppError("GET /rollouts: rollouts: none")
    for rollout in page.rollouts:
        if rollout.failure is not None and rollout.failure.code == WRONG_ROLLOUT:
            raise TaskAppError(rollout.failure.detail)
        answer = checked(REQUEST, rollout)
        if answer.failure is not None and rollout.failure is None:
            raise TaskAppError(f"GET /rollouts: {answer.failure.detail}")
        if answer.trajectory is not None:
            where = f"GET /rollouts: {rollout.rollout_id}"
            refuse_unknown_ids(build_segments(answer.trajectory.steps, rollout_id=where), rows=10)
    return page


def tokens(*ids: int) -> list[dict[str, Any]]:
    tops = [{"token_id": 7, "logprob": -0.5}]
    return [{"logprob": -0.5, "top_logprobs": tops} for _ in ids]


CHOICE = {
    "token_ids": [7, 9],
    "logprobs": {"content": tokens(7, 9)},
    "finish_reason": "stop",
    "weight_versions": [{"start": 0, "version": ""}, {"start": 1, "version": ""}],
}
USAGE = {"prompt_tokens_details": {"cached_tokens": 1}}
FIT = {
    "/version": {"version": "0.32.0"},
    "/resume": {},
    "/v1/models": {"data": [{"id": "m", "max_model_len": 64}]},
    "/weight_info": {},
    "/collective_rpc": {},
}
OPTIONAL_OF_SAMPLES = frozenset(
    {"request_id", "top_logprobs", "usage", "prompt_tokens_details", "cached_tokens", "weight_versions"}
)
REQUEST = RolloutRequest.model_validate(
    {
        "rollout_id": "r", "run_id": "run", "group_id": "g", "start": {"seed": 3},
        "env": {"env_name": "e"}, "policy": {"policy_name": "p"},
    }
)  # fmt: skip
LOGPROBS = {
    "prompt_ids_reused": 0, "prompt_token_ids": [1, 2], "token_ids": [3, 4], "logprobs": [-0.5, -0.25],
    "finish_reason": "stop", "versions": [[0, 1], [1, 2]],
}  # fmt: skip
STEP = {
    "turn": 1,
    "observation_data": {
        "messages": [{"role": "user", "content": "hi"}], "reward_last_step": 0.0,
        "achievements_counts": {"a": -1},
    },
    "next_observation": {"reward_last_step": 0.5},
    "action_taken": {"type": "text"},
    "policy_logprobs": LOGPROBS,
    "sampling": {"temperature": 1.0, "top_k": 0, "max_tokens": 8},
    "env_rewards": [0.5],
    "reward_parts": [{"source": "tool", "value": 1.0}],
    "metadata": {
        "decision_rewards": {"turn": 1, "ach_delta": 1, "unique_delta": 1, "all": ["a"], "unique": ["a"]}
    },
    "step_info": {"policy_s": 0.5, "prompt_tokens": 2},
    "is_done": True,
}  # fmt: skip
EPISODE = {
    "env_name": "e", "policy_name": "p", "seed": 3, "steps": [STEP], "outcome_reward": 1.0,
    "outcome_definition": "d", "env_steps": 1, "terminated": True, "truncated": False,
    "stop_reason": "environment_done", "wall_s": 0.5,
}  # fmt: skip
ROLLOUT = {
    "rollout_id": "r", "run_id": "run", "iteration": 0, "group_id": "g", "sibling": 0, "attempt": 0,
    "instance_id": "i", "status": "finished", "trajectory": EPISODE,
}  # fmt: skip
PAGE = {"rollouts": [ROLLOUT], "cursor": "2", "unfinished": 0, "instance_id": "i"}
OPTIONAL_OF_PAGES = frozenset(
    {
        "rollouts", "steps", "observation_data", "messages", "content", "reward_last_step", "step_info",
        "achievements_counts", "a", "next_observation", "env_rewards", "reward_parts", "metadata",
        "max_tokens", "decision_rewards", "policy_s", "prompt_tokens", "is_done", "prompt_token_ids",
        "versions", "sampling",
    }
)  # fmt: skip
PAGE_READING = Reading(
    "GET /rollouts", PAGE, OPTIONAL_OF_PAGES, ("rollouts.0.trajectory.steps.0.action_taken",)
)
CAPABILITIES = {"reward_functions": {"f": "one"}, "interactions": ["a"], "number_interactions": ["a"]}
INFO = {
    "service": {"instance_id": "i"},
    "limits": {"max_concurrent_rollouts": 4, "max_body_bytes": 100_000, "max_page_bytes": 2, "max_frames": 8},
    "capabilities": CAPABILITIES,
}
ENVIRONMENT = {
    "env_id": "e1",
    "observation": {"achievements_counts": {"a": 0}},
    "info": {"conversation": False, "takes_answers": True, "restorable": True, "state_keys": ["s"]},
}
REPLAY = {"frames": [{"turn": 0, "png": "aa"}], "snapshots": [{"turn": 0, "snapshot": "zz"}]}
PLAYED = ReplayRequest(env_name="e", seed=1, frames=(0,), snapshots=(0,))
FUNCTION = {"name": "act", "arguments": '{"a": 1}'}
MESSAGE = {
    "content": "hm", "refusal": None, "tool_calls": [{"id": "c", "type": "function", "function": FUNCTION}]
}  # fmt: skip
COUNTS = {"prompt_tokens": 3, "completion_tokens": 2, "completion_tokens_details": {"reasoning_tokens": 0}}
OWN_CHOICE = {
    "message": MESSAGE, "finish_reason": "stop", "raw_text": "raw", "sampling_finish_reason": "stop",
    "token_ids": [7, 9], "token_logprobs": [-0.5, -0.25], "versions": [[0, 3], [1, 4]],
}  # fmt: skip
PLAIN_CHOICE = {
    "message": MESSAGE,
    "finish_reason": "stop",
    "logprobs": {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -0.25}]},
}
OPTIONAL_OF_CHATS = frozenset(
    {
        "model", "usage", "content", "refusal", "message", "finish_reason", "raw_text", "prompt_ids_reused",
        "sampling_finish_reason", "prompt_token_ids", "versions", *COUNTS, "reasoning_tokens",
    }
)  # fmt: skip
CALLS = ("choices.0.message.tool_calls",)
NONSENSE = "the inference server answered nonsense"
JOB = {
    "id": "j", "name": "n", "state": "running", "started": "2026", "run_dir": "/runs/n", "detail": "d",
    "progress": {"stage": "s", "iteration": 1, "iterations": 2},
}  # fmt: skip
OPTIONAL_OF_JOBS = frozenset({"started", "run_dir", "detail", "progress", "stage", "iteration", "iterations"})


def job_reading(right: Any, *optional: str) -> Reading:
    return Reading("answers, and not as a trainer service does", right, OPTIONAL_OF_JOBS.union(optional))


def chat_reading(choice: Any, *optional: str, **more: Any) -> Reading:
    reply = {"model": "m", "choices": [choice], "usage": COUNTS, **more}
    return Reading(NONSENSE, reply, OPTIONAL_OF_CHATS.union(optional, ["choices"]), CALLS)


SCORE = {"prompt_logprobs": [None, {"3": {"logprob": -1.0}}, {"4": {"logprob": -2.0}}]}
COMPLETION = {
    "choices": [
        {
            "prompt_token_ids": [2, 3], "token_ids": [7, 9], "finish_reason": "stop",
            "logprobs": {"token_logprobs": [-0.5, -0.25]},
        }
    ]
}  # fmt: skip
THEIRS = "the server of the fixed policy"
READINGS: dict[str, tuple[str, Ask, Reading]] = {
    "vLLM, a sample": (
        GENERATE,
        sample(),
        Reading(GENERATE, {"request_id": "r", "choices": [CHOICE], "usage": USAGE}, OPTIONAL_OF_SAMPLES),
    ),
    "vLLM, a scored prompt": (GENERATE, vllm(lambda one: one.score([2, 3, 4])), Reading(GENERATE, SCORE)),
    **{
        f"vLLM, {route}": (route, vllm(become_fit), Reading(route.split("/")[-1], FIT[route]))
        for route in FIT
    },
    "a fixed policy, a sample": (
        COMPLETIONS,
        remote(lambda one: one.generate([2, 3], Sampling(max_tokens=4), request_id="r")),
        Reading(THEIRS, COMPLETION, frozenset({"choices"})),
    ),
    "task app, /info": (
        "/info",
        app(lambda one: one.about()),
        Reading("GET /info", INFO, frozenset({*INFO["limits"], "capabilities", *CAPABILITIES, "f"})),
    ),
    "task app, a page": ("/rollouts", app(learn_from), PAGE_READING),
    "task app, accepted": (
        "/rollouts",
        app(lambda one: one.submit([REQUEST])),
        Reading("POST /rollouts", {"accepted": ["r"], "known": [], "instance_id": "i"}),
    ),
    "task app, acknowledged": (
        "/rollouts/ack",
        app(lambda one: one.ack("run", ["a"])),
        Reading("POST /rollouts/ack", {"acked": ["a"], "unknown": ["b"]}),
    ),
    "task app, an environment": (
        "/env/create",
        app(lambda one: one.create("env", {})),
        Reading(
            "POST /env/create", ENVIRONMENT,
            frozenset({"observation", "achievements_counts", "a", "info", *ENVIRONMENT["info"]}),
        ),
    ),
    "task app, frames": (
        "/replay",
        app(lambda one: one.replay(PLAYED)),
        Reading("POST /replay", REPLAY, frozenset({"snapshots"})),
    ),
    "task app, snapshots": (
        "/replay",
        app(lambda one: one.snapshots(PLAYED)),
        Reading("POST /replay", REPLAY, frozenset({"frames"})),
    ),
    "task app, cancelled": (
        "/rollouts/r", app(lambda one: one.cancel("r")), Reading("DELETE /rollouts/r", {}),
    ),
    "a policy at our gateway": (
        CHAT, policy(), chat_reading(OWN_CHOICE, prompt_token_ids=[1, 2], prompt_ids_reused=1),
    ),
    "a policy at vLLM": (
        CHAT,
        policy(exact_tokens="vllm"),
        chat_reading({**PLAIN_CHOICE, "token_ids": [7, 9]}, prompt_token_ids=[1, 2]),
    ),
    "a policy at another server": (
        CHAT,
        policy(ask_token_ids=False, logprobs=True),
        chat_reading(PLAIN_CHOICE, "logprobs", "content"),
    ),
    "a policy, tokens": ("/tokenize", policy(counts=True), Reading(NONSENSE, {"count": 3})),
    "a policy, billed tokens": (
        CHAT, policy(counts=True, ask_token_ids=False), Reading(NONSENSE, {"usage": {"prompt_tokens": 3}}),
    ),
    "the terminal, jobs": (
        "/jobs",
        terminal(lambda one: one.get("/jobs", JobsReply)),
        job_reading({"jobs": [JOB], "next_cursor": "c"}, "jobs", "next_cursor"),
    ),
    "the terminal, a log": (
        "/jobs/j/log",
        terminal(lambda one: one.get("/jobs/j/log", LogReply)),
        job_reading({"lines": [{"time": "", "text": "t"}]}, "lines"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READINGS)
async def test_a_wrong_field_of_a_reply_is_an_error_of_ours_that_names_it(name: str, monkeypatch: Any):
    # What it samples is read in another case, and would be refused here.
    monkeypatch.setattr(VllmEngine, "_refuse_raw_logprobs", lambda engine: asyncio.sleep(0))
    route, ask, reading = READINGS[name]
    replies = {path: json.dumps(reply).encode() for path, reply in FIT.items()}
    with served(replies) as url:
        faults = await reading.find_faults(lambda body: replies.update({route: body}), lambda: ask(url))
    assert faults == [], "\n".join(faults)


BAD_TEXT = json.dumps({**ROLLOUT, "rollout_id": "s", "sibling": 1}).encode()
# By what the loss says: the text of a rollout.
LOST = {
    "rollouts.1: sibling is 'one' (str); ": BAD_TEXT.replace(b'"sibling": 1', b'"sibling": "one"'),
    "rollouts.1: seed is there twice; ": BAD_TEXT.replace(b'"seed": 3', b'"seed": 3, "seed": 4'),
    "rollouts.1: trajectory.stop_reason is ": BAD_TEXT.replace(b"environment_done", b"\\ud83d [}"),
    "rollouts.1: trajectory.env_name is ": BAD_TEXT.replace(b'"e"', b'"\xff"'),
    "rollouts.1: trajectory.steps.0.turn is ": BAD_TEXT.replace(b'"turn": 1', b'"turn": ' + b"9" * 5_000, 1),
    "rollouts.1: trajectory.wall_s is ": BAD_TEXT.replace(b'"wall_s": 0.5', b'"wall_s": what'),
    "rollouts.1: rollout_id is '' (str); ": BAD_TEXT.replace(b'"s"', b'""'),
    "rollouts.1: rollout_id is missing; ": BAD_TEXT.replace(b'"rollout_id": "s", ', b""),
    "rollouts.1: rollout_id is there twice; ": BAD_TEXT.replace(b'"s"', b'"s", "rollout_id": "t"'),
}


def build_page(*rollouts: bytes) -> bytes:
    return b'{"cursor": "2", "rollouts": [%s], "unfinished": 0, "instance_id": "i"}' % b" , ".join(rollouts)


@pytest.fixture
def collects() -> Iterator[tuple[Dispatcher, Queue, TaskAppClient, list[str]]]:
    """What has asked a task app for the rollouts r and s, and the sentences that it tells."""
    told: list[str] = []
    client = TaskAppClient("http://app", SecretStr("k"), timeout_s=30)
    dispatcher = Dispatcher(wrap([client], tell=told.append), timeout_s=30)
    queue = Queue([REQUEST, REQUEST.model_copy(update={"rollout_id": "s", "sibling": 1})])
    dispatcher.add(queue)
    dispatcher.deal()
    return dispatcher, queue, client, told


@pytest.mark.parametrize("detail", LOST)
def test_a_rollout_of_a_wrong_form_is_lost_alone(detail: str, collects: Any):
    dispatcher, queue, client, _ = collects
    kept, lost = read_page(build_page(json.dumps(ROLLOUT).encode(), LOST[detail]), "GET /rollouts").rollouts
    assert lost.failure is not None and f"GET /rollouts: {detail}" in lost.failure.detail
    dispatcher.end(client, kept)
    dispatcher.end(client, lost)
    assert queue.failures == {WRONG_ROLLOUT: 1} and [one.rollout_id for one in queue.ended] == ["r"]
    (again,) = queue.unfinished.values()
    assert (again.request.sibling, again.request.attempt) == (1, 1)


@pytest.mark.parametrize(
    "text",
    [
        b"null",
        b'{"rollout_id": null, "run_id": "run", "sibling": 1}',
        json.dumps({**ROLLOUT, "rollout_id": "t", "sibling": "one"}).encode(),
    ],
)
def test_a_result_that_belongs_to_no_request_is_counted_and_told(text: bytes, collects: Any):
    dispatcher, queue, client, told = collects
    (lost,) = read_page(build_page(text), "GET /rollouts").rollouts
    dispatcher.end(client, lost)
    assert queue.failures == {WRONG_ROLLOUT: 1} and len(queue.unfinished) == 2
    assert told == [f"{lost.failure.detail}; no request can be found for this result"]
    dispatcher.end(client, lost)  # once more, before it is acknowledged
    assert lost.rollout_id == "" or queue.failures == {WRONG_ROLLOUT: 1}


@pytest.mark.parametrize(
    "page",
    [
        b"<html>",
        build_page(b'{"rollout_id": "r', BAD_TEXT),
        build_page(b'{"a": [1}', BAD_TEXT),
        build_page()[:-1],
    ],
)
def test_a_page_whose_rollouts_cannot_be_told_apart_says_so(page: bytes):
    with pytest.raises(ReplyInvalid, match=r"JSON is needed .* rollouts"):
        read_page(page, "GET /rollouts")


OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
# What a server sends once, and then again and again.
ENDLESS = {
    "a body of blanks": (CHUNKED, b"10000\r\n" + b" " * 65_536 + b"\r\n"),
    "comments of a stream": (CHUNKED, b"10000\r\n" + (b": " + b"x" * 1_021 + b"\n") * 64 + b"\r\n"),
    "a length that is a lie": (OK + b"Content-Length: 99999999999\r\n\r\n", b"[" * 65_536),
    "a header": (OK + b"X: ", b"x" * 65_536),
    "headers": (OK, b"X: x\r\n" * 10_000),
}
# Bytes that the kernel takes and no client reads.
IN_FLIGHT = 8 << 20


@contextmanager
def flood(first: bytes, then: bytes) -> Iterator[tuple[str, list[int]]]:
    """The URL of a server that sends this until its client leaves, and how many bytes it has sent to each."""
    sent: list[int] = []

    class Sender(BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65_536)
            sent.append(0)
            with suppress(OSError):
                self.request.sendall(first)
                while then:
                    sent[-1] += self.request.send(then)

    with ThreadingTCPServer(("127.0.0.1", 0), Sender) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", sent
        server.shutdown()


@pytest.mark.parametrize("name", CLIENTS)
async def test_an_endless_reply_is_cut_off_within_64_mib(name: str):
    for how, (first, then) in ENDLESS.items():
        if (name, how) == ("the terminal, events", "comments of a stream"):
            continue  # which keep the stream of a running job open, and are not kept
        with flood(first, then) as (url, sent), pytest.raises(ServiceError):
            await CLIENTS[name](url)
        assert sent and max(sent) <= (64 << 20) + IN_FLIGHT, how


ODD = {"": OK + b"Content-Length: 100\r\n\r\n{}", " ": b"SSH-2.0-OpenSSH_9.6\r\n"}


@pytest.mark.parametrize(
    "name", [name for name in CLIENTS if name not in ("task app, /info", "a peer", "a learner, about")]
)
async def test_a_reply_that_breaks_off_or_is_none_is_an_error_of_ours(name: str):
    for word, reply in ODD.items():
        with flood(reply, b"") as (url, _), pytest.raises(ServiceError) as caught:
            await CLIENTS[name](url)
        assert word in str(caught.value)


PROBLEM = {"type": "about:blank", "title": "t", "status": 422, "code": "c", "detail": "d", "where": "w"}


@pytest.mark.parametrize("name", CLIENTS)
async def test_an_error_of_any_form_is_an_error_of_ours_and_no_page_long(name: str):
    """Each form at several clients: most of them read errors by the same code."""
    forms = wrong_replies({**PROBLEM, "error": {"code": "c", "message": "m"}})
    replies: dict[str, bytes] = {}
    with served(replies, status=422) as url:
        for wrong in islice(forms, list(CLIENTS).index(name) % 4, None, 4):
            replies[""] = wrong.body
            with pytest.raises(ServiceError) as caught:
                await CLIENTS[name](url)
            assert len(str(caught.value)) < 4_000, wrong
