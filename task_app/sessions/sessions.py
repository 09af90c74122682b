"""Sessions: environments and policies that clients drive over HTTP, with one request at a time for each."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from shared_schemas.messages import Message
from shared_schemas.rewards import StepRewards, decision_rewards
from shared_schemas.rollouts import EnvSpec, PolicySpec
from shared_schemas.trajectory import StepMetadata
from task_app.environment_calls import reset_environment, take_decision
from task_app.episode.decisions import NO_METADATA, step_metadata
from task_app.episode.release import begin_close
from task_app.errors import EpisodeOver, SessionBusy, boundary
from task_app.protocols import (
    PAST_DECISIONS_SHOWN,
    AgentPolicy,
    ClosableEnvironment,
    DecisionOutcome,
    Environment,
    Observation,
    PastDecision,
    PolicyAnswer,
    RetryingPolicy,
    ToolRequest,
    policy_name,
    steps_quickly,
)
from task_app.sessions.registry import SessionLock
from task_app.sessions.switches import agree_on_step_rewards
from task_app.threads import Threads, in_thread

# Number of recent decisions that the page GET /env/{env_id}/view shows.
MAX_RECENT = 12


class RecentDecision(NamedTuple):
    """A recent decision: its actions and rewards, and the achievements' counters `before` and `after` it."""

    turn: int
    before: Mapping[str, int]
    after: Mapping[str, int]
    env_rewards: tuple[float, ...]
    executed: tuple[str, ...]
    invalid_reason: str | None

    def achievements(self) -> tuple[tuple[str, bool], ...]:
        """Return the names of the achievements whose counter rose, each with a flag.

        The flag is True if the achievement was unlocked for the first time in the episode.
        """
        delta = decision_rewards(self.before, self.after, turn=self.turn)
        return tuple((name, name in delta.unique) for name in delta.all)


T = TypeVar("T")


class Journal(Protocol):
    """Stores the changes of a session; `task_app.sessions.journal.SessionJournal` describes each method."""

    def ready(self, session: "EnvironmentSession | PolicySession") -> None: ...

    def reset(self, session: "EnvironmentSession") -> None: ...

    def add_step(self, session: "EnvironmentSession", requests: Sequence[ToolRequest]) -> None: ...

    def add_decision(self, session: "PolicySession") -> None: ...

    def remove(self) -> None: ...


@dataclass(slots=True, eq=False)
class EnvironmentSession:
    """An environment that a client steps.

    `lock` is held for a whole reset or step. A reset or step is completed even if its request is cancelled.
    Resets run in a thread, and so do steps unless the environment promises quick steps. `switches` maps
    each source of reward switches to its settings. A source is the environment's request or the id of a bound
    policy; all sources must agree. `spec` contains no switches; it serves to build the environment again.
    """

    environment: Environment
    spec: EnvSpec
    switches: dict[str, StepRewards] = field(default_factory=dict)
    seed: int = 0
    step_idx: int = 0
    turn: int = 0
    over: bool = False
    metadata: StepMetadata = NO_METADATA
    past: deque[PastDecision] = field(default_factory=lambda: deque(maxlen=PAST_DECISIONS_SHOWN))
    rl_run_id: str | None = None
    lock: SessionLock = field(default_factory=SessionLock)
    threads: Threads | None = None
    journal: Journal | None = None
    # The event loop stores only weak references to tasks, so the session keeps its tasks alive.
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    on_decision: Callable[[int], None] = lambda env_steps: None
    recent: deque[RecentDecision] = field(default_factory=lambda: deque(maxlen=MAX_RECENT))
    observation: Observation = field(init=False)

    @property
    def step_rewards(self) -> StepRewards:
        return agree_on_step_rewards(self.switches)

    @property
    def steps_at_once(self) -> bool:
        """Whether the environment promises quick steps and the lock is free.

        If so, the caller may call `take` without the lock, but must not await before the call.
        """
        return steps_quickly(self.environment) and not self.lock.locked()

    async def reset(self, seed: int) -> Observation:
        """Reset the environment with `seed`, and clear the session's counters and history."""
        return await asyncio.shield(self._start_task(self._reset_in_thread(seed)))

    async def step(self, requests: Sequence[ToolRequest]) -> tuple[Observation, DecisionOutcome]:
        """Carry out one decision; return the observation before the decision, and the decision's outcome."""
        if not steps_quickly(self.environment):
            # The task is shielded, because the thread continues with the step if the caller is cancelled.
            return await asyncio.shield(self._start_task(self._step_in_thread(requests)))
        async with self.lock:
            return self.take(requests)

    def take(
        self, requests: Sequence[ToolRequest], *, invalid_reason: str | None = None
    ) -> tuple[Observation, DecisionOutcome]:
        """Carry out one decision synchronously; the results are those of `step`.

        The caller must hold the lock, or must have checked `steps_at_once` and not awaited since.
        """
        self._ready_journal()
        before = self.observation
        outcome = take_decision(self.environment.step, requests, invalid_reason=invalid_reason)
        return self._finish_step(before, requests, outcome)

    async def _reset_in_thread(self, seed: int) -> Observation:
        async with self.lock:
            self._ready_journal()
            self.observation = await in_thread(
                self.threads, "environment.reset", reset_environment, self.environment, seed
            )
            self.seed, self.step_idx, self.turn, self.metadata, self.over = seed, 0, 0, NO_METADATA, False
            self.past.clear()
            self.recent.clear()
            if self.journal is not None:
                self.journal.reset(self)
            return self.observation

    async def _step_in_thread(self, requests: Sequence[ToolRequest]) -> tuple[Observation, DecisionOutcome]:
        async with self.lock:
            self._ready_journal()
            before = self.observation
            outcome = await in_thread(
                self.threads, "environment.step", take_decision, self.environment.step, requests
            )
            return self._finish_step(before, requests, outcome)

    def _finish_step(
        self, before: Observation, requests: Sequence[ToolRequest], outcome: DecisionOutcome
    ) -> tuple[Observation, DecisionOutcome]:
        self.turn += 1
        self.step_idx += len(outcome.env_rewards)
        was, now = before.achievements_counts, outcome.observation.achievements_counts
        self.metadata = step_metadata(was, now, turn=self.turn, step_rewards=self.step_rewards)
        self.observation = outcome.observation
        self.over = outcome.terminated or outcome.truncated
        self.past.append(PastDecision(tool_calls=tuple(requests), outcome=outcome))
        self.on_decision(len(outcome.env_rewards))
        self.recent.append(
            RecentDecision(
                self.turn, was, now, outcome.env_rewards, outcome.executed_actions, outcome.invalid_reason
            )
        )
        if self.journal is not None:
            self.journal.add_step(self, requests)
        return before, outcome

    def _start_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget_task)
        return task

    def _forget_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # otherwise asyncio logs an exception that no caller retrieved

    def begin_close(self) -> None:
        """Start a task that closes the environment of a removed session, after a step that still runs."""
        if isinstance(self.environment, ClosableEnvironment):
            self._start_task(self._close_environment())

    async def wait_closed(self, within_s: float) -> None:
        """Wait at most `within_s` seconds for the session's resets, steps and closing to end."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=within_s)

    async def _close_environment(self) -> None:
        with suppress(SessionBusy):
            async with self.lock:
                pass
        closing = begin_close(self.environment)
        if closing is not None:
            await closing

    def _ready_journal(self) -> None:
        if self.journal is not None:
            self.journal.ready(self)

    def prompt(self) -> tuple[Message, ...]:
        if self.over:
            raise EpisodeOver("the episode has ended; no further decision is possible")
        with boundary("environment.messages"):
            return self.environment.messages(self.observation, tuple(self.past))


@dataclass(slots=True, eq=False)
class PolicySession:
    """A policy that either is bound to an environment session or gets observations from the caller.

    The session is itself an AgentPolicy, which counts and stores the decisions of `policy`; the caller must
    hold its lock. An unbound policy may have an `environment`, which is built from `env` and never reset. It
    only writes prompts and lists tools. `spec` contains the inference_key. The key is in no snapshot, and a
    restart loses it. `switches` are the policy's reward switches, which the bound environment applies.
    """

    policy: AgentPolicy
    spec: PolicySpec
    bound_env_id: str | None = None
    environment: Environment | None = None
    env: EnvSpec | None = None
    turn: int = 0
    rl_run_id: str | None = None
    switches: StepRewards | None = None
    lock: SessionLock = field(default_factory=SessionLock)
    journal: Journal | None = None
    has_lost_key: bool = False

    @property
    def name(self) -> str:
        return policy_name(self.policy)

    @property
    def pending_failure(self) -> str | None:
        """Return the failure because of which the policy is retrying a call (protocols.RetryingPolicy)."""
        return self.policy.pending_failure if isinstance(self.policy, RetryingPolicy) else None

    async def get_action(
        self, observation: Any, available_tools_specs: list[dict[str, Any]] | None = None
    ) -> PolicyAnswer:
        if self.journal is not None:
            self.journal.ready(self)
        answer = await self.policy.get_action(observation, available_tools_specs)
        self.turn += 1
        if self.journal is not None:
            self.journal.add_decision(self)
        return answer
