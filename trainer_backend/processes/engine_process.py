"""`python -m trainer_backend.processes.engine_process --socket N`: runs a gateway's local engine.

`processes.process_engine` starts this process, and calls it over an inherited socket
(`processes.engine_calls`). The process ends when its parent ends. Logs go to stderr.
"""

import os

from service_kit.own_process import begin_imports, end_imports, end_with_parent, kill_with_parent

if __name__ == "__main__":
    begin_imports()
    end_with_parent()
    # A hanging process would keep GPU memory that the next engine needs.
    kill_with_parent(os.getppid())

import argparse
import asyncio
import socket
import sys
from collections.abc import Sequence
from itertools import count

from service_kit.logs import configure_logs_from
from service_kit.rpc import Tell
from service_kit.server import run
from service_kit.socket_calls import serve_calls
from trainer_backend.errors import EngineStopped
from trainer_backend.inference.actor import Extras, Generation
from trainer_backend.inference.engine import LocalEngine
from trainer_backend.inference.rendering import ChatRenderer
from trainer_backend.inference.stop_strings import StopStrings
from trainer_backend.inference.versions import PolicyVersion
from trainer_backend.inference.worker import EngineCounters
from trainer_backend.processes.engine_calls import ENGINE_CALLS, EngineCall, EngineSetup
from trainer_backend.processes.policy_server import engine_of_folder


class EngineHost:
    """Implements the calls of `ENGINE_CALLS` with an engine in this process."""

    def __init__(self) -> None:
        self._engine: LocalEngine | None = None
        self._renderer: ChatRenderer | None = None
        self._numbers = count(1)

    async def serve(self, setup: EngineSetup, tell: Tell) -> str:
        version = setup.version
        engine, tokenizer = await asyncio.to_thread(
            engine_of_folder, setup.model, version.folder, setup.keys, version=version.number
        )
        self._engine, self._renderer = engine, ChatRenderer(tokenizer)
        engine.start()
        tell()
        try:
            return await asyncio.wrap_future(engine.breakdown)
        finally:
            engine.stop()

    async def generate(self, call: EngineCall, tell: Tell) -> tuple[Generation, EngineCounters]:
        engine = self._serving()
        assert self._renderer is not None, "it came with the engine"
        extras = Extras(
            likeliest=call.likeliest,
            processed=call.processed,
            common_draws=call.common_draws,
            stop=StopStrings(self._renderer.decode, call.stop) if call.stop else None,
            on_token=tell if call.streams else None,
        )
        request_id = str(next(self._numbers))
        generation = await engine.generate(call.ids, call.sampling, request_id=request_id, extras=extras)
        return generation, engine.counters

    async def load(self, version: PolicyVersion) -> EngineCounters:
        await self._serving().load(version)
        return self._serving().counters

    async def probe(self) -> EngineCounters:
        await self._serving().probe()
        return self._serving().counters

    def _serving(self) -> LocalEngine:
        if self._engine is None:
            raise EngineStopped("there is no engine yet: 'serve' comes first")
        return self._engine


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer_backend.processes.engine_process")
    parser.add_argument("--socket", type=int, required=True, metavar="N", help="the inherited descriptor")
    options = parser.parse_args(arguments)
    configure_logs_from()
    with socket.socket(fileno=options.socket) as connected:
        run(serve_calls(ENGINE_CALLS, EngineHost(), connected))
    return 0


if __name__ == "__main__":
    end_imports()
    sys.exit(main())
