"""Starts and asks a child process that runs a reward function; `child` is the program of that process."""

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from service_kit.output import Output
from service_kit.process import PIPE, Child, name_exit, without_keys
from service_kit.replies import ReplyInvalid, read_reply
from shared_schemas.base import Body
from shared_schemas.evaluate_result import EvaluateResult
from shared_schemas.plain_text import encodable
from task_app.errors import RewardFunctionFailed, clipped
from task_app.plugins import RewardPlugin
from task_app.settings import Settings

# The error code if the function took too long.
DEADLINE = "reward_function_deadline"
# At the deadline the child writes its stack trace and ends. If it does not end, it is killed this much later.
GRACE_S = 1.0


class _Reply(Body):
    results: tuple[EvaluateResult, ...] | None = None
    error: str | None = None


class RewardProcess:
    """Runs a reward function in a child process, which the first request starts.

    If a request is cancelled or gets no valid answer in time, the process is killed, and the next request
    starts a new one.
    """

    def __init__(self, name: str, plugin: RewardPlugin, settings: Settings) -> None:
        self._name, self._plugin, self._settings = name, plugin, settings
        self._child: Child | None = None
        self._output: Output

    async def ask(self, episodes: Sequence[Mapping[str, Any]]) -> tuple[EvaluateResult, ...]:
        """Return the function's results, one for each episode; raise RewardFunctionFailed if it fails."""
        if self._child is not None and self._child.exit_code is not None:
            await self.end()  # the process died since the last request
        deadline_s = self._settings.reward_deadline_s
        request = json.dumps({"deadline_s": deadline_s, "episodes": list(episodes)})
        try:
            child = self._child or await self._start()
            self._output.begin_call()
            reply = await self._read_reply(
                child, deadline_s + GRACE_S, deadline_s, "did not answer", request=request
            )
        except BaseException:
            await self.end()
            raise
        if reply.results is None or len(reply.results) != len(episodes):
            raise RewardFunctionFailed(encodable(clipped(reply.error or "it answered nothing", 500)))
        return reply.results

    async def end(self) -> None:
        """Kill the process and all processes that it has started."""
        child, self._child = self._child, None
        if child is not None:
            child.stdin.close()
            await child.end_all()

    async def _start(self) -> Child:
        """Start the process, and wait until it has imported the function."""
        self._output = Output("reward_function", self._name)
        self._child = child = await Child.start(
            (
                sys.executable, "-P", "-u", "-m", "task_app.reward_functions.child",
                self._plugin.source, self._name,
            ),
            stdout=PIPE, prints=self._output, line_bytes=self._settings.max_reward_bytes, is_ours=False,
            env={
                **without_keys(os.environ, self._settings.reward_variables),
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
        )  # fmt: skip
        start_s = self._settings.reward_start_s
        reply = await self._read_reply(child, start_s, start_s, "did not start")
        if reply.error is not None:
            raise RewardFunctionFailed(f"the process of reward function {self._name!r}: {reply.error}")
        return child

    async def _read_reply(
        self, child: Child, timeout_s: float, deadline_s: float, failure: str, *, request: str = ""
    ) -> _Reply:
        """Write the request, if it is not empty, and return the next line of the process as a reply.

        Wait at most `timeout_s`. If no line arrives in time, the error contains the words `failure`, such as
        "did not start", and `deadline_s`.
        """
        # Read the clock before the child starts its watchdog, so that an exit caused by the watchdog always
        # counts as an exit after the deadline.
        start_s = time.monotonic()
        if request:
            child.stdin.write(request.encode() + b"\n")
        try:
            async with asyncio.timeout(timeout_s):
                line = await child.stdout.readline()
                # A child that closed stdout may still run.
                code = 0 if line.endswith(b"\n") else await child.ended()
        except TimeoutError as exc:
            raise self._report_deadline(failure, deadline_s) from exc
        except ValueError as exc:  # StreamReader's error for a line beyond its limit
            raise self._report_failure(f"answered more than {self._settings.max_reward_bytes} bytes") from exc
        if not line.endswith(b"\n"):
            # After the deadline, the child's watchdog has ended the child.
            if time.monotonic() - start_s >= deadline_s:
                raise self._report_deadline(failure, deadline_s)
            raise self._report_failure(f"ended its process with {name_exit(code)} before it answered")
        try:
            return read_reply(_Reply, line, "")
        except ReplyInvalid as exc:
            no_result = f"answered what is no result: {exc.finding}"
            fault = no_result if exc.field else "wrote into the exchange of its process"
            raise self._report_failure(fault) from exc

    def _report_failure(self, what: str) -> RewardFunctionFailed:
        return RewardFunctionFailed(f"reward function {self._name!r} {what}")

    def _report_deadline(self, failure: str, timeout_s: float) -> RewardFunctionFailed:
        return RewardFunctionFailed(
            f"reward function {self._name!r} {failure} within {timeout_s:g} s and was killed; the log of the "
            "task app says where it was",
            code=DEADLINE,
        )
