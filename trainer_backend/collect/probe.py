"""Does somebody else's server return what its samples are weighed by? Asked before anything is played.

A task app plays the first decision of the job with it, so that the whole way is tried: address, key, list of
allowed hosts, and the reply.
"""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from shared_schemas.rollouts import Rollout, RolloutRequest
from shared_schemas.trajectory import PolicyLogprobs, Trajectory, prompts
from trainer_backend.collect.collector import Collector
from trainer_backend.collect.plan import Planner
from trainer_backend.errors import JobError
from trainer_backend.jobfile.mixture_table import RolloutOnlyTable

# Messages and tools to the ids of the prompt, as the actor's own renderer makes them.
Encode = Callable[[Sequence[dict[str, Any]], Sequence[dict[str, Any]]], Sequence[int]]

# A server that is not there is told after seconds; in training it has the policy's own patience.
_PATIENCE_S = 5.0
# Of a token that could not but be drawn. A softmax over one token is 1 exactly; a model is never so sure.
_CERTAIN = -1e-5
# Decisions in which it may show that a model is not: some tokens leave it no choice.
_SOME = 4


async def probe_server(
    planner: Planner, collector: Collector, table: RolloutOnlyTable, encode: Encode, *, vocabulary: int
) -> str:
    """A line about a server that can be mixed.

    Args:
        planner: knows the address and key of `table`.
        vocabulary: ids that the actor knows, from 0.

    Raises:
        JobError: it does not answer, or without token ids or log-probs; it renders the prompt to other ids
            than the actor's, or samples ids that the actor does not know; its log-probs are not of what it
            samples from, though the job says so.
        TaskAppError: the task apps fail.
    """
    requests = [_asked(planner, table.name, "tokens")]
    if table.logprobs == "processed":
        requests.append(_asked(planner, table.name, "log-probs", decisions=_SOME, top_k=1))
    found = await collector.collect(requests)
    await collector.ack(planner.run_id, found.all)
    answers = {rollout.rollout_id.partition(":")[0]: rollout for rollout in found.all}
    where = f"[rollout_only] {table.name!r}, {table.source}"
    played = [_played(answers[request.rollout_id], where) for request in requests]
    _refuse_other_prompt(played[0], encode, where)
    _refuse_unknown_ids(played[0], vocabulary, where)
    for trajectory in played[1:]:
        _refuse_raw(trajectory, where)
    return f"fixed policy {table.name!r}: {table.source} returns exact tokens, for the actor's own prompts"


def _asked(planner: Planner, name: str, what: str, *, decisions: int = 1, **sampling: int) -> RolloutRequest:
    """The job's first episode, of so many decisions, by the fixed policy of that name."""
    first = planner.training(1)[0]
    policy = planner.sampled_by(name, "probe", what)
    config = {**policy.config, **sampling}
    if policy.policy_name == "openai":
        config["retry_budget_s"] = _PATIENCE_S
    limits = first.limits.model_copy(update={"max_decisions": min(decisions, first.limits.max_decisions)})
    return first.model_copy(
        update={
            "rollout_id": f"{planner.run_id}/probe/{name}/{what}",
            "iteration": 0,
            "policy": policy.model_copy(update={"config": config}),
            "limits": limits,
            "state_keys": (),
            "reward_function": None,
        }
    )


def _played(rollout: Rollout, where: str) -> Trajectory:
    """A trajectory of at least one decision, each with its exact tokens."""
    trajectory = rollout.trajectory
    if trajectory is None:
        told = rollout.failure.detail if rollout.failure is not None else rollout.status
        raise JobError(f"the job's first prompt has no answer that could be weighed: {told}", where=where)
    if not trajectory.steps or any(step.policy_logprobs is None for step in trajectory.steps):
        raise JobError(
            "it answered the job's first prompt without token ids and log-probs, and no sample can be "
            "weighed without them",
            where=where,
            hint="vLLM from 0.10.2 on, and a gateway of Turnwise, return them.",
        )
    return trajectory


def _tokens(trajectory: Trajectory) -> list[PolicyLogprobs]:
    return [step.policy_logprobs for step in trajectory.steps if step.policy_logprobs is not None]


def _refuse_other_prompt(trajectory: Trajectory, encode: Encode, where: str) -> None:
    messages = [message.model_dump(exclude_none=True) for message in next(prompts(trajectory.steps))]
    tools = [tool.model_dump(mode="json") for tool in trajectory.tools]
    ours, theirs = encode(messages, tools), _tokens(trajectory)[0].prompt_token_ids
    for place, (own, other) in enumerate(zip_longest(ours, theirs)):
        if own != other:
            raise JobError(
                f"it renders the job's first prompt to {len(theirs)} ids, the actor's template to "
                f"{len(ours)}; the first that differs is number {place}: {other} there, {own} here",
                where=where,
                hint="It serves another model family, or another chat template or its settings.",
            )


def _refuse_unknown_ids(trajectory: Trajectory, vocabulary: int, where: str) -> None:
    sampled = [token for exact in _tokens(trajectory) for token in exact.token_ids]
    unknown = [token for token in sampled if not 0 <= token < vocabulary]
    if unknown:
        raise JobError(f"it sampled the id {unknown[0]}, and the actor knows {vocabulary} ids", where=where)


def _refuse_raw(trajectory: Trajectory, where: str) -> None:
    """With top_k 1 each token is certain: of what was sampled from, its log-prob is 0."""
    lowest = min((logprob for exact in _tokens(trajectory) for logprob in exact.logprobs), default=0.0)
    if lowest < _CERTAIN:
        raise JobError(
            f"with top_k = 1 its log-probs should be 0, and one is {lowest:.3g}: they are not of what it "
            "samples from, though the job says logprobs = 'processed'",
            where=where,
            hint="vLLM returns those with --logprobs-mode processed_logprobs.",
        )
