"""`turnwise inspect`: one episode, decision by decision: what it saw, did and earned, and its credit."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import StepData, Trajectory, UserReward
from trainer_backend.core.emission_views import EmissionView, emission_views
from trainer_backend.core.segments import segments_of
from trainer_backend.errors import RunDirectoryError
from trainer_backend.report.seen import (
    did,
    last_seen,
    last_words,
    news,
    parts_earned,
    user_told,
    whole_prompts,
)
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.rundir.rollout_files import read_decisions, read_rollout, rollout_ids

_CREDIT = (
    ("r_t", "reward"),
    ("return", "return_to_go"),
    ("V", "value"),
    ("A_E", "episode_advantage"),
    ("A_S", "step_advantage"),
    ("advantage", "advantage"),
)
_KEY_SHOWN = 10


def find_rollout(runs: Sequence[RunDirectory], rollout_id: str) -> tuple[Rollout, list[dict[str, Any]]]:
    """The stored rollout of that id, or of the only one that ends with it, and its row's decisions.

    Raises:
        RunDirectoryError: there is none, or several.
    """
    found = [
        (path, known)
        for run in runs
        for path in sorted((run.path / "rollouts").glob("*.parquet"))
        for known in rollout_ids(path)
        if known == rollout_id or known.endswith(rollout_id)
    ]
    exact = [item for item in found if item[1] == rollout_id]
    chosen = exact or found
    if len(chosen) != 1:
        looked = ", ".join(str(run.path) for run in runs) or "runs/"
        some = f"; such as {', '.join(known for _, known in chosen[:3])}" if chosen else ""
        raise RunDirectoryError(f"{len(chosen) or 'no'} stored rollouts are {rollout_id!r} in {looked}{some}")
    path, known = chosen[0]
    return read_rollout(path, known), read_decisions(path, known)


def episode_view(
    rollout: Rollout, credits: Sequence[dict[str, Any]], *, full: bool, tokens: bool = False
) -> Group:
    """All of an episode for a terminal.

    Args:
        credits: the columns of each decision, as they are stored; empty where no credit was given.
        full: the whole prompt of each decision, not only what is new in it.
        tokens: where its tokens stand in the segments that it was trained on.

    Raises:
        SegmentError: `tokens` of an episode that was played without token ids, or greedily.
    """
    return Group(*_parts(rollout, credits, full=full, tokens=tokens))


def _parts(
    rollout: Rollout, credits: Sequence[dict[str, Any]], *, full: bool, tokens: bool
) -> Iterator[RenderableType]:
    yield Text(f"{rollout.rollout_id}  group {rollout.group_id}, sibling {rollout.sibling}", style="bold")
    episode = rollout.trajectory
    if episode is None:
        cause = f"{rollout.failure.code}: {rollout.failure.detail}" if rollout.failure else ""
        yield Text(f"{rollout.status}; {cause}")
        return
    yield Text(
        f"{episode.env_name}, seed {episode.seed}; {episode.policy_name} {episode.model}; outcome "
        f"{episode.outcome_reward:g} ({episode.outcome_definition}); ended by {episode.stop_reason}"
    )
    earned = [step.metadata.decision_rewards for step in episode.steps if step.metadata.decision_rewards]
    if earned:
        unique, every = sum(one.unique_delta for one in earned), sum(one.ach_delta for one in earned)
        yield Text(f"achievements over its decisions: unique {unique}, all {every}")
    if episode.user_reward is not None:
        yield Text(_judged(episode.user_reward))
    for warning in episode.warnings:
        yield Text(f"warning: {warning}")
    seen = _seen(episode, full=full)
    views = _views(rollout.rollout_id, episode) if tokens else {}
    for step, shown in zip(episode.steps, seen, strict=True):
        yield ""
        yield Text(f"decision {step.turn}", style="bold")
        yield Text(shown, style="dim")
        yield Text(f"did     {_done(step)}")
        yield Text(f"earned  {_earned(step)}")
        for told in user_told(step):
            yield Text(f"answer  {told}")
        if tokens:
            yield Text(_tokens(views.get(step.turn), full=full))
        if step.turn <= len(credits):
            yield _credit(credits[step.turn - 1])
    if rest := last_words(episode):
        yield Text("\n".join(["", "after the last decision", *rest]), style="dim")


def _judged(said: UserReward) -> str:
    reason = f": {said.result.reason}" if said.result.reason else ""
    return (
        f"judged by {said.reward_function}{reason}; by its environment "
        f"{said.environment_outcome_reward:g} ({said.environment_outcome_definition})"
    )


def _seen(episode: Trajectory, *, full: bool) -> list[str]:
    """[T] what each decision saw: its whole prompt, or what is new in it."""
    if full:
        return ["\n".join(lines) for lines in whole_prompts(episode)]
    if episode.full_history:
        return ["\n".join(news(step)) for step in episode.steps]
    return [last_seen(step) for step in episode.steps]


def _views(rollout_id: str, episode: Trajectory) -> dict[int, EmissionView]:
    """By turn.

    Raises:
        SegmentError: the episode was played without token ids, or greedily.
    """
    return {view.turn: view for view in emission_views(segments_of(episode.steps, rollout_id=rollout_id))}


def _tokens(view: EmissionView | None, *, full: bool) -> str:
    if view is None:
        return "tokens  none sampled"
    told = f"tokens  segment {view.segment + 1}: prompt 0 to {view.start}, answer {view.start} to {view.end}"
    prompt, answer = (" ".join(map(str, ids)) for ids in (view.prompt_ids, view.answer_ids))
    return f"{told}\nprompt  {prompt}\nanswer  {answer}" if full else f"{told}\nanswer  {answer}"


def _done(step: StepData) -> str:
    invalid = step.step_info.invalid_reason
    executed = " ".join(step.step_info.executed_actions)
    return (
        did(step) + (f"  ->  {executed}" if executed else "") + (f"  (refused: {invalid})" if invalid else "")
    )


def _earned(step: StepData) -> str:
    parts = [f"env {sum(step.env_rewards or ()):+g}"]
    rewards = step.metadata.decision_rewards
    if rewards is not None:
        names = f" ({', '.join(rewards.unique)})" if rewards.unique else ""
        parts.append(f"unique {rewards.unique_delta}{names}, all {rewards.ach_delta}")
    return "; ".join([*parts, *parts_earned(step)])


def _credit(columns: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    known = [(title, columns[name]) for title, name in _CREDIT if columns.get(name) is not None]
    for title, _ in known:
        table.add_column(title, justify="right")
    cells = [f"{value:+.3f}" for _, value in known]
    if columns.get("token_logprobs"):
        table.add_column("nats to reference", justify="right")
        own, reference = columns["token_logprobs"], columns["token_reference_logprobs"]
        cells.append(f"{math.fsum(own) - math.fsum(reference):+.3f}")
    if columns.get("branch_returns"):
        table.add_column("branches")
        cells.append(" ".join(f"{value:+.3f}" for value in columns["branch_returns"]))
    if columns.get("state_key"):
        table.add_column("state")
        cells.append(columns["state_key"][:_KEY_SHOWN])
    table.add_row(*cells)
    return table
