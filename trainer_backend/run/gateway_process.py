"""`python -m trainer_backend.run.gateway_process NAME --socket N`: a gateway of a run with [cluster].

`run.gateways` starts it: it listens on a socket that its parent holds, or elsewhere on a port of its own,
serves one version of the policy after another, each from a folder, and ends with its parent. Lines for the
run's user go to stdout, logs to stderr.

Exit codes: 0 stopped, 1 its engine's process has died, 2 the policy cannot be served, however often
it is started, 3 its engine has failed, or something passing; the last line of stderr says why.
"""

from service_kit.process import READY, begin_imports, end_imports, end_with_parent, name_exit

if __name__ == "__main__":
    begin_imports()
    # Before the slow imports: if the orchestrator is killed meanwhile, this process must not survive it.
    end_with_parent()

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pydantic import SecretStr

from service_kit.errors import ServiceError
from service_kit.logs import configure_logs_from
from service_kit.server import Listener, Server, run
from service_kit.settings import ConnectionSettings
from trainer_backend.core.policies import ACTOR, model_of
from trainer_backend.inference.asgi import error_response
from trainer_backend.inference.control import ControlledGateway
from trainer_backend.inference.engine import LocalEngine
from trainer_backend.inference.gateway import create_gateway
from trainer_backend.inference.served_policy import PolicyFacts, ServedPolicy
from trainer_backend.inference.versions import PolicyVersion
from trainer_backend.learner.device import place
from trainer_backend.learner.loading import new_weights
from trainer_backend.run.fixed_policies import FixedPolicies
from trainer_backend.run.gateway import (
    BREAKDOWN,
    CONTROL_KEY,
    GATEWAY_KEY,
    LOST,
    PROCESS,
    REFUSAL,
    RENEW,
    SERVE_AGAIN,
    SERVED,
    SETUP,
    GatewaySetup,
)
from trainer_backend.run.policy_server import engine_of_folder, first_breakdown
from trainer_backend.run.process_engine import EngineSetup, ProcessEngine
from trainer_backend.run.replicas import pool_of, shown_by
from trainer_backend.rundir.fixed_record import continue_record
from trainer_backend.rundir.layout import open_run
from trainer_backend.rundir.state import is_final

# As many conversations as a gateway remembers, and the run's own control.
CONNECTIONS = ConnectionSettings(max_connections=20_100)
_LOOK_S = 0.2


class EngineActor:
    """An engine of this gateway, whose weights come from folders."""

    _engine: LocalEngine | ProcessEngine
    policy: ServedPolicy

    def totals(self) -> Mapping[str, float]:
        return {**asdict(self._engine.counters), **self.policy.figures.totals()}

    async def probe(self) -> None:
        await self._engine.probe()


class FolderActor(EngineActor):
    """An engine of this process.

    Its memory is in the plan of the run: what is free once a learner trains says nothing of what there is.
    """

    _engine: LocalEngine

    def __init__(self, setup: GatewaySetup) -> None:
        version = setup.version
        self._engine, tokenizer = engine_of_folder(
            setup.model, version.folder, setup.fixed.share_threads(setup.inference), version=version.number
        )
        self.policy, self._placement = ServedPolicy(self._engine, tokenizer), place(setup.model.device)

    async def begin(self) -> None:
        """An engine of this process begins with its weights."""

    async def load(self, version: PolicyVersion) -> None:
        source = await asyncio.to_thread(new_weights, version.folder, self._placement)
        await self._engine.load_weights(version.number, source)

    async def look_after(self) -> None:
        """An engine of this process looks after itself."""


class ProcessActor(EngineActor):
    """An engine in a process of its own, a child of this one."""

    _engine: ProcessEngine

    def __init__(self, setup: GatewaySetup) -> None:
        facts = PolicyFacts.of_folder(setup.model, setup.version.model)
        keys = setup.fixed.share_threads(setup.inference)
        self._engine = ProcessEngine(EngineSetup(model=setup.model, keys=keys, version=setup.version))
        self.policy = ServedPolicy(self._engine, facts.tokenizer)

    async def begin(self) -> None:
        self._end_with(await self._engine.begin())

    async def load(self, version: PolicyVersion) -> None:
        await self._engine.load(version)

    async def look_after(self) -> None:
        self._end_with(await self._engine.ended())

    def _end_with(self, code: int | None) -> None:
        """End as the engine's process did, whose last words are in the same log.

        The run starts this process again with an engine, unless the engine has refused or failed.
        """
        if code is None:
            return
        if code not in (REFUSAL, BREAKDOWN):
            print(f"the engine's process ended with {name_exit(code)}", file=sys.stderr, flush=True)
            code = LOST
        os._exit(code)


class PoolActor:
    """vLLM servers that are this gateway's alone."""

    def __init__(self, setup: GatewaySetup) -> None:
        facts = PolicyFacts.of_folder(setup.model, setup.version.model)
        # The run, whose child such a server is, starts it again.
        renew = None if setup.inference.vllm_python is None else lambda url: _tell(f"{RENEW}{url}")
        # The run, which has the learner, hands the weights out again.
        self._pool = pool_of(setup.inference, facts, _tell, renew, lambda: _tell(SERVE_AGAIN))
        self.policy = ServedPolicy(self._pool, facts.tokenizer)
        self._pool.watch(shown_by(_tell_of_process))

    async def begin(self) -> None:
        """The servers run already; what they have is told by a load."""

    async def load(self, version: PolicyVersion) -> None:
        await self._pool.publish(version)

    def totals(self) -> Mapping[str, float]:
        return {**self._pool.totals(), **self.policy.figures.totals()}

    async def probe(self) -> None:
        """The pool finds out by itself which servers are wedged."""

    async def look_after(self) -> None:
        await self._pool.look_after()


# The actor, as this process serves it.
Actor = FolderActor | ProcessActor | PoolActor


def actor_of(setup: GatewaySetup) -> Actor:
    if setup.inference.engine == "vllm":
        return PoolActor(setup)
    return ProcessActor(setup) if setup.inference.own_process else FolderActor(setup)


async def serve(actor: Actor, setup: GatewaySetup, listener: Listener) -> int:
    """Serve until this process is asked to stop, or its engine fails; return the exit code."""
    fixed = await _fixed_policies(setup)
    policies = {ACTOR: actor.policy, **fixed.policies}
    served = {model_of(setup.job_name, name): policy for name, policy in policies.items()}
    gateway = create_gateway(served, key=setup_key(GATEWAY_KEY))
    app = ControlledGateway(gateway, actor, fixed.verify, key=setup_key(CONTROL_KEY))
    server = Server(app, CONNECTIONS, respond=error_response, ready=lambda: _tell(f"{READY}{listener.url}"))
    await actor.begin()
    for policy in served.values():
        policy.engine.start()
    watches = [asyncio.ensure_future(work) for work in (actor.look_after(), _tell_of_the_first(actor))]
    broken = asyncio.ensure_future(first_breakdown(served.values(), watches))
    try:
        if setup.version.prompt is not None:  # the servers have other weights, or those of an earlier start
            await actor.load(setup.version)
        serving = asyncio.ensure_future(server.serve([listener.socket]))
        await asyncio.wait((serving, broken), return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving
    finally:
        for watch in (*watches, broken):
            watch.cancel()
        for policy in served.values():
            policy.engine.stop()
    if not broken.done() or broken.cancelled():
        return 0
    print(broken.result(), file=sys.stderr, flush=True)
    return BREAKDOWN


async def _fixed_policies(setup: GatewaySetup) -> FixedPolicies:
    """Load the fixed policies; they are those that the run has samples of, or are added to its record."""
    if not setup.fixed.tables:
        return FixedPolicies()
    facts = PolicyFacts.of_folder(setup.model, setup.version.model)
    fixed = await setup.fixed.load(facts, setup.inference, _tell, probes=setup.probes)
    for line in continue_record(open_run(setup.run), fixed.models):
        _tell(line)
    return fixed


async def _tell_of_the_first(actor: Actor) -> None:
    """Tell once the actor has answered a request: from then on this process has been of use."""
    while not actor.totals()["requests"]:
        await asyncio.sleep(_LOOK_S)
    _tell(SERVED)


def setup_key(variable: str) -> SecretStr:
    return SecretStr(os.environ.pop(variable))


def _tell(line: str) -> None:
    print(" ".join(line.split()), flush=True)


def _tell_of_process(name: str, **facts: Any) -> None:
    """Have the run report a process as `Reporter.process` does."""
    _tell(PROCESS + json.dumps({"name": name, **facts}))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer_backend.run.gateway_process")
    parser.add_argument("name", help="the gateway's name, for lists of processes")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--socket", type=int, metavar="N", help="the inherited descriptor")
    where.add_argument("--host", help="an address of this machine, of which it takes a free port")
    options = parser.parse_args(arguments)
    configure_logs_from()
    socket, host = options.socket, options.host
    listener = Listener.inherited(socket) if host is None else Listener(host, 0)
    setup = GatewaySetup.model_validate_json(os.environ.pop(SETUP))
    try:
        return run(serve(actor_of(setup), setup, listener))
    except ServiceError as error:
        print(error, file=sys.stderr, flush=True)
        return REFUSAL if is_final(error) else BREAKDOWN


if __name__ == "__main__":
    end_imports()
    sys.exit(main())
