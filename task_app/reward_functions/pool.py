"""Who is judged when, by which process: the reward functions of a service."""

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
from task_app.reward_functions.process import DEADLINE, RewardProcess
from task_app.reward_functions.rewarded import episode_of, rewarded
from task_app.settings import Settings

Episode = dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    episode: Episode
    result: "asyncio.Future[EvaluateResult]"


class RewardFunctions:
    """Those that the plug boards name, each with processes of its own, started when it is first needed."""

    def __init__(self, boards: PlugBoards, settings: Settings) -> None:
        self._boards = boards
        self._settings = settings
        self._pools: dict[str, RewardPool] = {}

    async def judged(
        self, name: str, trajectory: Trajectory, messages: Sequence[Message], truth: Any, *, rollout_id: str
    ) -> Trajectory:
        """The finished episode with what the named function says of it (`rewarded.rewarded`). To cancel the
        wait stops the call, unless it is also that of other episodes.

        Raises:
            UnknownName: there is no such function.
            RewardFunctionFailed: it gave no reward.
        """
        pool = self._pools.get(name)
        if pool is None:
            plugin = self._boards.reward_function(name)
            pool = self._pools[name] = RewardPool(name, plugin, self._settings)
        episode = episode_of(trajectory, messages, truth, rollout_id=rollout_id)
        try:
            return rewarded(trajectory, await pool.judged(episode), name=name, rollout_id=rollout_id)
        except RewardFunctionFailed as exc:
            exc.decisions_done = len(trajectory.steps)
            raise

    async def close(self) -> None:
        for pool in self._pools.values():
            await pool.close()


@dataclass(slots=True)
class RewardPool:
    """Calls of one function: at most `max_reward_processes` at once, in order of asking.

    A function in batch mode is given what waits for it when a process is free: never a wait for more, so a
    batch is one episode or several, of any group, and a result may not depend on who else is in it.

    A call lasts `reward_deadline_s` at most, and one that starts its process `reward_start_s` more; a batch
    that fails lasts three of these: its own, then one by one as many episodes as begin within a further
    deadline. An episode waits for (calls before it) / `max_reward_processes` of such times, then for its own.
    """

    name: str
    plugin: RewardPlugin
    settings: Settings
    clock: Callable[[], float] = time.monotonic
    _waiting: deque[_Asked] = field(default_factory=deque)
    _calls: set["asyncio.Task[None]"] = field(default_factory=set)
    _idle: list[RewardProcess] = field(default_factory=list)

    async def judged(self, episode: Episode) -> EvaluateResult:
        asked = _Asked(episode, asyncio.get_running_loop().create_future())
        self._waiting.append(asked)
        self._start_calls()
        return await asked.result

    async def close(self) -> None:
        """End all processes; running calls end with them, and their callers get an error."""
        for asked in self._waiting:
            self._give_up(asked)
        self._waiting.clear()
        for call in tuple(self._calls):
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        for process in self._idle:
            await process.end()
        self._idle.clear()

    def _start_calls(self) -> None:
        while self._waiting and len(self._calls) < self.settings.max_reward_processes:
            batch = self._next_batch()
            if not batch:
                return
            # A context of its own: the ids that a log binds are those of one rollout, a call may be of many.
            call = asyncio.get_running_loop().create_task(self._serve(batch), context=Context())
            self._calls.add(call)
            call.add_done_callback(partial(self._ended, batch))
            for asked in batch:
                asked.result.add_done_callback(partial(_cancel_if_nobody_waits, call, batch))

    def _next_batch(self) -> list[_Asked]:
        most = self.settings.max_reward_batch if self.plugin.mode == "batch" else 1
        batch: list[_Asked] = []
        while self._waiting and len(batch) < most:
            asked = self._waiting.popleft()
            if not asked.result.done():  # else cancelled while it waited
                batch.append(asked)
        return batch

    async def _serve(self, batch: Sequence[_Asked]) -> None:
        try:
            results = await self._call([asked.episode for asked in batch])
        except RewardFunctionFailed as exc:
            await self._one_by_one(batch, exc)
            return
        for asked, result in zip(batch, results, strict=True):
            if not asked.result.done():
                asked.result.set_result(result)

    async def _one_by_one(self, batch: Sequence[_Asked], failed: RewardFunctionFailed) -> None:
        """After a failed batch: an episode that the function cannot bear fails alone, where time allows it.

        What hung once is not asked again, for each episode could hang as long; nor is any begun after a
        further deadline. Those left fail as the batch did.
        """
        until_s = self.clock() + self.settings.reward_deadline_s
        for asked in batch:
            if asked.result.done():
                continue
            if len(batch) == 1 or failed.code == DEADLINE or self.clock() >= until_s:
                # A copy for each: whoever waits writes into it how far its episode came.
                asked.result.set_exception(RewardFunctionFailed(failed.detail, code=failed.code))
            else:
                await self._serve([asked])

    async def _call(self, episodes: Sequence[Episode]) -> Sequence[EvaluateResult]:
        """Ask a process that is free, or a new one; only one that answered, if with an error, is kept."""
        process = self._idle.pop() if self._idle else None
        if process is not None and not process.waits:
            await process.end()  # it died meanwhile
            process = None
        process = process or await RewardProcess.started(self.name, self.plugin, self.settings)
        try:
            return await process.ask(episodes)
        finally:
            if process.waits:
                self._idle.append(process)
            else:
                await process.end()

    def _ended(self, batch: Sequence[_Asked], call: "asyncio.Task[None]") -> None:
        self._calls.discard(call)
        for asked in batch:
            self._give_up(asked)
        if not call.cancelled() and call.exception() is not None:
            call.get_loop().call_exception_handler({"message": "reward call", "exception": call.exception()})
        self._start_calls()

    def _give_up(self, asked: _Asked) -> None:
        """Of a fault of ours, or of the service that stops: nobody may wait for ever."""
        if not asked.result.done():
            asked.result.set_exception(CriticalError(f"the call of reward function {self.name!r} ended"))


def _cancel_if_nobody_waits(
    call: "asyncio.Task[None]", batch: Sequence[_Asked], result: "asyncio.Future[EvaluateResult]"
) -> None:
    if all(asked.result.cancelled() for asked in batch):
        call.cancel()
