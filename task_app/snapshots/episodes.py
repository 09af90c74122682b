"""An episode's environment before chosen decisions, as a snapshot that another episode can begin at."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from shared_schemas.rewards import StepRewards
from shared_schemas.rollouts import EnvSpec
from shared_schemas.trajectory import StepData, StepMetadata
from task_app.errors import DeadlineExceeded, NotRestorable, boundary
from task_app.guards.threads import Threads, in_thread
from task_app.protocols import Environment, PastDecision, RestorableEnvironment, steps_quickly
from task_app.snapshots.envelope import to_text
from task_app.snapshots.sessions import EnvironmentFacts, EnvironmentSnapshot, seal_environment


@dataclass(frozen=True, slots=True)
class KeptMoments:
    """Takes the snapshots of one episode; a `task_app.episode.Keep`.

    Attributes:
        turns: before whose decisions; an episode that ends earlier has fewer.
        spec: what the environment was built from, every setting written out.
        step_rewards: switches of the episode, when anybody named them.
        at_most_bytes: of what one holds, unpacked.
        timeout_s: for one, where it is not taken at once.
        threads: where those are taken of an environment that does not promise quick steps.
    """

    turns: frozenset[int]
    spec: EnvSpec
    seed: int
    step_rewards: StepRewards | None
    at_most_bytes: int
    timeout_s: float
    threads: Threads | None

    async def __call__(
        self, environment: Environment, steps: Sequence[StepData], past: Sequence[PastDecision]
    ) -> str | None:
        """The environment after `steps`, which the next decision is about to change; None: not this one.

        Raises:
            CriticalError: the environment raises.
            DeadlineExceeded: it did not return in time.
            SnapshotRefused: it holds more than a task app takes back.
        """
        if len(steps) + 1 not in self.turns:
            return None
        assert isinstance(environment, RestorableEnvironment), "looked at when the request was read"
        state = await self._state(environment)
        facts = EnvironmentFacts(
            env=self.spec,
            seed=self.seed,
            step_idx=sum(len(step.env_rewards or ()) for step in steps),
            turn=len(steps),
            over=False,
            step_rewards=self.step_rewards,
            metadata=steps[-1].metadata if steps else StepMetadata(),
            past=tuple(past),
            rl_run_id=None,
        )
        taken = EnvironmentSnapshot(facts, state)
        return to_text(seal_environment(taken, at_most_bytes=self.at_most_bytes))

    async def _state(self, environment: RestorableEnvironment) -> bytes:
        """Its snapshot, taken where it also steps (task_app.execution)."""
        with boundary("environment.snapshot"):
            if steps_quickly(environment):
                return environment.snapshot()
            try:
                async with asyncio.timeout(self.timeout_s):
                    return await in_thread(self.threads, "environment.snapshot", environment.snapshot)
            except TimeoutError as exc:
                raise DeadlineExceeded("environment.snapshot did not return within limits.timeout_s") from exc


def refuse_unrestorable(environment: Environment, *, where: str) -> None:
    """
    Raises:
        NotRestorable: moments of this environment cannot be kept; `where` is the request's body path.
    """
    if not isinstance(environment, RestorableEnvironment):
        raise NotRestorable("environment", environment.name, where=where)
