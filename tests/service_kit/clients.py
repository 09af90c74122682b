"""Every client that reads replies from outside, as a call with the address of a server."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
from pydantic import SecretStr

from service_kit.server import Listener
from shared_schemas.messages import Message
from shared_schemas.trajectory import Sampling
from task_app.app import create_app
from task_app.environments.foreign.wire import Http
from task_app.policies.openai import OpenAIAgentPolicy
from task_app.policies.openai_config import OpenAIConfig
from task_app.settings import Reach, Settings
from tests.task_app.environments.foreign.contracts import environment
from trainer_backend.collect.client import TaskAppClient
from trainer_backend.errors import InferenceError, LearnerFailed
from trainer_backend.inference.actor import Extras
from trainer_backend.inference.remote_engine import RemoteEngine
from trainer_backend.inference.vllm_engine import VllmEngine
from trainer_backend.processes.gateway import Gateway
from trainer_backend.processes.gateway_calls import CONTROL_KEY
from trainer_backend.processes.learner_process import LearnerConnection
from trainer_backend.terminal.jobs_client import JobsClient

KEY = "the-key-of-these-tests"
Ask = Callable[[str], Awaitable[Any]]


def vllm(ask: Callable[[VllmEngine], Awaitable[Any]]) -> Ask:
    async def call(url: str) -> Any:
        engine = VllmEngine(url, stop_ids=[9], vocabulary=10, max_model_len=64, wait_s=30)
        try:
            return str(await ask(engine)).replace(url, ""), engine._model
        finally:
            await engine.close()

    return call


def sample(**extras: Any) -> Ask:
    wanted = Extras(likeliest=1, **extras)
    return vllm(lambda one: one.generate([2, 3], Sampling(max_tokens=4), request_id="r", extras=wanted))


def remote(ask: Callable[[RemoteEngine], Awaitable[Any]]) -> Ask:
    async def call(url: str) -> Any:
        engine = RemoteEngine(url, "m", SecretStr(KEY), stop_ids=[9], vocabulary=10, max_model_len=64)
        try:
            return await ask(engine)
        finally:
            await engine.close()

    return call


def app(ask: Callable[[TaskAppClient], Awaitable[Any]]) -> Ask:
    async def call(url: str) -> Any:
        async with TaskAppClient(url, SecretStr(KEY), timeout_s=30, most_reply_bytes=1 << 20) as client:
            return await ask(client)

    return call


def terminal(ask: Callable[[JobsClient], Any]) -> Ask:
    environ = {"TRAINER_API_KEY": KEY}
    return lambda url: asyncio.to_thread(ask, JobsClient(url, environ, most_reply_bytes=1 << 20))


def learner(ask: Callable[[LearnerConnection], Any]) -> Ask:
    async def call(url: str) -> None:
        connection = LearnerConnection(url, KEY, silence_s=30, log_file=None, session="run/1")
        try:
            if fault := await asyncio.to_thread(ask, connection):
                raise LearnerFailed(fault)
        finally:
            connection.close()

    return call


def policy(*, counts: bool = False, **config: Any) -> Ask:
    async def call(url: str) -> Any:
        one = OpenAIAgentPolicy(OpenAIConfig(inference_url=url, model="m", max_attempts=1, **config))
        one._known_ids = 1
        if counts:
            return await one.count_tokens([Message(role="user", content="hi")], [])
        return await one.get_action([Message(role="user", content="hi")], [{"type": "function"}])

    return call


async def ask_gateway(url: str) -> None:
    with Listener("127.0.0.1", 0) as own:
        keys, log = {CONTROL_KEY: KEY}, Path("gateway.log")
        gateway: Any = Gateway(0, own, lambda version, first: None, print, keys=keys, log_file=log)
        gateway._life = SimpleNamespace(url=url)
        try:
            await gateway._call("totals", timeout_s=30)
        except aiohttp.ClientError as error:  # to its callers, the end of the process
            raise InferenceError("its process has gone") from error
        finally:
            await gateway.close()


async def ask_peer(url: str) -> None:
    http = Http("peer", Reach(environment_deadline_s=30, max_environment_bytes=1 << 20))
    http.client.headers["authorization"] = KEY
    try:
        await asyncio.to_thread(http.send, "POST", url, body={})
    finally:
        http.close()


async def ask_from_a_plug_in(url: str) -> None:
    services = create_app(Settings(api_keys=(SecretStr(KEY),))).state.services
    services.start()
    async with services.open_session() as session, session.get(url):
        pass


CLIENTS: dict[str, Ask] = {
    "vLLM, a sample": sample(),
    "vLLM, a scored prompt": vllm(lambda one: one.score([2, 3, 4])),
    "vLLM, a stream": sample(on_token=lambda token: None),
    "a fixed policy, a sample": remote(
        lambda one: one.generate([2, 3], Sampling(max_tokens=4), request_id="r")
    ),
    "task app, /info": app(lambda one: one.about()),
    "task app, a page": app(lambda one: one.poll("run", None, wait_s=0)),
    "a policy at our gateway": policy(),
    "the terminal, jobs": terminal(lambda one: one.get("/jobs")),
    "the terminal, events": terminal(lambda one: list(one.events("/jobs/j/events"))),
    "a learner, about": learner(lambda one: one.fault("run")),
    "a gateway": ask_gateway,
    "a peer": ask_peer,
    "an MCP server": lambda url: asyncio.to_thread(environment(f"mcp:{url}/mcp").reset, 0),
}
