"""One child process of a reward function, as the service sees it: start, ask, end."""

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from service_kit.output import Output
from service_kit.process import PIPE, Child, name_exit, without_keys
from shared_schemas.base import Body
from shared_schemas.evaluate_result import EvaluateResult
from shared_schemas.json_text import encodable
from task_app.errors import RewardFunctionFailed, clipped
from task_app.plugins import RewardPlugin
from task_app.settings import Settings

# Error code of a function that took too long.
DEADLINE = "reward_function_deadline"
# The child ends itself at the deadline and writes where it was; we kill it this much later.
GRACE_S = 1.0
_END_S = 5.0


class _Reply(Body):
    results: tuple[EvaluateResult, ...] | None = None
    error: str | None = None


class RewardProcess:
    """Made by `start`. The owner ends it once `waits` is False."""

    def __init__(self, name: str, process: Child, output: Output, settings: Settings) -> None:
        self._name = name
        self._process = process
        self._output = output
        self._settings = settings
        self._has_answered = True

    @classmethod
    async def start(cls, name: str, plugin: RewardPlugin, settings: Settings) -> "RewardProcess":
        """Start a process, and wait until it has imported the function."""
        output = Output("reward_function", name)
        with output.given() as stderr:
            child = await Child.start(
                (sys.executable, "-P", "-u", "-m", "task_app.reward_functions.child", plugin.source, name),
                stdout=PIPE, stderr=stderr, line_bytes=settings.max_reward_bytes, is_ours=False,
                env=environment_of(os.environ, settings.reward_variables),
            )  # fmt: skip
        process = cls(name, child, output, settings)
        try:
            reply = await process._line(settings.reward_start_s, settings.reward_start_s, "did not start")
            if "error" in reply:
                raise RewardFunctionFailed(f"the process of reward function {name!r}: {reply['error']}")
        except BaseException:
            await process.end()
            raise
        return process

    async def ask(self, episodes: Sequence[Mapping[str, Any]]) -> tuple[EvaluateResult, ...]:
        """The function's results for these episodes, one for each."""
        self._output.begin_call()
        deadline_s = self._settings.reward_deadline_s
        request = json.dumps({"deadline_s": deadline_s, "episodes": list(episodes)})
        self._has_answered = False
        reply = await self._line(deadline_s + GRACE_S, deadline_s, "did not answer", request=request)
        self._has_answered = True
        try:
            parsed = _Reply.model_validate(reply)
        except ValidationError as exc:
            raise self._error(f"answered what is no result: {exc.errors()[0]['msg']}") from exc
        if parsed.results is None or len(parsed.results) != len(episodes):
            raise RewardFunctionFailed(encodable(clipped(parsed.error or "it answered nothing", 500)))
        return parsed.results

    @property
    def waits(self) -> bool:
        """Whether the process lives and has answered every call."""
        return self._has_answered and self._process.exit_code is None

    async def end(self) -> None:
        """Kill it with all that it has started, also where the wait is cancelled: its pipes must close."""
        self._process.stdin.close()
        task = asyncio.ensure_future(self._process.end_all(at_most_s=_END_S))
        cancellation = None
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as exc:
                cancellation = exc
        self._output.end()
        if cancellation is not None:
            raise cancellation
        task.result()

    async def _line(
        self, timeout_s: float, deadline_s: float, failure: str, *, request: str | None = None
    ) -> dict[str, Any]:
        """The next line of the process, a JSON object; where there is a request, its answer."""
        loop = asyncio.get_running_loop()
        start_s = loop.time()  # before the child can begin to count: it may reach its deadline first
        if request is not None:
            self._process.stdin.write(request.encode() + b"\n")
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._process.stdout.readline()
                # The child may have closed stdout and live on.
                code = 0 if line.endswith(b"\n") else await self._process.ended()
        except TimeoutError as exc:
            raise self._late(failure, deadline_s) from exc
        except ValueError as exc:  # StreamReader's error for a line beyond its limit
            raise self._error(f"answered more than {self._settings.max_reward_bytes} bytes") from exc
        if not line.endswith(b"\n"):
            # Its own watchdog ended it; only the deadline of a call triggers that.
            if loop.time() - start_s >= deadline_s:
                raise self._late(failure, deadline_s)
            raise self._error(f"ended its process with {name_exit(code)} before it answered")
        try:
            reply: dict[str, Any] = json.loads(line)
        except ValueError as exc:
            raise self._error("wrote into the exchange of its process") from exc
        return reply

    def _error(self, what: str) -> RewardFunctionFailed:
        return RewardFunctionFailed(f"reward function {self._name!r} {what}")

    def _late(self, failure: str, timeout_s: float) -> RewardFunctionFailed:
        return RewardFunctionFailed(
            f"reward function {self._name!r} {failure} within {timeout_s:g} s and was killed; the log of the "
            "task app says where it was",
            code=DEADLINE,
        )


def environment_of(ours: Mapping[str, str], more: Sequence[str]) -> dict[str, str]:
    """The child's environment variables: those without keys, the operator's own, and PYTHONPATH."""
    return without_keys(ours, more) | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
