"""`turnwise inspect`: one episode, decision by decision: what it saw, did and earned, and its credit."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import StepData, UserReward
from trainer_backend.errors import RunDirectoryError
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


def episode_view(rollout: Rollout, credits: Sequence[dict[str, Any]], *, full: bool) -> Group:
    """All of an episode for a terminal. `full`: the whole prompt of each decision, not its last message."""
    return Group(*_parts(rollout, credits, full=full))


def _parts(rollout: Rollout, credits: Sequence[dict[str, Any]], *, full: bool) -> Iterator[RenderableType]:
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
    if episode.user_reward is not None:
        yield Text(_judged(episode.user_reward))
    for warning in episode.warnings:
        yield Text(f"warning: {warning}")
    for step in episode.steps:
        yield ""
        yield Text(f"decision {step.turn}", style="bold")
        yield Text(_seen(step, full=full), style="dim")
        yield Text(f"did     {_done(step)}")
        yield Text(f"earned  {_earned(step)}")
        if step.turn <= len(credits):
            yield _credit(credits[step.turn - 1])


def _judged(said: UserReward) -> str:
    reason = f": {said.result.reason}" if said.result.reason else ""
    return (
        f"judged by {said.reward_function}{reason}; by its environment "
        f"{said.environment_outcome_reward:g} ({said.environment_outcome_definition})"
    )


def _seen(step: StepData, *, full: bool) -> str:
    messages = step.observation_data.messages
    shown = messages if full else messages[-1:]
    return "\n".join(str(message.content or "") for message in shown)


def _done(step: StepData) -> str:
    invalid = step.step_info.invalid_reason
    calls = "; ".join(f"{call.function.name} {call.function.arguments}" for call in step.tool_calls)
    executed = " ".join(step.step_info.executed_actions)
    return f"{calls or step.raw_policy_output or step.action_taken}  ->  {executed}" + (
        f"  (refused: {invalid})" if invalid else ""
    )


def _earned(step: StepData) -> str:
    parts = [f"env {sum(step.env_rewards or ()):+g}"]
    rewards = step.metadata.decision_rewards
    if rewards is not None:
        names = f" ({', '.join(rewards.unique)})" if rewards.unique else ""
        parts.append(f"unique {rewards.unique_delta}{names}, all {rewards.ach_delta}")
    parts += [f"{part.source} {part.value:+g}" for part in step.reward_parts]
    return "; ".join(parts)


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
