"""One child process of a reward function, from the service's side: start, ask, end."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import structlog
from pydantic import ValidationError

from shared_schemas.base import Body
from shared_schemas.evaluate_result import EvaluateResult
from shared_schemas.json_text import encodable
from task_app.errors import RewardFunctionFailed, clipped
from task_app.plugins import RewardPlugin
from task_app.settings import Settings

log = structlog.get_logger("task_app")

# What Python and its libraries need to run as they do here, and no service hides a key in.
HARMLESS = (
    "PATH", "HOME", "USER", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "HF_HOME",
)  # fmt: skip
# The code of what took too long.
DEADLINE = "reward_function_deadline"
# The child ends itself at the deadline, and says where it was; this long after it, we end it.
GRACE_S = 1.0
_PRINTED_AT_ONCE = 4_096
_PRINTED_A_CALL = 65_536
_END_S = 5.0


class _Reply(Body):
    results: tuple[EvaluateResult, ...] | None = None
    error: str | None = None


class RewardProcess:
    """Made by `started`. When it no longer waits for a question it is to be ended."""

    def __init__(self, name: str, process: Process, settings: Settings) -> None:
        self._name = name
        self._process = process
        self._settings = settings
        self._answered = True
        self._logged = self._left_out = 0
        self._prints = asyncio.create_task(self._log_prints())

    @classmethod
    async def started(cls, name: str, plugin: RewardPlugin, settings: Settings) -> "RewardProcess":
        """A process that has imported the file of the function.

        Raises:
            RewardFunctionFailed: it could not, or not within `settings.reward_start_s`.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-u", "-m", "task_app.reward_functions.child", str(plugin.file), name,
            stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=settings.max_reward_bytes,
            env=environment_of(os.environ, settings.reward_variables), start_new_session=True,
        )  # fmt: skip
        made = cls(name, process, settings)
        try:
            told = await made._line(settings.reward_start_s, settings.reward_start_s, "did not start")
            if "error" in told:
                raise RewardFunctionFailed(f"the process of reward function {name!r}: {told['error']}")
        except BaseException:
            await made.end()
            raise
        return made

    async def ask(self, episodes: Sequence[Mapping[str, Any]]) -> tuple[EvaluateResult, ...]:
        """What the function says of these episodes, one result for each.

        Raises:
            RewardFunctionFailed: it raised, died, took too long, or answered what is no result.
        """
        self._forget_prints()
        deadline_s = self._settings.reward_deadline_s
        asked = json.dumps({"deadline_s": deadline_s, "episodes": list(episodes)})
        assert self._process.stdin is not None
        self._answered = False
        self._process.stdin.write(asked.encode() + b"\n")
        told = await self._line(deadline_s + GRACE_S, deadline_s, "did not answer")
        self._answered = True
        try:
            reply = _Reply.model_validate(told)
        except ValidationError as exc:
            raise self._failed(f"answered what is no result: {exc.errors()[0]['msg']}") from exc
        if reply.results is None or len(reply.results) != len(episodes):
            raise RewardFunctionFailed(encodable(clipped(reply.error or "it answered nothing", 500)))
        return reply.results

    @property
    def waits(self) -> bool:
        """Whether the process lives and has answered every call."""
        return self._answered and self._process.returncode is None

    async def end(self) -> None:
        """Kill it, with whatever it started, and wait until nothing of it is left. Who is cancelled while
        it waits, a second time perhaps, still does: else its pipes and its exit were nobody's."""
        ending = asyncio.ensure_future(self._end())
        cancelled = None
        while not ending.done():
            try:
                await asyncio.wait([ending])
            except asyncio.CancelledError as exc:
                cancelled = exc
        if cancelled is not None:
            raise cancelled
        ending.result()

    async def _end(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        assert self._process.stdin is not None
        self._process.stdin.close()
        # What it started in a session of its own may hold the pipe for ever.
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await self._process.wait()
                await self._prints
        self._prints.cancel()
        # A pipe that somebody still holds, or that was too full to be read on, is closed from here; asyncio's
        # Process has no other way to say it. It happens at the loop's next turn.
        self._process._transport.close()  # type: ignore[attr-defined]
        await asyncio.sleep(0)

    async def _line(self, within_s: float, told_s: float, did_not: str) -> dict[str, Any]:
        """The next line of the process, which is a JSON object."""
        assert self._process.stdout is not None
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        try:
            async with asyncio.timeout(within_s):
                line = await self._process.stdout.readline()
                # It may have closed its end and live on.
                code = 0 if line.endswith(b"\n") else await self._process.wait()
        except TimeoutError as exc:
            raise self._late(did_not, told_s) from exc
        except ValueError as exc:  # how a StreamReader says that a line is longer than its limit
            raise self._failed(f"answered more than {self._settings.max_reward_bytes} bytes") from exc
        if not line.endswith(b"\n"):
            # By its own watchdog, which only the deadline of a call wakes.
            if loop.time() - begun_s >= told_s:
                raise self._late(did_not, told_s)
            raise self._failed(f"ended its process ({_how(code)}) before it answered")
        try:
            told: dict[str, Any] = json.loads(line)
        except ValueError as exc:
            raise self._failed("wrote into the exchange of its process") from exc
        return told

    def _failed(self, what: str) -> RewardFunctionFailed:
        return RewardFunctionFailed(f"reward function {self._name!r} {what}")

    def _late(self, did_not: str, within_s: float) -> RewardFunctionFailed:
        return RewardFunctionFailed(
            f"reward function {self._name!r} {did_not} within {within_s:g} s and was killed; the log of the "
            "task app says where it was",
            code=DEADLINE,
        )

    async def _log_prints(self) -> None:
        """What the function prints goes to our log; of one call no more than a bound, then only how much."""
        assert self._process.stderr is not None
        begun = b""
        while printed := await self._process.stderr.read(_PRINTED_AT_ONCE):
            whole, newline, begun = (begun + printed).rpartition(b"\n")
            if len(begun) > _PRINTED_AT_ONCE:
                whole, begun = whole + newline + begun, b""
            self._log(whole)
        self._log(begun)
        self._forget_prints()

    def _log(self, printed: bytes) -> None:
        if not printed.strip():
            return
        if self._logged + len(printed) > _PRINTED_A_CALL:
            self._left_out += len(printed)
            return
        self._logged += len(printed)
        text = printed.decode("utf-8", "replace")
        log.info("reward_function_printed", reward_function=self._name, text=text)

    def _forget_prints(self) -> None:
        """Count from 0 again, and say what the log does not hold."""
        if self._left_out:
            log.warning("reward_function_prints_left_out", reward_function=self._name, bytes=self._left_out)
        self._logged = self._left_out = 0


def environment_of(ours: Mapping[str, str], more: Sequence[str]) -> dict[str, str]:
    """The environment variables of the process: the harmless ones of ours, those that the operator lists, and
    where Python finds modules. No key is among the first."""
    chosen = {name: ours[name] for name in (*HARMLESS, *more) if name in ours}
    return chosen | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
