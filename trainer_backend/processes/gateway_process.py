"""`python -m trainer_backend.processes.gateway_process NAME --socket N`: a gateway of a run with [cluster].

`processes.gateway` starts this process. When it is ready, it prints its address for calls
(`processes.gateway_calls`). It answers requests on a socket that it inherits from its parent; on another
machine, it opens a port of its own. It serves one version of the policy after another, and ends when its
parent ends. Logs go to stderr.

Exit codes: 0 after a stop, 1 after a failure. The last line of stderr gives the reason for the failure.
"""

from service_kit.own_process import announce, begin_imports, end_imports, end_with_parent

if __name__ == "__main__":
    begin_imports()
    end_with_parent()

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import NoReturn

import structlog
from pydantic import SecretStr

from service_kit.errors import ServiceError
from service_kit.keys import Keys
from service_kit.logs import configure_logs_from
from service_kit.rpc import Tell, calls_app, reply_lines
from service_kit.server import Listener, Server, run
from service_kit.settings import ConnectionSettings
from service_kit.tasks import end_tasks, racing
from trainer_backend.core.policies import ACTOR, name_model
from trainer_backend.errors import InferenceError
from trainer_backend.inference.actor import Engine
from trainer_backend.inference.asgi import error_response
from trainer_backend.inference.chat_check import Tokenizer
from trainer_backend.inference.gateway_app import create_gateway
from trainer_backend.inference.served_policy import PolicyFacts, ServedPolicy
from trainer_backend.inference.servers import Servers
from trainer_backend.inference.versions import PolicyVersion
from trainer_backend.processes.engine_calls import EngineSetup
from trainer_backend.processes.gateway_calls import (
    CONTROL_KEY,
    GATEWAY_CALLS,
    GATEWAY_KEY,
    GatewaySetup,
    Line,
    ProcessChanged,
    Sign,
)
from trainer_backend.processes.policy_server import engine_of_folder, first_breakdown, make_servers
from trainer_backend.processes.process_engine import EngineLost, ProcessEngine
from trainer_backend.run.fixed_policies import FixedPolicies
from trainer_backend.rundir.fixed_record import continue_record
from trainer_backend.rundir.layout import open_run

log = structlog.get_logger("gateway")

# Enough for one connection for each conversation that a gateway remembers.
CONNECTIONS = ConnectionSettings(max_connections=20_100)
_LOOK_S = 0.2
_LOST = 1


class GatewayHost:
    """Implements the calls of `GATEWAY_CALLS`, of which `serve` can be made only once.

    Args:
        listener: receives the requests to the policies.
        key: the key that each request must carry.
    """

    def __init__(self, listener: Listener, key: SecretStr) -> None:
        self._listener, self._key = listener, key
        self._engine: Engine | None = None
        self._policy: ServedPolicy | None = None
        self._fixed = FixedPolicies()
        self._has_begun, self.ended = False, asyncio.Event()
        self.last_word = ""

    async def serve(self, setup: GatewaySetup, tell: Tell) -> str:
        if self._has_begun:
            raise InferenceError("it serves already, or has done so")
        self._has_begun = True
        try:
            self.last_word = await self._serve(setup, tell)
        except ServiceError as error:
            self.last_word = str(error)
            raise
        except Exception as error:  # a new process might not fail
            _die(f"{type(error).__name__}: {error}", error)
        finally:
            self.ended.set()
        return self.last_word

    async def load(self, version: PolicyVersion) -> None:
        await self._serving()[0].load(version)

    async def release(self) -> None:
        await self._serving()[0].release()

    async def totals(self) -> dict[str, float]:
        engine, policy = self._serving()
        return {**engine.totals(), **policy.figures.totals()}

    async def probe(self) -> None:
        await self._serving()[0].probe()

    async def verify(self) -> list[str]:
        return list(await asyncio.to_thread(self._fixed.verify))

    async def move_server(self, url: str, new_url: str) -> None:
        engine, _ = self._serving()
        if isinstance(engine, Servers):
            engine.move(url, new_url)

    def _serving(self) -> tuple[Engine, ServedPolicy]:
        if self._engine is None or self._policy is None:
            raise InferenceError("nothing is served yet: 'serve' comes first")
        return self._engine, self._policy

    async def _serve(self, setup: GatewaySetup, tell: Tell) -> str:
        """Serve until this process is asked to stop or an engine fails.

        Return why the engine failed; "" after a stop.
        """
        engine, tokenizer = await make_engine(setup, tell)
        policy, fixed = ServedPolicy(engine, tokenizer), await load_fixed(setup, tell)
        self._engine, self._policy, self._fixed = engine, policy, fixed
        served = {
            name_model(setup.job_name, name): one for name, one in {ACTOR: policy, **fixed.policies}.items()
        }
        server = Server(
            create_gateway(served, key=self._key),
            CONNECTIONS,
            respond=error_response,
            ready=lambda: tell(Line(kind="serving", text=self._listener.url)),
        )
        for one in served.values():
            one.engine.start()
        engine.watch(lambda name, **facts: tell(ProcessChanged(name=name, **facts)))
        watches = [
            asyncio.ensure_future(work) for work in (look_after(engine), report_first_answer(engine, tell))
        ]
        broken = asyncio.ensure_future(first_breakdown(served.values(), watches))
        try:
            if setup.version.prompt is not None:  # vLLM servers run already, with other weights
                await engine.load(setup.version)
            async with racing(server.serve([self._listener.socket]), broken) as (serving, _):
                server.should_exit = True
                await serving
        finally:
            await end_tasks(*watches, broken)
            for one in served.values():
                one.engine.stop()
        return broken.result() if broken.done() and not broken.cancelled() else ""


async def make_engine(setup: GatewaySetup, tell: Tell) -> tuple[Engine, Tokenizer]:
    """Make the actor's engine; return the engine and the policy's tokenizer."""
    table, version = setup.inference, setup.version
    keys = setup.fixed.share_threads(table)
    if table.engine == "local" and not table.own_process:
        # Free memory is not checked, because it changes while the learner trains. The run's memory plan has
        # already included the engine.
        return await asyncio.to_thread(
            engine_of_folder, setup.model, version.folder, keys, version=version.number
        )
    facts = await asyncio.to_thread(PolicyFacts.of_folder, setup.model, version.model)
    if table.engine == "vllm":
        renew = None if table.vllm_python is None else lambda url: tell(Line(kind="server_away", text=url))
        say = partial(_say, tell)
        return make_servers(table, facts, say, renew, lambda: tell(Sign(kind="server_asks"))), facts.tokenizer
    engine = ProcessEngine(EngineSetup(model=setup.model, keys=keys, version=version))
    try:
        await engine.begin()
    except EngineLost as lost:
        _die(str(lost))
    return engine, facts.tokenizer


async def load_fixed(setup: GatewaySetup, tell: Tell) -> FixedPolicies:
    """Load and return the fixed policies. Policies that differ from the run's record are refused."""
    if not setup.fixed.tables:
        return FixedPolicies()
    facts, say = PolicyFacts.of_folder(setup.model, setup.version.model), partial(_say, tell)
    fixed = await setup.fixed.load(facts, setup.inference, say, probes=setup.probes)
    for line in continue_record(open_run(setup.run), fixed.models):
        say(line)
    return fixed


async def look_after(engine: Engine) -> None:
    """Watch the engine. If the engine's own process ends, end this process too; the run restarts both."""
    try:
        await engine.look_after()
    except EngineLost as lost:
        _die(str(lost))


async def report_first_answer(engine: Engine, tell: Tell) -> None:
    """Wait until the actor has answered a request, and report this to the run."""
    while not engine.totals()["requests"]:
        await asyncio.sleep(_LOOK_S)
    tell(Sign(kind="answered"))


def _say(tell: Tell, line: str) -> None:
    tell(Line(kind="say", text=" ".join(line.split())))


def _die(word: str, error: Exception | None = None) -> NoReturn:
    if error is not None:
        log.error("gateway_failed", exc_info=error)
    print(word, file=sys.stderr, flush=True)
    os._exit(_LOST)


async def answer_calls(host: GatewayHost, address: str, key: SecretStr) -> None:
    """Answer the run's calls at a free port of `address` until the gateway stops serving."""

    def begin(request: object, name: str, body: bytes) -> AsyncIterator[bytes]:
        return reply_lines(GATEWAY_CALLS, host, name, body)

    with Listener(address, 0) as listener:
        app = calls_app(GATEWAY_CALLS, begin, Keys([key], variable=CONTROL_KEY))
        server = Server(app, ConnectionSettings(), ready=lambda: announce(listener.url))
        async with racing(server.serve([listener.socket]), host.ended.wait()) as (serving, _):
            server.should_exit = True
            await serving


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer_backend.processes.gateway_process")
    parser.add_argument("name", help="the gateway's name, for lists of processes")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--socket", type=int, metavar="N", help="the inherited descriptor")
    where.add_argument("--host", help="an address of this machine, of which it takes two free ports")
    options = parser.parse_args(arguments)
    configure_logs_from()
    address = options.host or "127.0.0.1"
    listener = Listener(address, 0) if options.socket is None else Listener.inherited(options.socket)
    gateway_key, control_key = (SecretStr(os.environ.pop(name)) for name in (GATEWAY_KEY, CONTROL_KEY))
    host = GatewayHost(listener, gateway_key)
    run(answer_calls(host, address, control_key))
    if host.last_word:
        print(host.last_word, file=sys.stderr, flush=True)
    return _LOST if host.last_word else 0


if __name__ == "__main__":
    end_imports()
    sys.exit(main())
