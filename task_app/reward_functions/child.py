"""The process that a reward function runs in: `python -m task_app.reward_functions.child FILE NAME`.

It imports FILE, says {"mode": ...}, then answers each line of stdin with one line: {"results": [...]} or
{"error": sentence}. What the function prints goes to stderr, whatever it prints with. It ends when stdin
does, which is when the service ends, and at the deadline of a call, saying on stderr where the function was.
"""

import asyncio
import faulthandler
import inspect
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from service_kit.errors import ServiceError
from service_kit.logs import configure_logs
from shared_schemas.evaluate_result import EvaluateResult
from task_app.errors import boundary
from task_app.operator_plugins import module_of
from task_app.protocols import RewardFunction
from task_app.reward_functions.decorator import EPISODES, NoResult, finding


def main(file: str, name: str) -> None:
    """Serve until the service is gone."""
    asked, answers = _exchange()
    configure_logs("info")
    with asyncio.Runner() as runner:
        try:
            with boundary(f"{file}: REWARD_FUNCTIONS[{name!r}]"):
                function: RewardFunction = module_of(Path(file)).REWARD_FUNCTIONS[name]
        except ServiceError as exc:
            _say(answers, {"error": exc.detail})
            return
        _say(answers, {"mode": function.mode})
        for line in iter(_lines_of(asked).get, None):
            _say(answers, _answer(function, json.loads(line), runner, name))


def _exchange() -> tuple[BinaryIO, BinaryIO]:
    """stdin and stdout, for us alone: the function finds an empty stdin, and prints to stderr."""
    asked, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # A pipe that is closed at its other end, since /dev/null is an ordinary file, with others' output in it,
    # on a machine that was set up carelessly.
    empty, far_end = os.pipe()
    os.close(far_end)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    return asked, answers


def _lines_of(asked: BinaryIO) -> "queue.SimpleQueue[bytes | None]":
    """Lines as they come, read by a thread: it sees the end also while the function runs."""
    lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def read() -> None:
        for line in asked:
            lines.put(line)
        _end()

    threading.Thread(target=read, daemon=True).start()
    return lines


def _end() -> None:
    """With what the function may have started: the service made this process the leader of a group.

    Run by hand it may be in the group of a shell, which it leaves alone.
    """
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _say(answers: BinaryIO, told: Mapping[str, Any]) -> None:
    answers.write(json.dumps(told).encode() + b"\n")
    answers.flush()


def _answer(
    function: RewardFunction, asked: Mapping[str, Any], runner: asyncio.Runner, name: str
) -> dict[str, Any]:
    # A thread that needs no interpreter lock: a regular expression that backtracks for ever holds it.
    faulthandler.dump_traceback_later(asked["deadline_s"], exit=True)
    try:
        with boundary(f"reward function {name!r}"):
            results = _called(function, asked["episodes"], runner)
            return {"results": [result.model_dump(mode="json") for result in results]}
    except ServiceError as exc:
        return {"error": _told(exc, name)}
    finally:
        faulthandler.cancel_dump_traceback_later()


def _told(exc: ServiceError, name: str) -> str:
    """Return an error as one sentence; for an invalid answer the exception's name is left out."""
    cause = exc.__cause__
    if isinstance(cause, NoResult):
        return f"reward function {name!r} {cause}"
    if isinstance(cause, ValidationError):
        # Of a result that the function itself made: the first line of pydantic's message names no field.
        return f"reward function {name!r} made no {cause.title}: {finding(cause)}"
    return exc.detail


def _called(
    function: RewardFunction, episodes: Sequence[Mapping[str, Any]], runner: asyncio.Runner
) -> Sequence[EvaluateResult]:
    if function.mode == "pointwise":
        return [_waited(function(**episode), runner) for episode in episodes]
    columns = {fact: [episode[fact] for episode in episodes] for fact in episodes[0]}
    columns[EPISODES["batch"]] = columns.pop(EPISODES["pointwise"])
    results: Sequence[EvaluateResult] = _waited(function(**columns), runner)
    return results


def _waited(answer: Any, runner: asyncio.Runner) -> Any:
    if not inspect.isawaitable(answer):
        return answer

    async def wait() -> Any:
        return await answer

    return runner.run(wait())


if __name__ == "__main__":
    main(*sys.argv[1:])
