"""Disconnects and failures, where a stand-in engine and a hand-driven connection say more than a port."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from pydantic import SecretStr
from starlette.types import Message
from transformers import PreTrainedTokenizerFast

from service_kit.logs import configure_logs
from service_kit.server import Listener
from shared_schemas.trajectory import Sampling
from tests.conftest import tiny_job
from tests.trainer_backend.inference.served import StandInEngine
from trainer_backend.errors import EngineStopped, JobError
from trainer_backend.inference.actor import Extras, Generation
from trainer_backend.inference.asgi import json_response
from trainer_backend.inference.gateway_app import create_gateway
from trainer_backend.inference.reply import Choice, rollout_body
from trainer_backend.inference.served_policy import ServedPolicy
from trainer_backend.processes.gateways import gateway_listener

KEY = "the-key-of-this-job"


class Connection:
    """One POST /v1/chat/completions, its messages under the test's control."""

    def __init__(self, engine: StandInEngine, tokenizer: PreTrainedTokenizerFast) -> None:
        self.app = create_gateway({"job/actor": ServedPolicy(engine, tokenizer)}, key=SecretStr(KEY))
        self.incoming: asyncio.Queue[Message] = asyncio.Queue()
        self.sent: list[Message] = []

    async def answer(self, body: bytes) -> tuple[int, dict[str, Any]]:
        """Post a whole body; return status and body of the reply."""
        await self.incoming.put({"type": "http.request", "body": body})
        await self.run()
        start, reply = self.sent
        return start["status"], json.loads(reply["body"])

    async def run(self) -> None:
        scope = {
            "type": "http", "method": "POST", "path": "/v1/chat/completions", "root_path": "",
            "query_string": b"", "headers": [(b"authorization", f"Bearer {KEY}".encode())],
        }  # fmt: skip

        async def send(message: Message) -> None:
            self.sent.append(message)

        await self.app(scope, self.incoming.get, send)


BODY = json.dumps({"model": "job/actor", "messages": [{"role": "user", "content": "a"}]}).encode()


async def test_a_client_that_leaves_while_waiting_cancels_its_generation(tokenizer: PreTrainedTokenizerFast):
    engine = StandInEngine()
    connection = Connection(engine, tokenizer)
    serving = asyncio.ensure_future(connection.run())
    await connection.incoming.put({"type": "http.request", "body": BODY, "more_body": False})
    await engine.asked.wait()
    await connection.incoming.put({"type": "http.disconnect"})
    await serving
    await engine.cancelled.wait()
    assert connection.sent == []


@pytest.mark.parametrize("text", ["wood 2 tree ", "a", " ", "\N{GRINNING FACE}"])
async def test_three_megabytes_are_refused_without_being_encoded(tokenizer, text):
    content = text * (3_000_000 // len(text.encode()))
    message = {"role": "user", "content": content}
    body = json.dumps({"model": "job/actor", "messages": [message]}, ensure_ascii=False)
    status, problem = await Connection(StandInEngine(), tokenizer).answer(body.encode())
    assert (status, problem["code"]) == (400, "context_length_exceeded")
    assert "a prompt of at least " in problem["detail"], "nobody has counted all of it"
    assert problem["prompt_tokens"] > problem["max_model_len"] == StandInEngine.max_model_len


async def test_a_large_body_that_fits_is_rendered_as_any_other(tokenizer: PreTrainedTokenizerFast):
    engine = StandInEngine([EngineStopped("it came to the engine")])
    tool = {"type": "function", "function": {"name": "f", "description": "d" * 200_000}}
    body = json.dumps({**json.loads(BODY), "tools": [tool]})
    _, problem = await Connection(engine, tokenizer).answer(body.encode())
    assert problem["detail"] == "it came to the engine"


async def test_a_client_that_leaves_in_the_middle_of_its_body_costs_nothing(tokenizer):
    connection = Connection(StandInEngine(), tokenizer)
    await connection.incoming.put({"type": "http.request", "body": BODY[:10], "more_body": True})
    await connection.incoming.put({"type": "http.disconnect"})
    await connection.run()
    assert connection.sent == []


async def test_a_stopped_engine_is_a_503_with_its_reason(tokenizer: PreTrainedTokenizerFast):
    engine = StandInEngine([EngineStopped("out of memory")])
    status, body = await Connection(engine, tokenizer).answer(BODY)
    assert (status, body["code"], body["detail"]) == (503, "engine_stopped", "out of memory")


class BrokenRule:
    """Breaks the promise of `StopStrings` not to raise: on the engine's thread, which that ends."""

    def take(self, token_id: int) -> str | None:
        raise ValueError("the rule is broken")


async def test_an_engine_that_ends_by_itself_is_logged_and_told_by_health(start_engine, tokenizer, capsys):
    configure_logs()
    engine = start_engine()
    app = create_gateway({"job/actor": ServedPolicy(engine, tokenizer)}, key=KEY)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        assert (await client.get("/health")).status_code == 200
        with pytest.raises(EngineStopped, match="its thread ended on ValueError: the rule is broken"):
            await engine.generate([1, 2], Sampling(), request_id="r", extras=Extras(stop=BrokenRule()))
        assert await asyncio.to_thread(engine.breakdown.result, 30)
        health = await client.get("/health")
    assert (health.status_code, health.json()["code"]) == (503, "engine_stopped")
    assert "broken" not in health.text, "anybody may ask there"
    logged = capsys.readouterr().err
    assert "engine_thread_ended" in logged and "the rule is broken" in logged


async def test_a_fault_of_ours_is_a_500_that_tells_nothing(tokenizer, capsys):
    configure_logs()
    status, body = await Connection(StandInEngine([KeyError("secret")]), tokenizer).answer(BODY)
    assert status == 500 and "secret" not in json.dumps(body)
    logged = capsys.readouterr()
    assert logged.out == ""
    assert "gateway_error" in logged.err and "Traceback" in logged.err and "secret" in logged.err
    assert "Bearer" not in logged.err and KEY not in logged.err, "a key stands in the locals of the traceback"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0::0", ""])
def test_a_host_that_no_task_app_can_call_is_refused_to_a_job_and_listened_on_otherwise(host: str):
    with pytest.raises(JobError, match=r"services\.gateway_host is .* no address to call"):
        gateway_listener(tiny_job(services__gateway_host=host).services)
    with Listener(host, 0) as listener, Listener("::1", 0) as own:
        assert listener.socket.getsockname()[1] > 0
        assert own.url == f"http://[::1]:{own.socket.getsockname()[1]}", "an IPv6 address stands in brackets"


@pytest.mark.parametrize("text", ["plain", "\u00e4\U0001f600", "half \ud83d"])
async def test_a_reply_is_compact_json_of_any_text_that_a_model_may_write(text: str):
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await json_response(send, {"text": text, "logprobs": (-0.5, 1e-9)})
    head, body = sent
    assert json.loads(body["body"]) == {"text": text, "logprobs": [-0.5, 1e-9]}
    assert b" " not in body["body"].replace(b"half ", b"")
    assert dict(head["headers"])[b"content-length"] == b"%d" % len(body["body"])


def test_a_rollout_gets_the_raw_text_of_an_answer_also_where_it_is_empty():
    choice = Choice(0, Generation((5,), (-0.5,), "stop", ((0, 0),)), {}, raw_text="", stop_token="<|end|>")
    assert rollout_body(choice, reused=0) == {"raw_text": ""}
