"""Live environments and policies behind ids: bounded in number, forgotten when idle, one caller at a time."""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from shared_schemas.messages import Message
from shared_schemas.rewards import StepRewards
from shared_schemas.trajectory import StepMetadata
from task_app.decisions import NO_METADATA, step_metadata
from task_app.episode import PAST_DECISIONS_SHOWN
from task_app.errors import CapacityReached, EpisodeOver, UnknownId, boundary
from task_app.protocols import (
    AgentPolicy,
    DecisionOutcome,
    Environment,
    Observation,
    PastDecision,
    ToolRequest,
)
from task_app.switches import agreed_step_rewards


@dataclass(slots=True, eq=False)
class EnvironmentSession:
    """One environment that a client steps itself.

    `lock` is held for a whole reset or step: a reset runs in a thread, and nothing may step meanwhile.
    `switches` are those found so far, by who named them: the environment's request, then the ids of the
    policies bound to it. They agree, or the later request was refused.
    """

    environment: Environment
    switches: dict[str, StepRewards] = field(default_factory=dict)
    seed: int = 0
    step_idx: int = 0
    turn: int = 0
    over: bool = False
    metadata: StepMetadata = NO_METADATA
    past: deque[PastDecision] = field(default_factory=lambda: deque(maxlen=PAST_DECISIONS_SHOWN))
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    observation: Observation = field(init=False)

    @property
    def step_rewards(self) -> StepRewards:
        return agreed_step_rewards(self.switches)

    async def reset(self, seed: int) -> Observation:
        """Start the world of `seed`; counters and history begin anew."""
        async with self.lock:
            with boundary("environment.reset"):
                self.observation = await asyncio.to_thread(self.environment.reset, seed)
            self.seed, self.step_idx, self.turn, self.metadata = seed, 0, 0, NO_METADATA
            self.over = False
            self.past.clear()
            return self.observation

    async def step(self, requests: Sequence[ToolRequest]) -> tuple[Observation, DecisionOutcome]:
        """Carry out one decision; the observation before it, and what came of it.

        Raises:
            EpisodeOver: the episode has ended.
        """
        async with self.lock:
            before = self.observation
            with boundary("environment.step"):
                outcome = self.environment.step(requests)
            self.turn += 1
            self.step_idx += len(outcome.env_rewards)
            self.metadata = step_metadata(
                before.achievements_counts,
                outcome.observation.achievements_counts,
                turn=self.turn,
                step_rewards=self.step_rewards,
            )
            self.observation = outcome.observation
            self.over = outcome.terminated or outcome.truncated
            self.past.append(PastDecision(tool_calls=tuple(requests), outcome=outcome))
            return before, outcome

    def prompt(self) -> tuple[Message, ...]:
        """The messages of the next decision.

        Raises:
            EpisodeOver: there is none; a model need not be asked.
        """
        if self.over:
            raise EpisodeOver("the episode has ended; no further decision is possible")
        with boundary("environment.messages"):
            return self.environment.messages(self.observation, tuple(self.past))


@dataclass(slots=True, eq=False)
class PolicySession:
    """One policy. Bound, it reads the environment session's observation; else the caller brings one.

    `environment` was never reset: it only words prompts and names tools for an unbound policy.
    """

    policy: AgentPolicy
    bound_env_id: str | None = None
    environment: Environment | None = None
    turn: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


S = TypeVar("S")


class Sessions(Generic[S]):
    """Sessions of one kind, by id.

    Args:
        kind: names them in ids and errors.
        capacity: most at once.
        idle_s: forgotten after this long without a request.
        clock: seconds that only grow.
    """

    def __init__(
        self, kind: str, *, capacity: int, idle_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._kind = kind
        self._capacity = capacity
        self._idle_s = idle_s
        self._clock = clock
        self._sessions: dict[str, S] = {}
        self._used_s: dict[str, float] = {}

    def check_capacity(self) -> None:
        """Raises CapacityReached when no further session fits."""
        if len(self._sessions) >= self._capacity:
            raise CapacityReached(
                f"{self._capacity} {self._kind} sessions are open, the most that this task app holds",
                hint=f"POST /{self._kind}/terminate those that are not needed",
            )

    def add(self, session: S) -> str:
        """Keep the session; its new id.

        Raises:
            CapacityReached: no further session fits.
        """
        self.check_capacity()
        session_id = f"{self._kind}_{secrets.token_hex(8)}"
        self._sessions[session_id] = session
        self._used_s[session_id] = self._clock()
        return session_id

    def get(self, session_id: str, *, where: str) -> S:
        """The session, which counts as used now.

        Raises:
            UnknownId: never existed, was terminated, or was idle for too long.
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise UnknownId(self._kind, session_id, where=where, hint="terminated, or idle for too long?")
        self._used_s[session_id] = self._clock()
        return session

    def find(self, session_id: str) -> S | None:
        """The session if it is there; looking is no use of it."""
        return self._sessions.get(session_id)

    def remove(self, session_id: str, *, where: str) -> S:
        session = self.get(session_id, where=where)
        del self._sessions[session_id], self._used_s[session_id]
        return session

    def expire(self) -> dict[str, S]:
        """Forget what was idle for too long, and say what it was."""
        before_s = self._clock() - self._idle_s
        idle = [session_id for session_id, used_s in self._used_s.items() if used_s < before_s]
        return {session_id: self.remove(session_id, where="") for session_id in idle}
