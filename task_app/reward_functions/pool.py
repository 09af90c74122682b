"""Distributes finished episodes over the processes that run the reward functions of a service."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shared_schemas.evaluate_result import EvaluateResult
from shared_schemas.messages import Message
from shared_schemas.trajectory import Trajectory
from task_app.errors import CriticalError, RewardFunctionFailed
from task_app.plugins import PlugBoards, RewardPlugin
from task_app.reward_functions.alignment import build_arguments, with_user_reward
from task_app.reward_functions.process import DEADLINE, RewardProcess
from task_app.settings import Settings

Episode = dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    episode: Episode
    result: "asyncio.Future[EvaluateResult]"


class RewardFunctions:
    """Calls the reward functions that requests name; each function has processes of its own.

    The processes of a function start when it is first called.
    """

    def __init__(self, boards: PlugBoards, settings: Settings) -> None:
        self._boards = boards
        self._settings = settings
        self._pools: dict[str, RewardPool] = {}

    async def judge(
        self, name: str, trajectory: Trajectory, messages: Sequence[Message], truth: Any, *, rollout_id: str
    ) -> Trajectory:
        """Return the finished episode with the rewards of the named function.

        If the caller cancels this coroutine, the call of the function is stopped, unless the same call also
        judges episodes of other callers.
        """
        pool = self._pools.get(name)
        if pool is None:
            plugin = self._boards.reward_function(name)
            pool = self._pools[name] = RewardPool(name, plugin, self._settings)
        episode = build_arguments(trajectory, messages, truth, rollout_id=rollout_id)
        try:
            return with_user_reward(trajectory, await pool.judge(episode), name=name, rollout_id=rollout_id)
        except RewardFunctionFailed as exc:
            exc.decisions_done = len(trajectory.steps)
            raise

    async def close(self) -> None:
        for pool in self._pools.values():
            await pool.close()


@dataclass(slots=True)
class RewardPool:
    """Calls one function in up to `max_reward_processes` processes, in the order of the requests.

    When a process is free, a function in batch mode gets all episodes that wait at the moment, up to
    `max_reward_batch`: one or more, of any group. So a result must not depend on the other episodes of its
    batch.

    A call lasts at most `reward_deadline_s`, plus `reward_start_s` if its process must be started. If a batch
    fails, calls for its single episodes begin within one further deadline, and the last of them may last
    another one. A failed batch thus takes up to three deadlines.
    """

    name: str
    plugin: RewardPlugin
    settings: Settings
    clock: Callable[[], float] = time.monotonic
    _queue: deque[_Request] = field(default_factory=deque)
    _calls: set["asyncio.Task[None]"] = field(default_factory=set)
    _idle: list[RewardProcess] = field(init=False)

    def __post_init__(self) -> None:
        processes = range(self.settings.max_reward_processes)
        self._idle = [RewardProcess(self.name, self.plugin, self.settings) for _ in processes]

    async def judge(self, episode: Episode) -> EvaluateResult:
        request = _Request(episode, asyncio.get_running_loop().create_future())
        self._queue.append(request)
        self._start_calls()
        return await request.result

    async def close(self) -> None:
        """End all processes; each waiting or running `judge` raises CriticalError."""
        for request in self._queue:
            self._fail_request(request)
        self._queue.clear()
        for call in tuple(self._calls):
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        for process in self._idle:
            await process.end()

    def _start_calls(self) -> None:
        while self._idle and (batch := self._take_batch()):
            process = self._idle.pop()  # the process that was used last, so probably a started one
            # A call may serve several rollouts, so its empty context gives log lines no rollout's id.
            call = asyncio.get_running_loop().create_task(
                self._judge_batch(process, batch), context=Context()
            )
            self._calls.add(call)
            call.add_done_callback(partial(self._finish_call, process, batch))
            for request in batch:
                request.result.add_done_callback(partial(_cancel_unwanted, call, batch))

    def _take_batch(self) -> list[_Request]:
        most = self.settings.max_reward_batch if self.plugin.mode == "batch" else 1
        batch: list[_Request] = []
        while self._queue and len(batch) < most:
            request = self._queue.popleft()
            if not request.result.done():  # otherwise it was cancelled in the queue
                batch.append(request)
        return batch

    async def _judge_batch(self, process: RewardProcess, batch: Sequence[_Request]) -> None:
        try:
            results = await process.ask([request.episode for request in batch])
        except RewardFunctionFailed as exc:
            await self._judge_singly(process, batch, exc)
            return
        for request, result in zip(batch, results, strict=True):
            if not request.result.done():
                request.result.set_result(result)

    async def _judge_singly(
        self, process: RewardProcess, batch: Sequence[_Request], error: RewardFunctionFailed
    ) -> None:
        """Judge each episode of a failed batch alone, so that only the faulty episodes fail.

        If the batch passed its deadline, its episodes are not judged alone, because each of them could take
        as long. After a further `reward_deadline_s` no call begins. All episodes that are not judged alone
        fail with the error of the batch.
        """
        until_s = self.clock() + self.settings.reward_deadline_s
        for request in batch:
            if request.result.done():
                continue
            if len(batch) == 1 or error.code == DEADLINE or self.clock() >= until_s:
                # Each request needs its own error, because `RewardFunctions.judge` changes the error.
                request.result.set_exception(RewardFunctionFailed(error.detail, code=error.code))
            else:
                await self._judge_batch(process, [request])

    def _finish_call(
        self, process: RewardProcess, batch: Sequence[_Request], call: "asyncio.Task[None]"
    ) -> None:
        self._calls.discard(call)
        self._idle.append(process)
        for request in batch:
            self._fail_request(request)
        if not call.cancelled() and call.exception() is not None:
            call.get_loop().call_exception_handler({"message": "reward call", "exception": call.exception()})
        self._start_calls()

    def _fail_request(self, request: _Request) -> None:
        """Fail a request that got no result because of an internal error or because the service stops."""
        if not request.result.done():
            request.result.set_exception(CriticalError(f"the call of reward function {self.name!r} ended"))


def _cancel_unwanted(
    call: "asyncio.Task[None]", batch: Sequence[_Request], result: "asyncio.Future[EvaluateResult]"
) -> None:
    """Cancel a call if all its requests are cancelled; `result` is unused."""
    if all(request.result.cancelled() for request in batch):
        call.cancel()
