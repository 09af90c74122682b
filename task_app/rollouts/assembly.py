"""Builds the worker that plays the episode of a rollout request, and refuses a faulty request.

`SnapshotTaker` takes snapshots during an episode, from which other episodes can start.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shared_schemas.rewards import StepRewards
from shared_schemas.rollouts import EnvSpec, MultiTurn, RolloutRequest
from shared_schemas.task_definition import TaskDefinitionModel
from shared_schemas.trajectory import StepData
from task_app.captures.agents import AgentEnvironment
from task_app.captures.door import Captures
from task_app.captures.session import CaptureSpec
from task_app.captures.worker import AgentWorker, refuse_without_effect
from task_app.episode.conversation import Conversation
from task_app.episode.decisions import NO_METADATA
from task_app.episode.prompts import FreshPrompts, Prompts
from task_app.episode.state_keys import EpisodeStateKeys, keys_by_name, select_keys
from task_app.episode.worker import Keep, RLRolloutWorker
from task_app.errors import DeadlineExceeded, InvalidRequest, SnapshotRefused, boundary, refuse_used
from task_app.interactions.service import Interactions
from task_app.observing.spans import Spans
from task_app.plugins import PlugBoards, PolicyContext
from task_app.policies.openai import decision_seed
from task_app.protocols import (
    AgentPolicy,
    ConversationalEnvironment,
    Environment,
    PastDecision,
    RestorableEnvironment,
    steps_quickly,
    takes_answers,
)
from task_app.sessions.snapshots import EnvironmentFacts, EnvironmentSnapshot
from task_app.sessions.switches import agree_on_step_rewards, take_step_rewards
from task_app.snapshots.envelope import from_text
from task_app.snapshots.starts import EpisodeStart, Worlds, require_reseedable, require_restorable
from task_app.threads import Threads, in_thread

Worker = RLRolloutWorker | AgentWorker


@dataclass(frozen=True, slots=True)
class Assembly:
    """Builds the workers for the rollout requests of a service."""

    boards: PlugBoards
    worlds: Worlds
    """The cached worlds; the episodes of a group (siblings) start from the same world."""
    interactions: Interactions
    captures: Captures
    """The open captures, which answer the model calls of agents."""
    spans: Spans

    def worker(self, request: RolloutRequest, context: PolicyContext, *, where: str) -> Worker:
        """Build environment, policy and worker, and raise an error if the request is faulty.

        The world is not generated yet, and the policy is not called. The paths in error messages begin with
        `where`, the path of the request in the body, such as `rollouts.0.`.
        """
        env_config, switches_by_place = take_step_rewards(request.env.config, where=where + "env.config")
        policy_config, of_policy = take_step_rewards(request.policy.config, where=where + "policy.config")
        switches_by_place |= of_policy
        if "step_rewards" in request.model_fields_set:
            switches_by_place[where + "step_rewards"] = request.step_rewards
        switches = agree_on_step_rewards(switches_by_place) if switches_by_place else None
        env = EnvSpec(env_name=request.env.env_name, config=env_config)
        if request.reward_function is not None:
            self.boards.reward_function(request.reward_function, where=where)
        environment = self.boards.environment(env.env_name, env.config, where=where + "env.")
        if isinstance(environment, AgentEnvironment):
            return self._build_agent_worker(request, environment, policy_config, context, where=where)
        if request.start.draws_seed is not None:
            require_reseedable(environment, where=where + "start.draws_seed")
        seed, start = self._find_start(request, env, context, where=where)
        known = self.boards.state_keys(env.env_name, environment, where=where + "env.")
        keys = select_keys(request.state_keys, known, where=where + "state_keys")
        keep: Keep | None = None
        if request.snapshot_turns:
            require_restorable(environment, where=where + "snapshot_turns")
            keep = SnapshotTaker(
                frozenset(request.snapshot_turns),
                self.boards.resolve(env),
                seed,
                switches,
                at_most_bytes=context.settings.max_snapshot_bytes,
                timeout_s=request.limits.timeout_s,
                threads=context.threads,
            )
        return RLRolloutWorker(
            task_definition=TaskDefinitionModel.of_request(request),
            environment=environment,
            prompts=_make_prompts(request, environment, self.interactions, where=where),
            agent_policy=self.boards.policy(
                request.policy.policy_name, policy_config, context, where=where + "policy."
            ),
            seed=seed,
            start=start,
            step_rewards=switches,
            state_keys=EpisodeStateKeys(keys),
            multi_turn=request.multi_turn,
            keep=keep,
            final_view=request.final_view,
            spans=self.spans,
            threads=context.threads,
        )

    def _build_agent_worker(
        self,
        request: RolloutRequest,
        environment: AgentEnvironment,
        policy_config: Mapping[str, Any],
        context: PolicyContext,
        *,
        where: str,
    ) -> AgentWorker:
        refuse_without_effect(request, environment, where=where)
        assert request.start.seed is not None, "a start has a seed or a snapshot"
        name, place = request.policy.policy_name, where + "policy."
        make_policy = branch_policies(self.boards, name, policy_config, context, where=place)
        make_policy(0)  # so that a wrong config is refused now, not at the first call
        keys = select_keys(
            request.state_keys, keys_by_name({}, conversation=True), where=where + "state_keys"
        )
        spec = CaptureSpec(
            environment.name,
            make_policy,
            limits=request.limits,
            seed=request.start.seed,
            models=environment.agent.models,
            state_keys=EpisodeStateKeys(keys),
            spans=self.spans,
        )
        return AgentWorker(request, environment, spec, self.captures)

    def _find_start(
        self, request: RolloutRequest, env: EnvSpec, context: PolicyContext, *, where: str
    ) -> tuple[int, EpisodeStart]:
        """Return the seed of the episode's world, and the start from that seed or from a snapshot."""
        start = request.start
        if start.snapshot is None:
            assert start.seed is not None, "a start has a seed or a snapshot"
            return start.seed, self.worlds.start(env, start.seed, context.threads)
        place = where + "start.snapshot"
        snapshot = _open_start_snapshot(start.snapshot, env, self.boards, context, where=place)
        return snapshot.facts.seed, snapshot.start(start, context.threads)


def branch_policies(
    boards: PlugBoards,
    name: str,
    config: Mapping[str, Any],
    context: PolicyContext,
    *,
    where: str = "policy.",
) -> Callable[[int], AgentPolicy]:
    """Return a function that makes the policy of one branch (conversation) of an agent, given its number.

    Each policy has its own conversation at the server and its own seeds, so that an agent that asks the same
    question in two branches gets two independent answers.
    """

    def make_policy(branch: int) -> AgentPolicy:
        if not branch:
            return boards.policy(name, config, context, where=where)
        seed = config.get("seed", context.seed)
        own = decision_seed(seed, -branch) if type(seed) is int else seed
        apart = replace(context, rollout_id=f"{context.rollout_id}~{branch + 1}", seed=own)
        seeded = {"seed": own} if "seed" in config else {}
        return boards.policy(name, {**config, **seeded}, apart, where=where)

    return make_policy


def _make_prompts(
    request: RolloutRequest, environment: Environment, interactions: Interactions, *, where: str
) -> Prompts:
    """Return the object that makes the prompts; raise InvalidRequest if it cannot serve the request.

    A prompt is made from the latest observation or, in some environments, is a conversation that grows. In a
    conversation, the request may name an interaction (a simulated user), which answers the model.
    """
    interaction = request.interaction
    if not isinstance(environment, ConversationalEnvironment):
        uses = {"interaction": interaction is not None, "multi_turn": request.multi_turn != MultiTurn()}
        why = f"in {environment.name!r}, which makes a prompt for each decision"
        refuse_used(uses, why, where=where, hint="it is for environments that hold a conversation")
        return FreshPrompts(environment)
    if request.start.snapshot is not None or request.snapshot_turns:
        place = "start.snapshot" if request.start.snapshot is not None else "snapshot_turns"
        raise InvalidRequest(
            f"{environment.name!r} is a conversation, which no snapshot holds: no episode can continue it",
            where=where + place,
        )
    if interaction is None:
        if not environment.outcome_definition and request.reward_function is None:
            raise InvalidRequest(
                f"conversations in {environment.name!r} have no score of their own",
                where=where + "interaction",
                hint="name an interaction, or a reward_function",
            )
        return Conversation(environment, request.multi_turn)
    if not takes_answers(environment):
        raise InvalidRequest(
            f"an interaction would never be asked in {environment.name!r}, where only tool calls count",
            where=where + "interaction",
            hint="leave it out: the environment scores the episode itself; 'dialogue' is answered in words",
        )
    interactions.entry(interaction.name, where=where + "interaction.")
    open_interaction = interactions.open(
        interaction.name, interaction.kwargs, rollout_id=request.rollout_id, ground_truth=request.ground_truth
    )
    return Conversation(environment, request.multi_turn, open_interaction)


def _open_start_snapshot(
    text: str, env: EnvSpec, boards: PlugBoards, context: PolicyContext, *, where: str
) -> EnvironmentSnapshot:
    """Return the snapshot in `text`; raise SnapshotRefused if environment `env` cannot continue from it."""
    try:
        data = from_text(text, where=where)
        snapshot = EnvironmentSnapshot.open(data, at_most_bytes=context.settings.max_snapshot_bytes)
    except SnapshotRefused as exc:
        exc.where = where
        raise
    own, other = boards.resolve(env), snapshot.facts.env
    if own != other:
        raise SnapshotRefused(
            f"the snapshot is of {_describe(other, own)}, the rollout is to play {_describe(own, other)}",
            where=where,
            hint="give the env_name and config that the snapshot was taken with",
        )
    if snapshot.facts.over:
        raise SnapshotRefused("the episode in the snapshot has ended; no decision can follow", where=where)
    return snapshot


def _describe(env: EnvSpec, other: EnvSpec) -> str:
    """Return the name of `env`; if `other` has the same name, also the settings of `env` that differ."""
    if env.env_name != other.env_name:
        return f"environment {env.env_name!r}"
    differences = {name: value for name, value in env.config.items() if other.config.get(name) != value}
    return f"{env.env_name!r} with {differences}"


@dataclass(frozen=True, slots=True)
class SnapshotTaker:
    """Takes the requested snapshots of one episode; an `RLRolloutWorker` gets it as argument `keep`."""

    turns: frozenset[int]
    """Decisions, from 1, before which a snapshot is taken."""
    spec: EnvSpec
    """The environment's spec with every setting written out."""
    seed: int
    step_rewards: StepRewards | None
    """The episode's reward switches; None if the request names none."""
    at_most_bytes: int
    """Size limit of a snapshot before compression."""
    timeout_s: float
    """Time limit of one snapshot."""
    threads: Threads | None
    """The threads that run `snapshot` if the environment's steps are not quick."""

    async def __call__(
        self, environment: Environment, steps: Sequence[StepData], past: Sequence[PastDecision]
    ) -> str | None:
        """Return the environment's snapshot if the next decision is one of `turns`, otherwise None."""
        if len(steps) + 1 not in self.turns:
            return None
        assert isinstance(environment, RestorableEnvironment), "checked when the request was accepted"
        state = await self._read_state(environment)
        env_steps = sum(len(step.env_rewards or ()) for step in steps)
        facts = EnvironmentFacts(
            env=self.spec, seed=self.seed, step_idx=env_steps, turn=len(steps), over=False,
            step_rewards=self.step_rewards, metadata=steps[-1].metadata if steps else NO_METADATA,
            past=tuple(past), rl_run_id=None,
        )  # fmt: skip
        return EnvironmentSnapshot(facts, state).text(at_most_bytes=self.at_most_bytes)

    async def _read_state(self, environment: RestorableEnvironment) -> bytes:
        """Return the environment's state; read it on the event loop if steps are quick, else in a thread."""
        if steps_quickly(environment):
            with boundary("environment.snapshot"):
                return environment.snapshot()
        try:
            async with asyncio.timeout(self.timeout_s):
                return await in_thread(self.threads, "environment.snapshot", environment.snapshot)
        except TimeoutError as exc:
            raise DeadlineExceeded("environment.snapshot did not return within limits.timeout_s") from exc
