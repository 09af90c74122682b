"""What a process of a reward function runs: `begin` once, then `answer` for each call.

What the function prints, whatever it prints with, goes to the pipe that the service reads into its log. The
process ends when the service does.
"""

import asyncio
import faulthandler
import inspect
import json
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from service_kit.logs import configure_logs
from shared_schemas.evaluate_result import EvaluateResult
from shared_schemas.json_text import encodable
from task_app.errors import RewardFunctionFailed, TaskAppError, boundary, clipped
from task_app.plugin_files import module_of
from task_app.protocols import RewardFunction
from task_app.reward_functions.decorator import EPISODES, NoResult, finding


class Session(SpawnProcess):
    """A process that `begin` makes the leader of a session: it ends with all that it started there."""

    def terminate(self) -> None:
        _kill_group(self.pid)
        self.kill()  # where it leads no session yet

    def is_alive(self) -> bool:
        alive = super().is_alive()
        if not alive:
            _kill_group(self.pid)
        return alive


class Sessions(SpawnContext):
    """Each process is a fresh interpreter: a fork may copy a lock that a thread of the service holds."""

    Process = Session


def _kill_group(pid: int | None) -> None:
    if pid is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def begin(file: Path, name: str, environment: Mapping[str, str], prints: Connection, start_s: float) -> None:
    """Leave what the service has, then import the file: within `start_s`, or the process ends."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(prints.fileno(), 1)
    os.dup2(prints.fileno(), 2)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    threading.Thread(target=_end_with_the_service, daemon=True).start()
    configure_logs("info")
    faulthandler.dump_traceback_later(start_s, exit=True)
    with suppress(TaskAppError):  # the first call says so
        _function(file, name)
    faulthandler.cancel_dump_traceback_later()


def _end_with_the_service() -> None:
    service = parent_process()
    assert service is not None
    wait([service.sentinel])
    os.killpg(0, signal.SIGKILL)


@cache
def _function(file: Path, name: str) -> RewardFunction:
    with boundary(f"{file}: REWARD_FUNCTIONS[{name!r}]"):
        function: RewardFunction = module_of(file).REWARD_FUNCTIONS[name]
    return function


@cache
def _runner() -> asyncio.Runner:
    """One event loop for all calls: what an `async def` opens is bound to it."""
    return asyncio.Runner()


def answer(
    file: Path, name: str, episodes: Sequence[Mapping[str, Any]], *, deadline_s: float, max_bytes: int
) -> str:
    """The results as JSON. At the deadline stderr is told where the function is; the service kills it.

    Raises:
        RewardFunctionFailed: the function gave none. Nothing of its own may cross over, neither an object
            nor an exception: the service would import its class.
    """
    # A thread that needs no interpreter lock: a regular expression that backtracks for ever holds it.
    faulthandler.dump_traceback_later(deadline_s)
    try:
        with boundary(f"reward function {name!r}"):
            results = _called(_function(file, name), episodes)
            told = json.dumps([result.model_dump(mode="json") for result in results])
    except TaskAppError as exc:
        raise _failed(_reason(exc, name)) from None
    except BaseException as exc:
        how = f"raised {type(exc).__name__}"
        if isinstance(exc, SystemExit):
            how = f"ended its process (exit code {exc.code or 0}) before it answered"
        raise _failed(f"reward function {name!r} {how}") from None
    finally:
        faulthandler.cancel_dump_traceback_later()
    if len(told) > max_bytes:
        raise _failed(f"reward function {name!r} answered more than {max_bytes} bytes")
    return told


def _failed(reason: str) -> RewardFunctionFailed:
    return RewardFunctionFailed(encodable(clipped(reason, 500)))


def _reason(exc: TaskAppError, name: str) -> str:
    """One sentence; for an answer that is none, without the exception that says so."""
    cause = exc.__cause__
    if isinstance(cause, NoResult):
        return f"reward function {name!r} {cause}"
    if isinstance(cause, ValidationError):
        # Of a result that the function itself made: the first line of pydantic's message names no field.
        return f"reward function {name!r} made no {cause.title}: {finding(cause)}"
    return exc.detail


def _called(function: RewardFunction, episodes: Sequence[Mapping[str, Any]]) -> Sequence[EvaluateResult]:
    if function.mode == "pointwise":
        return [_awaited(function(**episode)) for episode in episodes]
    columns = {fact: [episode[fact] for episode in episodes] for fact in episodes[0]}
    columns[EPISODES["batch"]] = columns.pop(EPISODES["pointwise"])
    results: Sequence[EvaluateResult] = _awaited(function(**columns))
    if len(results) != len(episodes):
        raise NoResult(f"returned {len(results)} results for {len(episodes)} episodes")
    return results


def _awaited(answer: Any) -> Any:
    if not inspect.isawaitable(answer):
        return answer

    async def wait() -> Any:
        return await answer

    return _runner().run(wait())
