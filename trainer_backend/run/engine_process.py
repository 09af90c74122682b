"""`python -m trainer_backend.run.engine_process --socket N`: a gateway's local engine, in its own process.

`run.process_engine` starts it: it is asked over a socket that it inherits (`run.engine_frames`), begins with
the version of its setup, says so on stdout, and ends with its parent. Logs go to stderr.

Exit codes: 0 stopped, 2 the policy cannot be served, 3 the engine has failed; the last line of stderr says
why.
"""

from service_kit.boundary import describe_error
from service_kit.process import READY, begin_imports, end_imports, end_with_parent, kill_with_parent

if __name__ == "__main__":
    begin_imports()
    # Before the slow imports: if the gateway is killed meanwhile, this process must not survive it.
    end_with_parent()
    # Nor if it hangs itself: it would keep the memory of a GPU, beside the engine that follows it.
    kill_with_parent()

import argparse
import asyncio
import os
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import astuple
from typing import Any

from service_kit.errors import ServiceError
from service_kit.logs import configure_logs_from
from service_kit.server import run
from trainer_backend.errors import EngineStopped, TrainerError
from trainer_backend.inference.engine import LocalEngine
from trainer_backend.inference.protocol import Extras, Generation
from trainer_backend.inference.rendering import ChatRenderer
from trainer_backend.inference.stop_strings import StopStrings
from trainer_backend.inference.versions import PolicyVersion
from trainer_backend.learner.calls import ErrorBody
from trainer_backend.learner.device import Placement, place
from trainer_backend.learner.loading import new_weights
from trainer_backend.run.engine_frames import TO_ENGINE, TO_GATEWAY, EngineCall, Frame, Line
from trainer_backend.run.gateway import BREAKDOWN, REFUSAL
from trainer_backend.run.policy_server import engine_of_folder
from trainer_backend.run.process_engine import SETUP, EngineSetup


class EngineHost:
    """Answers frames with an engine of this process."""

    def __init__(self, engine: LocalEngine, renderer: ChatRenderer, placement: Placement, line: Line) -> None:
        self._engine, self._renderer, self._placement, self._line = engine, renderer, placement, line
        self._calls: dict[str, Callable[..., Coroutine[Any, Any, Any]]] = {
            "generate": self._generate,
            "load": self._load,
            "probe": self._probe,
            "abort": self._abort,
        }
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself holds tasks weakly

    async def serve(self) -> int:
        """Answer until the gateway goes or the engine fails; return the exit code."""
        broken = asyncio.wrap_future(self._engine.breakdown)
        while True:
            hearing = asyncio.ensure_future(self._line.hear())
            await asyncio.wait((hearing, broken), return_when=asyncio.FIRST_COMPLETED)
            if broken.done():
                hearing.cancel()
                print(broken.result(), file=sys.stderr, flush=True)
                return BREAKDOWN
            frame = hearing.result()
            if frame is None:
                return 0
            self._take(frame)

    def _take(self, frame: Frame) -> None:
        number, verb, carried = frame
        task = asyncio.ensure_future(self._answer(number, self._calls[verb](number, *carried)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, work: Coroutine[Any, Any, Any]) -> None:
        try:
            result = await work
        except TrainerError as error:
            self._line.say(number, "error", ErrorBody.of(error))
        except Exception as error:
            kind = EngineStopped(f"the engine's process met {describe_error(error)}")
            self._line.say(number, "error", ErrorBody.of(kind))
        else:
            self._line.say(number, "done", result, astuple(self._engine.counters))

    async def _generate(self, number: int, call: EngineCall) -> Generation:
        extras = Extras(
            likeliest=call.likeliest,
            processed=call.processed,
            common_draws=call.common_draws,
            stop=StopStrings(self._renderer.decode, call.stop) if call.stop else None,
            on_token=(lambda token: self._line.say(number, "token", token)) if call.streams else None,
        )
        return await self._engine.generate(call.ids, call.sampling, request_id=str(number), extras=extras)

    async def _load(self, number: int, version: PolicyVersion) -> None:
        source = await asyncio.to_thread(new_weights, version.folder, self._placement)
        await self._engine.load_weights(version.number, source)

    async def _probe(self, number: int) -> None:
        await self._engine.probe()

    async def _abort(self, number: int, of: int) -> None:
        await self._engine.abort(str(of))


async def serve(setup: EngineSetup, connection: socket.socket) -> int:
    """Begin with the version of the setup, and serve; return the exit code."""
    engine, tokenizer = engine_of_folder(
        setup.model, setup.version.folder, setup.keys, version=setup.version.number
    )
    line = Line(*await asyncio.open_connection(sock=connection), says=TO_GATEWAY, hears=TO_ENGINE)
    engine.start()
    print(f"{READY}a socket of the gateway", flush=True)
    try:
        return await EngineHost(engine, ChatRenderer(tokenizer), place(setup.model.device), line).serve()
    finally:
        line.close()
        engine.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer_backend.run.engine_process")
    parser.add_argument("--socket", type=int, required=True, metavar="N", help="the inherited descriptor")
    options = parser.parse_args(arguments)
    configure_logs_from()
    setup = EngineSetup.model_validate_json(os.environ.pop(SETUP))
    try:
        with socket.socket(fileno=options.socket) as connection:
            return run(serve(setup, connection))
    except ServiceError as error:
        print(error, file=sys.stderr, flush=True)
        return REFUSAL


if __name__ == "__main__":
    end_imports()
    sys.exit(main())
