"""`python -m trainer_backend.learner.process` runs the learner of one run in a process of its own.

The process listens on the loopback address or on --host, and prints `listening on http://host:port` when it
is ready. Without --port, and under torchrun, it ends with its parent process; otherwise an operator ends it.
It reads its key from the environment and logs to stderr. `learner.calls` describes the calls.

The process serves one orchestrator and executes one call at a time. It keeps the answer of the last call:
after a broken connection, the orchestrator repeats the call with the same number and gets the stored answer.
"""

import gc
import os
import sys

from service_kit.own_process import announce, begin_imports, end_imports, end_with_parent, kill_with_parent

if __name__ == "__main__":
    begin_imports()
    # An operator starts and ends a process with --port.
    if not any(word.startswith("--port") for word in sys.argv):
        end_with_parent()
    if "WORLD_SIZE" in os.environ:  # a rank under torchrun, which does not inherit the standard input
        kill_with_parent(int(os.environ.get("TURNWISE_GROUP_PID", os.getppid())))

import argparse
import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any

import structlog
import tomli
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from service_kit.errors import MalformedRequest, ServiceError
from service_kit.keys import Keys, key_from_environ
from service_kit.logs import configure_logs_from
from service_kit.release import version
from service_kit.rpc import calls_app
from service_kit.server import Listener, Server
from service_kit.settings import ConnectionSettings
from shared_schemas.trajectory import Trajectory
from trainer_backend import learner_parts
from trainer_backend.errors import LearnerBusy, LearnerFailed, LearnerLost, TrainerError
from trainer_backend.job.load import parse_job
from trainer_backend.learner.calls import CALLS, LEARNER_KEY, NUMBER_HEADER, SESSION_HEADER, About, parse_run
from trainer_backend.learner.device import place
from trainer_backend.learner.factory import LocalFactory
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.learner.ranks import ALONE, Ranks, join_ranks, refuse_other_count
from trainer_backend.learner.relay import Caller, Relay, call_error
from trainer_backend.parts import CreditedEpisode, Progress

log = structlog.get_logger("learner")

# If the ranks have diverged: seconds until this process exits, in which it sends the answer; and exit status.
_LAST_WORDS_S, _BROKEN = 0.25, 3
# Calls that need an open job, but not a learner.
_OF_THE_FACTORY = frozenset({"fixed_folders", "plan_memory", "gradient_cosines"})
# Most digits of a call's number; most characters of a malformed header that an error shows.
_MOST_DIGITS, _SHOWN = 18, 80


class Host:
    """Opens a job, creates the learner of this process, and executes calls on it by name."""

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self._ranks = ranks
        self._factory: LocalFactory | None = None
        self._learner: LocalLearner | None = None

    def do(self, name: str, *arguments: Any) -> Any:
        """Execute a call and return its result. Raises LearnerFailed if no job or learner exists yet."""
        own = getattr(self, f"_{name}", None)
        if own is not None:
            return own(*arguments)
        home = self._opened() if name in _OF_THE_FACTORY else self._made()
        return getattr(home, name)(*arguments)

    def _open(self, job: str) -> None:
        config = parse_job(tomli.loads(job), where="the job").config
        self._learner = None  # frees the learner of an earlier start
        gc.collect()  # a sharded model has reference cycles
        self._ranks = self._ranks.patient(config.learner.timeout_s)
        self._ranks.together(
            lambda: refuse_other_count(self._ranks, config.learner, place(config.model.device).device)
        )
        self._factory = learner_parts.local_learners(config, self._ranks)

    def _sees(self, file: Path, text: str) -> bool:
        """Return whether every rank reads this text from `file`: then all ranks share the run's directory."""
        try:
            is_seen = file.read_text(encoding="utf-8") == text
        except (OSError, UnicodeDecodeError):
            is_seen = False
        return all(self._ranks.of_every_rank(is_seen))

    def _fresh(self, prompts: list[Trajectory], tokenizer_folder: Path | None) -> None:
        self._learner = self._opened().fresh(prompts, tokenizer_folder)

    def _resumed(self, checkpoint: Path) -> Progress:
        self._learner, progress = self._opened().resumed(checkpoint)
        return progress

    def _update(
        self, episodes: list[CreditedEpisode], iteration: int, policy_version: int | None
    ) -> dict[str, float]:
        return self._made().update(episodes, iteration=iteration, policy_version=policy_version)

    def _made(self) -> LocalLearner:
        if self._learner is None:
            raise LearnerFailed("there is no learner yet: call 'fresh' or 'resumed' first")
        return self._learner

    def _opened(self) -> LocalFactory:
        if self._factory is None:
            raise LearnerFailed("there is no job yet: call 'open' first")
        return self._factory


class Call(Caller):
    """One call, which is executed once. Each HTTP request for the call gets `lines`, also a repeated one.

    `digest` is a digest of the call's arguments.
    """

    def __init__(self, number: int, name: str, digest: bytes) -> None:
        self.number, self.name, self.digest = number, name, digest
        self.loop = asyncio.get_running_loop()
        self.halt = threading.Event()
        self.is_done = False
        self._progress = b""
        self._answer = b""
        self._news = asyncio.Event()

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield progress reports as they arrive, then the answer; older reports may be left out."""
        sent = b""
        while True:
            news, is_done = self._news, self.is_done
            if self._progress != sent:
                sent = self._progress
                yield sent + b"\n"
            if is_done:
                break
            await news.wait()
        yield self._answer + b"\n"

    def tell(self, done: int, total: int) -> None:
        self.loop.call_soon_threadsafe(self._hear, CALLS.write_progress(self.name, (done, total)))

    def is_halted(self) -> bool:
        return self.halt.is_set()

    def broken(self, error: TrainerError) -> None:
        log.error("ranks_broken", call=self.name, error=str(error))
        self.end(CALLS.write_error(error, self.name))
        self.loop.call_soon_threadsafe(self.loop.call_later, _LAST_WORDS_S, os._exit, _BROKEN)

    def end(self, line: bytes) -> None:
        """Set the answer, unless the call already has one."""
        self.loop.call_soon_threadsafe(self._close, line)

    def _hear(self, line: bytes) -> None:
        self._progress = line
        self._wake()

    def _close(self, line: bytes) -> None:
        if not self.is_done:
            self._answer, self.is_done = line, True
            self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


class Calls:
    """Executes the calls of one orchestrator on a single thread, one at a time."""

    def __init__(self, relay: Relay) -> None:
        self._relay, self._thread = relay, ThreadPoolExecutor(1, "learner")
        self._session = ""
        self._last: Call | None = None

    def call(self, session: str, number: int, name: str, body: bytes) -> Call:
        """Begin a call and return it; if the last call has this number and content, return the last call.

        Raises LearnerBusy while another call or run uses the learner; LearnerLost if this process restarted.
        """
        self._refuse_other(session, number)
        digest, last = blake2b(body).digest(), self._last
        if last is not None and number == last.number and (name, digest) == (last.name, last.digest):
            return last
        if last is not None and (number <= last.number or not last.is_done):
            state = "was the last one" if last.is_done else "is under way"
            raise LearnerBusy(
                f"call {number}, {name!r}, cannot begin: call {last.number}, {last.name!r}, {state}",
                hint="A learner executes one call at a time. Do two orchestrators use this learner?",
            )
        self._last = call = Call(number, name, digest)
        self._thread.submit(self._run, call, body)
        return call

    def stop(self, session: str, number: int) -> None:
        """Stop a call at its next progress report; do nothing if the call has ended."""
        self._refuse_other(session, number)
        if self._last is not None and self._last.number == number:
            self._last.halt.set()

    def leave(self, session: str) -> None:
        """Release the learner, so that another run may use it after the running call, if any, has ended."""
        if session == self._session:
            self._session = ""

    def about(self) -> About:
        busy = self._last if self._last is not None and not self._last.is_done else None
        call = "" if busy is None else f"{busy.number}, {busy.name!r}"
        return About(version=version(), run=parse_run(self._session), call=call)

    def _refuse_other(self, session: str, number: int) -> None:
        """Raise LearnerBusy for calls of other runs until the current run leaves.

        A new start of the current run takes over. Raises LearnerLost if a new start's number is not 1.
        """
        if session == self._session:
            return
        if self._session and (number != 1 or parse_run(session) != parse_run(self._session)):
            raise LearnerBusy(
                f"this learner works for the run {parse_run(self._session)!r}; two runs would update the "
                "same weights",
                hint="Each run needs a learner of its own.",
            )
        if number != 1:
            raise LearnerLost("this learner has been restarted, and has lost the state from before this call")
        if self._last is not None and not self._last.is_done:
            raise LearnerBusy(
                f"call {self._last.number}, {self._last.name!r}, of an earlier start is under way"
            )
        self._session, self._last = session, None

    def _run(self, call: Call, body: bytes) -> None:
        began = time.monotonic()
        try:
            result = self._relay.call(call.name, body, call)
            line = CALLS.write_result(call.name, result)
        except Exception as error:  # every error must reach the caller
            line = CALLS.write_error(call_error(error, call.name), call.name)
        log.info("call_ended", call=call.name, number=call.number, seconds=round(time.monotonic() - began, 3))
        call.end(line)


def create_app(calls: Calls, keys: Keys) -> Starlette:
    """Build the ASGI app of a learner process."""

    def begin(request: Request, name: str, body: bytes) -> AsyncIterator[bytes]:
        return calls.call(_session(request), _number(request), name, body).lines()

    async def stop(request: Request) -> Response:
        calls.stop(_session(request), _number(request))
        return Response(status_code=204)

    async def leave(request: Request) -> Response:
        calls.leave(_session(request))
        return Response(status_code=204)

    async def about(request: Request) -> Response:
        return Response(calls.about().model_dump_json(), media_type="application/json")

    routes = [
        Route("/stop", stop, methods=["POST"]),
        Route("/leave", leave, methods=["POST"]),
        Route("/about", about),
    ]
    return calls_app(CALLS, begin, keys, routes)


def _session(request: Request) -> str:
    """Read the session name RUN/START of the calling orchestrator from the request's header."""
    values = request.headers.getlist(SESSION_HEADER)
    run, _, start = values[0].rpartition("/") if len(values) == 1 else ("", "", "")
    if not run or not start:
        raise _malformed(SESSION_HEADER, values, "the run of an orchestrator and its start, RUN/START")
    return values[0]


def _number(request: Request) -> int:
    values = request.headers.getlist(NUMBER_HEADER)
    if len(values) != 1 or not values[0].isdecimal() or len(values[0]) > _MOST_DIGITS:
        raise _malformed(NUMBER_HEADER, values, f"a whole number of at most {_MOST_DIGITS} digits")
    return int(values[0])


def _malformed(header: str, values: Sequence[str], allowed: str) -> MalformedRequest:
    state = f"is {', '.join(values)[:_SHOWN]!r}" if values else "is missing"
    return MalformedRequest(f"{header} {state}, and must be {allowed}", where=f"header {header}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve calls until this process is stopped. The first rank relays the calls to the other ranks."""
    parser = argparse.ArgumentParser(prog="python -m trainer_backend.learner.process")
    parser.add_argument("--host", default="127.0.0.1", help="the address that it listens on")
    parser.add_argument(
        "--port", type=int, default=0, help='a port for launcher = "external"; it then outlives its parent'
    )
    options = parser.parse_args(arguments)
    configure_logs_from()
    ranks = join_ranks()
    relay = Relay(ranks, Host(ranks).do)
    if not ranks.is_first:
        relay.follow()
    key = key_from_environ(os.environ, LEARNER_KEY)
    if key is None and options.port:
        parser.error(f"there is no key: set {LEARNER_KEY}, here and for the run")
    keys = Keys([] if key is None else [key], variable=LEARNER_KEY)
    listener = Listener(options.host, options.port)
    server = Server(
        create_app(Calls(relay), keys), ConnectionSettings(), ready=lambda: announce(listener.url)
    )
    server.run_on(listener)
    return 0


if __name__ == "__main__":
    end_imports()
    try:
        main(sys.argv[1:])
    except ServiceError as error:
        log.error("learner_not_started", error=str(error))
        os._exit(1)
    os._exit(0)  # do not wait for the thread of an abandoned call
