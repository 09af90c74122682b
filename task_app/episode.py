"""The one loop of an episode: prompt -> policy -> environment -> StepData, until a reason to end holds.

Source: 2-rollout-worker-and-gigpo.md, Tasks 2.1 and 2.3; DESIGN.md 4.2 to 4.5.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from shared_schemas.messages import Message
from shared_schemas.rewards import StepRewards
from shared_schemas.task_definition import TaskDefinitionModel
from shared_schemas.trajectory import StepData, StopReason, Trajectory
from task_app.actions import ReadAction, read_action
from task_app.errors import (
    ContextLengthExceeded,
    CriticalError,
    DeadlineExceeded,
    EpisodeFailed,
    PolicyUnavailable,
    TaskAppError,
    boundary,
    encodable,
)
from task_app.execution import execute
from task_app.guards.threads import Threads
from task_app.protocols import (
    AgentPolicy,
    DecisionOutcome,
    Environment,
    Observation,
    PastDecision,
    PolicyObservation,
    RetryingPolicy,
)
from task_app.records import Choice, Decided, ended, finite, step_data
from task_app.snapshots.starts import EpisodeStart, world_of
from task_app.state_keys import EpisodeStateKeys
from task_app.termination import EpisodeFacts, stop_reason, termination_signal
from task_app.transcript import transcript

PAST_DECISIONS_SHOWN = 3
# What is kept of the environment before the next decision, if anything (task_app.snapshots.episodes).
Keep = Callable[[Environment, Sequence[StepData], Sequence[PastDecision]], Awaitable[str | None]]


class RLRolloutWorker:
    """Runs one episode once. `run_episode` collects the steps; afterwards `trajectory()` holds them.

    Args:
        task_definition: the limits of the episode, and the ground truth, which is handed through.
        environment: the one that it names, built; started here, not shared with another worker.
        agent_policy: asked once a decision.
        seed: of the world.
        start: how the environment is brought to its start; into the world of `seed` when absent.
        step_rewards: whether the steps' metadata carries decision_rewards.
        keep: is asked before every decision for a snapshot, which the step then carries.
        threads: where resets run, and the steps of an environment that does not promise quick ones; threads
            of the event loop's own without it.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        *,
        task_definition: TaskDefinitionModel,
        environment: Environment,
        agent_policy: AgentPolicy,
        seed: int,
        start: EpisodeStart | None = None,
        step_rewards: StepRewards | None = None,
        state_keys: EpisodeStateKeys | None = None,
        keep: Keep | None = None,
        threads: Threads | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._environment = environment
        self._policy = agent_policy
        self._seed = seed
        self._start_at = start or world_of(seed, threads)
        self._ground_truth = task_definition.ground_truth
        self._limits = task_definition.limits
        self._signals_the_end = termination_signal(self._limits)
        self._step_rewards = step_rewards or StepRewards()
        self._state_keys = state_keys or EpisodeStateKeys({})
        self._keep = keep
        self._threads = threads
        self._clock = clock
        self._tools = [tool.model_dump(mode="json") for tool in environment.tools()]
        self._past: deque[PastDecision] = deque(maxlen=PAST_DECISIONS_SHOWN)
        self._steps: list[StepData] = []
        self._invalid_decisions = 0
        self._environment_truncated = False
        self._model = ""
        self.failure: TaskAppError | None = None
        self._critical: CriticalError | None = None
        self._stop_reason: StopReason | None = None
        self._started_s = 0.0
        self._wall_s = 0.0
        self._observation: Observation

    @property
    def decisions_done(self) -> int:
        return len(self._steps)

    @property
    def steps(self) -> tuple[StepData, ...]:
        """The decisions so far; what there is of an episode that failed or was cancelled."""
        return tuple(self._steps)

    @property
    def stop_reason(self) -> StopReason | None:
        """Why the episode ended; None while it runs, and when it failed or was cancelled."""
        return self._stop_reason

    async def run_episode(self) -> tuple[list[StepData], list[Message], Any]:
        """Play until a reason to end holds.

        Returns:
            The steps, the whole conversation, and the ground truth of the task definition.

        Raises:
            EpisodeFailed: no trajectory came out; its `decisions_done` says how far it got.
            JournalFailed: so too, of an environment that is a living session.
        """
        assert self._stop_reason is None, "a worker runs one episode"
        self._started_s = self._clock()
        try:
            await self._start()
            facts = self._facts()
            while (reason := self._check_termination(facts)) is None:
                facts = await self._decide()
                # A scripted policy awaits nothing: without this, no cancel and no other rollout gets through.
                await asyncio.sleep(0)
            self._finish(reason)
        except TaskAppError as exc:
            if isinstance(exc, EpisodeFailed):
                exc.decisions_done = self.decisions_done
            self.failure = exc
            raise
        return list(self._steps), transcript(self._steps), self._ground_truth

    def trajectory(self) -> Trajectory:
        """The finished episode as data; only after `run_episode`."""
        assert self._stop_reason is not None, "run_episode has not finished"
        with boundary("environment.outcome_reward"):
            outcome_reward = finite(self._environment.outcome_reward())
        last = self._steps[-1]
        return Trajectory(
            env_name=self._environment.name,
            policy_name=self._policy.name,
            model=encodable(self._model),
            seed=self._seed,
            parent_rollout_id=self._start_at.parent_rollout_id,
            parent_turn=self._start_at.parent_turn,
            tools=self._environment.tools(),
            steps=tuple(self._steps),
            outcome_reward=outcome_reward,
            outcome_definition=self._environment.outcome_definition,
            achievements_counts=dict(self._observation.achievements_counts),
            env_steps=sum(len(step.env_rewards or ()) for step in self._steps),
            terminated=last.terminated,
            truncated=last.truncated,
            stop_reason=self._stop_reason,
            wall_s=self._wall_s,
        )

    async def _start(self) -> None:
        """Bring the environment to where the episode begins."""
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                begun = await self._start_at.begin(self._environment)
        except TimeoutError as exc:
            raise DeadlineExceeded("the world was not ready within limits.timeout_s") from exc
        self._observation = begun.observation
        self._past.extend(begun.past)

    async def _decide(self) -> EpisodeFacts:
        """Try to complete one decision; say what is known after it."""
        observation = self._prepare_policy_observation()
        asked_s = self._clock()
        try:
            async with asyncio.timeout(max(0.0, self._limits.timeout_s - self._elapsed_s())):
                choice, read = await self._ask(observation)
        except TimeoutError as exc:
            self._refuse_an_outage(exc)
            return self._facts(elapsed_s=max(self._limits.timeout_s, self._elapsed_s()))
        except ContextLengthExceeded:
            if not self._steps:
                raise
            return self._facts(context_exceeded=True)
        answered_s = self._clock()
        kept = await self._keep(self._environment, self._steps, self._past) if self._keep else None
        try:
            outcome = await self._execute_action_in_environment(read)
        except CriticalError as exc:
            self._critical = exc
            return self._facts(critical_error=True)
        with boundary("state_keys"):
            state_keys = self._state_keys.next(self._observation)
        decided = Decided(
            turn=len(self._steps) + 1,
            before=self._observation,
            state_keys=state_keys,
            messages=observation.messages,
            choice=choice,
            read=read,
            outcome=outcome,
            snapshot=kept,
            policy_s=answered_s - asked_s,
            environment_s=self._clock() - answered_s,
        )
        return self._record(decided)

    def _prepare_policy_observation(self) -> PolicyObservation:
        """The next prompt, and the data behind it."""
        with boundary("environment.messages"):
            messages = self._environment.messages(self._observation, tuple(self._past))
        return PolicyObservation(messages, self._observation.data)

    def _refuse_an_outage(self, deadline: TimeoutError) -> None:
        """A deadline met while the model could not be asked is no slowness of the policy."""
        pending = self._policy.pending_failure if isinstance(self._policy, RetryingPolicy) else None
        if pending is not None:
            raise PolicyUnavailable(f"limits.timeout_s passed during an outage: {pending}") from deadline

    async def _ask(self, observation: PolicyObservation) -> tuple[Choice, ReadAction]:
        with boundary(f"policy {self._policy.name}"):
            action, raw, log_probs, value = await self._policy.get_action(observation, self._tools)
            return Choice(action, raw, log_probs or {}, value), read_action(action)

    async def _execute_action_in_environment(self, read: ReadAction) -> DecisionOutcome:
        return await execute(
            self._environment,
            read,
            before=self._observation,
            timeout_s=self._limits.timeout_s,
            threads=self._threads,
        )

    def _record(self, decided: Decided) -> EpisodeFacts:
        """Append the decision to everything that remembers it."""
        with boundary(f"the record of decision {decided.turn}"):
            step = step_data(decided, policy_name=self._policy.name, step_rewards=self._step_rewards)
        self._steps.append(step)
        outcome = decided.outcome
        self._past.append(PastDecision(tool_calls=decided.read.requests, outcome=outcome))
        self._observation = outcome.observation
        self._model = decided.choice.log_probs.get("model") or self._model
        self._invalid_decisions += outcome.invalid_reason is not None
        self._environment_truncated = outcome.truncated and not outcome.terminated
        return self._facts(
            environment_done=outcome.terminated or outcome.truncated,
            terminate_action=decided.read.terminate,
            pattern_found=self._signals_the_end(decided.choice.raw_output, decided.choice.action),
        )

    def _facts(self, *, elapsed_s: float | None = None, **found: Any) -> EpisodeFacts:
        return EpisodeFacts(
            decisions_done=len(self._steps),
            invalid_decisions=self._invalid_decisions,
            elapsed_s=self._elapsed_s() if elapsed_s is None else elapsed_s,
            **found,
        )

    def _check_termination(self, facts: EpisodeFacts) -> StopReason | None:
        return stop_reason(facts, self._limits)

    def _finish(self, reason: StopReason) -> None:
        """Mark the last step with the reason; an episode without a decision has failed."""
        if self._critical is not None:
            raise self._critical
        if not self._steps:
            raise DeadlineExceeded("limits.timeout_s passed before the first decision was complete")
        last = ended(self._steps[-1], reason, environment_truncated=self._environment_truncated)
        self._steps[-1] = last
        self._stop_reason = reason
        self._wall_s = self._elapsed_s()

    def _elapsed_s(self) -> float:
        return self._clock() - self._started_s
