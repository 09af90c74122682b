"""The loop of an episode: prompt -> policy -> environment -> StepData, until a stop reason holds.

    worker = RLRolloutWorker(task_definition, agent_policy, max_episode_steps)
    steps, messages, ground_truth = await worker.run_episode()

Source: 2-rollout-worker-and-gigpo.md, Tasks 2.1 and 2.3; DESIGN.md 4.2 to 4.5, 4.16.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import structlog

from shared_schemas.json_text import plain_number
from shared_schemas.messages import Message
from shared_schemas.plain_text import encodable
from shared_schemas.rewards import StepRewards
from shared_schemas.rollouts import MultiTurn
from shared_schemas.task_definition import TaskDefinitionModel
from shared_schemas.trajectory import PolicyLogprobs, StepData, StopReason, Trajectory, is_cut_short
from task_app.environment_calls import take_decision
from task_app.episode.actions import Action, Choice, read_action
from task_app.episode.context_tools import Budget
from task_app.episode.conversation import Conversation
from task_app.episode.prompts import DecisionEffect, FreshPrompts, Prompts, TokenCount
from task_app.episode.records import Decision, mark_end, policy_logprobs, step_data
from task_app.episode.release import begin_close
from task_app.episode.state_keys import EpisodeStateKeys
from task_app.episode.termination import EpisodeFacts, stop_reason, termination_signal
from task_app.errors import (
    Conflict,
    ContextLengthExceeded,
    CriticalError,
    DeadlineExceeded,
    EpisodeFailed,
    InvalidRequest,
    PolicyUnavailable,
    TaskAppError,
    UnknownName,
    boundary,
)
from task_app.observing.spans import Spans
from task_app.plugins import default_plug_boards
from task_app.protocols import (
    AgentPolicy,
    AnsweredEnvironment,
    ConversationalEnvironment,
    DecisionOutcome,
    Environment,
    Observation,
    PastDecision,
    PolicyObservation,
    RetryingPolicy,
    policy_name,
    steps_quickly,
)
from task_app.snapshots.starts import EpisodeStart, start_at_seed
from task_app.threads import Threads, in_thread

log = structlog.get_logger("task_app")

# Returns a snapshot from before the next decision if the request asks for it, otherwise None.
# `SnapshotTaker` in task_app.rollouts.assembly is such a function.
Keep = Callable[[Environment, Sequence[StepData], Sequence[PastDecision]], Awaitable[str | None]]


class RLRolloutWorker:
    """Plays one episode with `run_episode`; afterwards `trajectory()` returns the episode's record.

    Args:
        task_definition: the environment and its config, the opening messages, the limits, and the ground
            truth. The worker does not read the ground truth; `run_episode` returns it.
        max_episode_steps: limit of decisions; None: the limit in `task_definition`.
        environment: used in place of the environment that the task names; no other worker may use it.
        seed: seed of the world; workers with the same task and seed are siblings.
        start: brings the environment to the start of the episode; by default to the world of `seed`.
        step_rewards: decides whether the metadata of steps contains decision_rewards.
        prompts: by default `Conversation` for a conversational environment, otherwise `FreshPrompts`.
        multi_turn: limits of a conversation.
        keep: takes snapshots. It is called in each decision before the action is executed; the step stores
            the snapshot. If the limit of decisions or tokens ended the episode, it is called once more, and
            the trajectory stores the snapshot.
        final_view: whether to record, if the episode was cut short, the exact tokens of the prompt that would
            have followed. The worker gets them by sending the prompt to the policy and requesting one token.
        spans: records traces of model calls and environment calls.
        threads: run resets and slow steps; by default each of these calls gets a new thread.
    """

    def __init__(
        self,
        task_definition: TaskDefinitionModel,
        agent_policy: AgentPolicy,
        max_episode_steps: int | None = None,
        *,
        environment: Environment | None = None,
        seed: int = 0,
        start: EpisodeStart | None = None,
        step_rewards: StepRewards | None = None,
        state_keys: EpisodeStateKeys | None = None,
        prompts: Prompts | None = None,
        multi_turn: MultiTurn | None = None,
        keep: Keep | None = None,
        final_view: bool = False,
        spans: Spans | None = None,
        threads: Threads | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if max_episode_steps is not None:
            changed = {**dict(task_definition), "max_episode_steps": max_episode_steps}
            task_definition = TaskDefinitionModel.model_validate(changed)
        self.task_definition = task_definition
        opening = task_definition.messages
        self._first_prompt = opening
        if environment is None:
            environment, opening = _create_environment(task_definition)
        self._environment, self._seed = environment, seed
        self.agent_policy, self._policy_name = agent_policy, policy_name(agent_policy)
        self._start_at = start or start_at_seed(seed, threads)
        self._limits = task_definition.limits
        self._signals_the_end = termination_signal(self._limits)
        self._step_rewards = step_rewards or StepRewards()
        self._state_keys = state_keys or EpisodeStateKeys({})
        self._keep, self._wants_final_view = keep, final_view
        self._final_view: PolicyLogprobs | None = None
        self._final_snapshot: str | None = None
        self._outcome_before = 0.0
        self._spans = spans or Spans()
        self._threads, self._clock = threads, clock
        self._multi_turn = multi_turn or MultiTurn()
        if prompts is None and isinstance(environment, ConversationalEnvironment):
            prompts = Conversation(environment, self._multi_turn, opening=opening)
        self._prompts = prompts or FreshPrompts(environment, opening)
        self._tools: list[dict[str, Any]] = []
        self._tokens = TokenCount()
        self._steps: list[StepData] = []
        self._invalid_decisions = 0
        self._environment_truncated = False
        self._model = ""
        self.failure: TaskAppError | None = None
        self._critical: CriticalError | None = None
        # None while the episode runs, and if it failed or was cancelled.
        self.stop_reason: StopReason | None = None
        self._has_begun = False
        self._start_s = self._wall_s = 0.0
        self._observation = Observation(text="", data={})

    @property
    def decisions_done(self) -> int:
        return len(self._steps)

    @property
    def max_episode_steps(self) -> int:
        """The effective limit of decisions."""
        return self.task_definition.max_episode_steps

    @property
    def current_messages_history(self) -> list[Message]:
        """The messages up to the end of the last complete decision, as a new list.

        Until the first decision is complete, these are the messages of the first prompt. Until the first
        prompt is made, they are the messages of the task.
        """
        return self._steps[-1].resulting_messages_history if self._steps else list(self._first_prompt)

    @property
    def collected_step_data(self) -> list[StepData]:
        """`steps` as a new list."""
        return list(self._steps)

    @property
    def steps(self) -> tuple[StepData, ...]:
        """The complete decisions so far; they stay available if the episode fails or is cancelled."""
        return tuple(self._steps)

    async def run_episode(self) -> tuple[list[StepData], list[Message], Any]:
        """Play the episode; return its steps, the whole conversation, and the task's ground truth.

        Raises:
            Conflict: `run_episode` was called before.
            TaskAppError: the episode failed; the attribute `failure` stores the error.
        """
        if self._has_begun:
            raise Conflict(
                "this worker has begun its episode before, and runs one", hint="Make another worker."
            )
        self._has_begun = True
        self._start_s = self._clock()
        try:
            async with self._prompts.open():
                await self._play()
        except TaskAppError as exc:
            if isinstance(exc, EpisodeFailed):
                exc.decisions_done = self.decisions_done
            self.failure = exc
            raise
        finally:
            closing = begin_close(self._environment)
        if closing is not None:
            await closing  # the next episode may need the freed resources
        return self.collected_step_data, self.current_messages_history, self.task_definition.ground_truth

    async def _play(self) -> None:
        await self._start()
        facts = self._facts()
        while (reason := self._check_termination(facts)) is None:
            facts = await self._decide()
            # A scripted policy never awaits, so let cancellations and other rollouts run here.
            await asyncio.sleep(0)
        truncated = reason is not StopReason.ENVIRONMENT_DONE or self._environment_truncated
        if is_cut_short(reason, truncated=truncated):
            if self._wants_final_view:
                self._final_view = await self._fetch_final_view()
            if reason is not StopReason.ENVIRONMENT_DONE:
                self._final_snapshot = await self._snapshot()
        self._finish(reason)

    def trajectory(self) -> Trajectory:
        """Return the record of the finished episode. Raises Conflict if `run_episode` has not finished it."""
        if self.stop_reason is None:
            raise Conflict("the episode has not finished, so it has no trajectory", hint="Await run_episode.")
        outcome_reward, outcome_definition = self._outcome()
        last = self._steps[-1]
        return Trajectory(
            env_name=self._environment.name,
            policy_name=self._policy_name,
            model=encodable(self._model),
            seed=self._seed,
            parent_rollout_id=self._start_at.parent_rollout_id,
            parent_turn=self._start_at.parent_turn,
            tools=self._prompts.tools,
            steps=tuple(self._steps),
            outcome_reward=outcome_reward,
            outcome_definition=outcome_definition,
            outcome_before=self._outcome_before,
            achievements_counts=dict(self._observation.achievements_counts),
            env_steps=sum(len(step.env_rewards or ()) for step in self._steps),
            terminated=last.terminated,
            truncated=last.truncated,
            stop_reason=self.stop_reason,
            wall_s=self._wall_s,
            final_view=self._final_view,
            final_snapshot=self._final_snapshot,
            **self._prompts.trajectory_fields(),
        )

    def _outcome(self) -> tuple[float, str]:
        """Return the outcome reward and its definition.

        If the environment defines none, `Prompts.outcome` does: in a conversation, it is the last score.
        """
        definition = self._environment.outcome_definition
        if not definition:
            return self._prompts.outcome()
        with boundary("environment.outcome_reward", self._environment.outcome_reward):
            return plain_number(self._environment.outcome_reward(), "it"), definition

    async def _start(self) -> None:
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                self._observation, past = await self._start_at.begin(self._environment)
        except TimeoutError as exc:
            raise DeadlineExceeded("the world was not ready within limits.timeout_s") from exc
        if self._start_at.is_snapshot:
            self._outcome_before = self._outcome()[0]
        self._prompts.begin(past)
        self._tools = [tool.model_dump(mode="json") for tool in self._prompts.tools]

    async def _decide(self) -> EpisodeFacts:
        """Try to complete one decision; return the facts that decide whether the episode ends."""
        prompt = self._prompts.prompt(self._observation)
        if not self._steps:
            self._first_prompt = tuple(prompt.messages)
        observation = self._prepare_policy_observation(prompt.messages)
        ask_s = self._clock()
        try:
            rest_s = self._limits.timeout_s - self._elapsed_s()
            with self._spans.decision(self.agent_policy, len(self._steps) + 1) as notes:
                reply = await ask(self.agent_policy, observation, self._tools, timeout_s=rest_s)
                notes.answer(reply)
        except ContextLengthExceeded as exc:
            if not self._steps:
                raise
            penalty = self._prompts.context_length_penalty
            log.warning("context_length_exceeded", turn=len(self._steps), penalty=penalty, reason=exc.detail)
            return self._facts(context_exceeded=True)
        if reply is None:
            return self._facts(elapsed_s=max(self._limits.timeout_s, self._elapsed_s()))
        choice, action = reply
        reply_s = self._clock()
        snapshot = await self._snapshot()
        try:
            effect = await self._execute_action_in_environment(choice, action)
        except CriticalError as exc:
            self._critical = exc
            return self._facts(critical_error=True)
        with boundary("state_keys"):
            state_keys = self._state_keys.next(self._observation, prompt)
        decision = Decision(
            turn=len(self._steps) + 1,
            before=self._observation,
            state_keys=state_keys,
            prompt=prompt,
            choice=choice,
            action=action,
            effect=effect,
            snapshot=snapshot,
            policy_s=reply_s - ask_s,
            environment_s=self._clock() - reply_s - effect.interaction_s,
        )
        return self._record(decision)

    async def _snapshot(self) -> str | None:
        return await self._keep(self._environment, self._steps, self._prompts.past) if self._keep else None

    async def _fetch_final_view(self) -> PolicyLogprobs | None:
        """Ask the policy for one more token; return the exact tokens of the next prompt and this token.

        Return None if the prompt is too long (so that no decision could follow), if the time limit passes, or
        if the policy does not return exact tokens.
        """
        prompt = self._prompts.prompt(self._observation)
        observation = PolicyObservation(prompt.messages, self._observation.data, max_tokens=1)
        rest_s = self._limits.timeout_s - self._elapsed_s()
        try:
            reply = await ask(self.agent_policy, observation, self._tools, timeout_s=rest_s)
        except ContextLengthExceeded:
            return None
        return None if reply is None else policy_logprobs(reply[0].log_probs)

    def _prepare_policy_observation(self, current_messages_history: Sequence[Message]) -> PolicyObservation:
        """Return what the policy gets: the messages, the data, and how many tokens it may still sample."""
        limit = self._multi_turn.max_episode_tokens
        max_tokens = None if limit is None else limit - self._tokens.sampled
        return PolicyObservation(current_messages_history, self._observation.data, max_tokens=max_tokens)

    async def _execute_action_in_environment(self, choice: Choice, action: Action) -> DecisionEffect:
        limits, before = self._limits, self._observation
        self._tokens.count(choice.log_probs)
        budget = Budget(
            used_tokens=self._tokens.context,
            max_tokens=getattr(self.agent_policy, "max_model_length", None),
            decisions_left=limits.max_decisions - len(self._steps) - 1,
        )

        async def execute(action: Action) -> DecisionOutcome:
            with self._spans.environment(self._environment.name, action, len(self._steps) + 1) as notes:
                outcome = await self._step(action)
                notes.outcome(outcome)
                return outcome

        return await self._prompts.carry_out(choice, action, before, execute, budget)

    async def _step(self, action: Action) -> DecisionOutcome:
        """Let the environment carry out the action.

        The call runs in a thread, unless the environment has `quick_step`: then it runs on the event loop.

        Raises:
            DeadlineExceeded: the call in the thread took longer than `limits.timeout_s`.
        """
        environment = self._environment
        if action.terminate:
            # No env step runs, so the last reward must not count again.
            return DecisionOutcome(replace(self._observation, reward_last_step=0.0), env_rewards=())
        if action.text is not None and isinstance(environment, AnsweredEnvironment):
            step = partial(take_decision, environment.answer, action.text)
        else:
            reason = action.invalid_reason
            step = partial(take_decision, environment.step, action.requests, invalid_reason=reason)
        if steps_quickly(environment):
            return step()
        try:
            # Each step by itself may take as long as the time limit of the whole episode, so that a slow
            # policy does not shorten the environment's time.
            async with asyncio.timeout(self._limits.timeout_s):
                return await in_thread(self._threads, "environment.step", step)
        except TimeoutError as exc:
            raise DeadlineExceeded("environment.step did not return within limits.timeout_s") from exc

    def _record(self, decision: Decision) -> EpisodeFacts:
        """Store the decision as a step and update the counters; return the facts after the decision."""
        with boundary(f"the record of decision {decision.turn}"):
            step = step_data(
                decision,
                policy_name=self._policy_name,
                step_rewards=self._step_rewards,
                costs=self._limits,
            )
        self._prompts.remember(step, self._steps[-1] if self._steps else None)
        self._steps.append(step)
        effect, outcome = decision.effect, decision.effect.outcome
        self._observation = outcome.observation
        self._model = decision.choice.log_probs.get("model") or self._model
        self._invalid_decisions += outcome.invalid_reason is not None
        self._environment_truncated = outcome.truncated and not outcome.terminated
        return self._facts(
            environment_done=outcome.terminated or outcome.truncated,
            interaction_done=effect.interaction_done,
            user_is_silent=effect.user_is_silent,
            terminate_action=decision.action.terminate,
            signal=self._signals_the_end(decision.choice.raw_output, decision.choice.action),
        )

    def _facts(self, *, elapsed_s: float | None = None, **events: Any) -> EpisodeFacts:
        return EpisodeFacts(
            decisions_done=len(self._steps),
            sampled_tokens=self._tokens.sampled,
            invalid_decisions=self._invalid_decisions,
            elapsed_s=self._elapsed_s() if elapsed_s is None else elapsed_s,
            **events,
        )

    def _check_termination(self, facts: EpisodeFacts) -> StopReason | None:
        return stop_reason(facts, self._limits, max_episode_tokens=self._multi_turn.max_episode_tokens)

    def _finish(self, reason: StopReason) -> None:
        """Mark the last step with the stop reason.

        Raises:
            CriticalError: the environment raised an unexpected error.
            DeadlineExceeded: no decision is complete.
        """
        if self._critical is not None:
            raise self._critical
        if not self._steps:
            raise DeadlineExceeded("limits.timeout_s passed before the first decision was complete")
        last = mark_end(
            self._steps[-1],
            reason,
            environment_truncated=self._environment_truncated,
            penalty=self._prompts.context_length_penalty,
        )
        self._steps[-1] = last
        self.stop_reason = reason
        self._wall_s = self._elapsed_s()

    def _elapsed_s(self) -> float:
        return self._clock() - self._start_s


def _create_environment(task: TaskDefinitionModel) -> tuple[Environment, tuple[Message, ...]]:
    """Create the environment of a task; also return the messages that must be added to its prompts.

    If the environment's config has the key `prompt`, the messages become its value, and none is returned.
    """
    config, opening = dict(task.base_resource_config), task.messages
    boards = default_plug_boards()
    try:
        plugin = boards.environment_plugin(task.resource_type)
    except UnknownName as exc:
        exc.where = "resource_type"
        raise
    if opening and "prompt" in plugin.config.model_fields:
        if "prompt" in config:
            raise InvalidRequest(
                "messages and base_resource_config.prompt are both given, and an episode has one opening",
                where="messages",
            )
        config, opening = {**config, "prompt": opening}, ()
    # An error then names the path "base_resource_config": `boards.environment` appends "config" to `where`.
    return boards.environment(task.resource_type, config, where="base_resource_"), opening


async def ask(
    policy: AgentPolicy, observation: PolicyObservation, tools: list[dict[str, Any]], *, timeout_s: float
) -> tuple[Choice, Action] | None:
    """Ask the policy for an action; return None if the answer takes longer than `timeout_s`.

    Raises:
        PolicyUnavailable: `timeout_s` passed while the policy was repeating failed requests to its server.
    """
    try:
        return await decide(policy, observation, tools, timeout_s=timeout_s)
    except TimeoutError as exc:
        pending = policy.pending_failure if isinstance(policy, RetryingPolicy) else None
        if pending is not None:
            raise PolicyUnavailable(f"limits.timeout_s passed during an outage: {pending}") from exc
        return None


async def decide(
    policy: AgentPolicy, observation: PolicyObservation, tools: list[dict[str, Any]], *, timeout_s: float
) -> tuple[Choice, Action]:
    """Ask the policy for an action. Raises TimeoutError if the answer takes longer than `timeout_s`."""
    async with asyncio.timeout(max(0.0, timeout_s)):
        with boundary(f"policy {policy_name(policy)}", policy.get_action):
            action, raw, log_probs, value = await policy.get_action(observation, tools)
            return Choice(action, raw, log_probs or {}, value), read_action(action)
