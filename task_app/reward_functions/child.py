"""The program that runs a reward function: `python -m task_app.reward_functions.child SOURCE NAME`.

It imports SOURCE (a file, or `module:function`) and writes {}. Then it answers each line of stdin with one
line: {"results": [...]} or {"error": sentence}. Whatever the function prints goes to stderr. When the service
ends, stdin closes, and the process ends too. If a call passes its deadline, the process writes the stack
trace of the function to stderr and ends.
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
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from service_kit.errors import ServiceError
from service_kit.logs import configure_logs
from service_kit.plugin_file import load_module
from shared_schemas.evaluate_result import EvaluateResult
from task_app.errors import boundary
from task_app.protocols import RewardFunction
from task_app.reward_functions.decorator import EPISODES, NoResult, first_error


def main(source: str, name: str) -> None:
    """Load the reward function, and answer requests until stdin closes."""
    requests, replies = _take_streams()
    configure_logs("info")
    # The service does not end this process by SIGINT. With SIGINT ignored, only the function itself can raise
    # a KeyboardInterrupt.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with asyncio.Runner() as runner:
        try:
            with boundary(f"{source}: reward function {name!r}"):
                function: RewardFunction = (
                    load_module(Path(source), option="--plugins").REWARD_FUNCTIONS[name]
                    if source.endswith(".py")
                    else EntryPoint(name, source, "turnwise.reward_functions").load()
                )
        except ServiceError as exc:
            _write_reply(replies, {"error": exc.detail})
            return
        _write_reply(replies, {})
        for line in iter(_queue_lines(requests).get, None):
            _write_reply(replies, _answer_request(function, json.loads(line), runner, name))


def _take_streams() -> tuple[BinaryIO, BinaryIO]:
    """Return stdin and stdout, and hide them from the function: it reads an empty stdin, prints to stderr."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # Use a closed pipe, because on a badly set-up machine /dev/null may be an ordinary file with content.
    empty, far_end = os.pipe()
    os.close(far_end)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    return requests, replies


def _queue_lines(requests: BinaryIO) -> "queue.SimpleQueue[bytes | None]":
    """Return a queue that a thread fills with the lines of `requests`.

    When `requests` ends, the thread ends the process, even while the function runs.
    """
    lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def read() -> None:
        for line in requests:
            lines.put(line)
        _end_group()

    threading.Thread(target=read, daemon=True).start()
    return lines


def _end_group() -> None:
    """End this process, and if it leads its process group, all processes of the group.

    The service starts this process as the leader of a group, to which the processes started by the function
    belong. If this process was started by hand, the group may contain a shell, which must not be killed.
    """
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _write_reply(replies: BinaryIO, message: Mapping[str, Any]) -> None:
    replies.write(json.dumps(message).encode() + b"\n")
    replies.flush()


def _answer_request(
    function: RewardFunction, request: Mapping[str, Any], runner: asyncio.Runner, name: str
) -> dict[str, Any]:
    # This watchdog works even while an endless regular expression holds the interpreter lock.
    faulthandler.dump_traceback_later(request["deadline_s"], exit=True)
    try:
        with boundary(f"reward function {name!r}"):
            results = _call_function(function, request["episodes"], runner)
            return {"results": [result.model_dump(mode="json") for result in results]}
    except ServiceError as exc:
        return {"error": _describe_error(exc, name)}
    finally:
        faulthandler.cancel_dump_traceback_later()


def _describe_error(exc: ServiceError, name: str) -> str:
    """Return a sentence about an error; if the answer was invalid, the exception's name is left out."""
    cause = exc.__cause__
    if isinstance(cause, NoResult):
        return f"reward function {name!r} {cause}"
    if isinstance(cause, ValidationError):
        # The function built this result itself; the first line of pydantic's message names no field.
        return f"reward function {name!r} made no {cause.title}: {first_error(cause)}"
    return exc.detail


def _call_function(
    function: RewardFunction, episodes: Sequence[Mapping[str, Any]], runner: asyncio.Runner
) -> Sequence[EvaluateResult]:
    if function.mode == "pointwise":
        return [_wait_for(function(**episode), runner) for episode in episodes]
    columns = {fact: [episode[fact] for episode in episodes] for fact in episodes[0]}
    columns[EPISODES["batch"]] = columns.pop(EPISODES["pointwise"])
    results: Sequence[EvaluateResult] = _wait_for(function(**columns), runner)
    return results


def _wait_for(answer: Any, runner: asyncio.Runner) -> Any:
    if not inspect.isawaitable(answer):
        return answer

    async def wait() -> Any:
        return await answer

    return runner.run(wait())


if __name__ == "__main__":
    main(*sys.argv[1:])
