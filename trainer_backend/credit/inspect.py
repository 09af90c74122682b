"""`turnwise inspect`: shows the observation, action, rewards and credit of each decision of an episode."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType, group
from rich.table import Table
from rich.text import Text

from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import StepData, Trajectory, prompts
from trainer_backend.core.emission_views import EmissionView, assistant_turn_boundaries, emission_views
from trainer_backend.core.segments import Segment, build_segments
from trainer_backend.errors import RunDirectoryError
from trainer_backend.pages.episode_view import (
    action_text,
    credit_figures,
    credit_lines,
    interaction_texts,
    last_message,
    last_messages,
    message_text,
    new_messages,
)
from trainer_backend.plugins import estimator
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.rundir.rollout_files import read_decisions, read_rollout, rollout_ids

_KEY_SHOWN = 10


def find_rollout(
    runs: Sequence[RunDirectory], rollout_id: str, advantage: str | None = None
) -> tuple[Rollout, list[dict[str, Any]]]:
    """Find a stored rollout by its id or by the end of its id. Return it with its decisions' stored columns.

    With `advantage`, the columns come from the file that `turnwise recredit` wrote for this estimator;
    without it, they contain the credit that was computed in training.
    """
    found = [
        (run, path, known)
        for run in runs
        for path in sorted(run.rollouts.glob("*.parquet"))
        for known in rollout_ids(path)
        if known == rollout_id or known.endswith(rollout_id)
    ]
    exact = [item for item in found if item[2] == rollout_id]
    chosen = exact or found
    if len(chosen) != 1:
        looked = ", ".join(str(run.path) for run in runs) or "runs/"
        some = f"; such as {', '.join(known for _, _, known in chosen[:3])}" if chosen else ""
        raise RunDirectoryError(f"{len(chosen) or 'no'} stored rollouts are {rollout_id!r} in {looked}{some}")
    run, path, known = chosen[0]
    credited = path if advantage is None else _credited(run, path, known, advantage)
    return read_rollout(path, known), read_decisions(credited, known)


def _credited(run: RunDirectory, path: Path, rollout_id: str, advantage: str) -> Path:
    """Return the file of `turnwise recredit` that contains the credit by the estimator `advantage`.

    `path` is the file of the rollout. Raises RunDirectoryError if the rollout was not credited.
    """
    estimator(advantage)
    found = run.recredit / f"{advantage}.parquet"
    if path not in run.iteration_files():
        raise RunDirectoryError(f"{rollout_id} is in {path.name}; only rollouts of training are credited")
    if not found.exists() or rollout_id not in rollout_ids(found):
        raise RunDirectoryError(
            f"{found} does not have {rollout_id}; `turnwise recredit {run.path} --advantage {advantage}` "
            "credits every finished rollout of training"
        )
    return found


def _beginning(episode: Trajectory) -> Iterator[Text]:
    """Yield one line that describes the snapshot at which an episode began; nothing without a snapshot."""
    if episode.is_continued:
        yield Text(
            f"began at a snapshot of {episode.parent_rollout_id}, after {episode.parent_turn} decisions of "
            f"its game, when the outcome was {episode.outcome_before:g}"
        )


@group()
def episode_view(
    rollout: Rollout, credits: Sequence[dict[str, Any]], *, full: bool, tokens: bool = False
) -> Iterator[RenderableType]:
    """Render an episode for a terminal.

    `credits` are the stored columns of each decision; empty if no credit is stored. `full` shows each prompt
    whole, and not only its new messages. `tokens` shows the positions of tokens in the segments.
    """
    yield Text(f"{rollout.rollout_id}  group {rollout.group_id}, sibling {rollout.sibling}", style="bold")
    episode = rollout.trajectory
    if episode is None:
        cause = f"{rollout.failure.code}: {rollout.failure.detail}" if rollout.failure else ""
        yield Text(f"{rollout.status}; {cause}")
        return
    player = f"{episode.policy_name} {episode.model}".rstrip()  # a scripted policy has no model
    yield Text(
        f"{episode.env_name}, seed {episode.seed}; {player}; outcome "
        f"{episode.outcome_reward:g} ({episode.outcome_definition}); ended by {episode.stop_reason}"
    )
    yield from _beginning(episode)
    earned = [step.metadata.decision_rewards for step in episode.steps if step.metadata.decision_rewards]
    if earned:
        unique, every = sum(one.unique_delta for one in earned), sum(one.ach_delta for one in earned)
        yield Text(f"achievements over its decisions: unique {unique}, all {every}")
    if (said := episode.user_reward) is not None:
        reason = f": {said.result.reason}" if said.result.reason else ""
        yield Text(
            f"judged by {said.reward_function}{reason}; by its environment "
            f"{said.environment_outcome_reward:g} ({said.environment_outcome_definition})"
        )
    for warning in episode.warnings:
        yield Text(f"warning: {warning}")
    seen = _observations(episode, full=full)
    lines = _token_lines(rollout.rollout_id, episode, full=full) if tokens else {}
    if tokens and episode.full_history:
        ids = ", ".join(map(str, episode.deleted_msg_ids)) or "none"
        count = len(episode.full_history)
        yield Text(  # source 3's names
            f"full_history  {count} messages (msg_id_counter {count}); deleted_msg_ids  {ids}; "
            f"had_delete_operation  {str(episode.had_delete_operation).lower()}"
        )
    for step, shown in zip(episode.steps, seen, strict=True):
        yield ""
        yield Text(f"decision {step.turn}", style="bold")
        yield Text(shown, style="dim")
        yield Text(f"did     {_describe_action(step)}")
        yield Text(f"earned  {_describe_rewards(step)}")
        for told in interaction_texts(step):
            yield Text(f"answer  {told}")
        if tokens:
            yield Text("\n".join(lines[step.turn]))
        if step.turn <= len(credits):
            yield _credit_table(credits[step.turn - 1])
            for equation, words in credit_lines(credits[step.turn - 1]):
                yield Text(f"{equation}; {words}" if words else equation)
    if rest := last_messages(episode):
        yield Text("\n".join(["", "after the last decision", *rest]), style="dim")


def _observations(episode: Trajectory, *, full: bool) -> list[str]:
    """Return the [T] texts of the decisions' prompts: whole if `full`, or else only their new messages."""
    if full:
        return ["\n".join(map(message_text, prompt)) for prompt in prompts(episode.steps)]
    if episode.full_history:
        return ["\n".join(new_messages(step)) for step in episode.steps]
    return [last_message(step) for step in episode.steps]


def _token_lines(rollout_id: str, episode: Trajectory, *, full: bool) -> dict[int, list[str]]:
    """Return lines by turn: the tool loop's states and the positions of tokens, named as in source 3."""
    segments = build_segments(episode.steps, rollout_id=rollout_id)
    views = {view.turn: view for view in emission_views(segments)}
    found, snapshots, before = {}, 0, 0
    for step in episode.steps:
        found[step.turn] = [f"states  {' '.join(step.states)}"]
        view = views.get(step.turn)
        if view is None:
            found[step.turn].append("tokens  none sampled")
            continue
        if view.segment > before and step.observation_data.changed:
            closed = _snapshot(view.segment - 1, segments[view.segment - 1])
            found[step.turn].append(f"trajectory_snapshots[{snapshots}]  {closed}")
            snapshots += 1
        before = view.segment
        found[step.turn] += _view_lines(view, full=full)
    return found


def _snapshot(number: int, segment: Segment) -> str:
    """Describe the token positions of a segment that ended because a context edit changed the prompt."""
    first = int(segment.spans[0]["start"])
    trained = ", ".join(f"{start} to {end}" for _, start, end in assistant_turn_boundaries(segment))
    return (
        f"segment {number + 1}: prompt_ids 0 to {first}, response_ids {first} to {len(segment)}, "
        f"response_mask 1 from {trained}"
    )


def _view_lines(view: EmissionView, *, full: bool) -> list[str]:
    """Describe a decision's tokens as entries of the lists `emission_views` and `assistant_turn_boundaries`.

    Positions count from the start of the decision's segment. `full` adds the ids of the prompt.
    """
    t = view.turn - 1
    prompt, answer = (" ".join(map(str, ids)) for ids in (view.prompt_ids, view.answer_ids))
    return [
        f"emission_views[{t}]  segment {view.segment + 1}: prompt_ids 0 to {view.start}",
        f"assistant_turn_boundaries[{t}]  {view.start} to {view.end}: response_mask 1",
        *([f"prompt_ids  {prompt}"] if full else []),
        f"response_ids  {answer}",
    ]


def _describe_action(step: StepData) -> str:
    invalid = step.step_info.invalid_reason
    executed = " ".join(step.step_info.executed_actions)
    done = action_text(step) + (f"  ->  {executed}" if executed else "")
    return done + (f"  (refused: {invalid})" if invalid else "")


def _describe_rewards(step: StepData) -> str:
    parts = [f"env {sum(step.env_rewards or ()):+g}"]
    rewards = step.metadata.decision_rewards
    if rewards is not None:
        names = f" ({', '.join(rewards.unique)})" if rewards.unique else ""
        parts.append(f"unique {rewards.unique_delta}{names}, all {rewards.ach_delta}")
    return "; ".join([*parts, *(f"{part.source} {part.value:+g}" for part in step.reward_parts)])


def _credit_table(columns: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    figures = credit_figures(columns, "{:+.3f}".format)
    for name, _, _ in figures:
        table.add_column(name, justify="right")
    cells = [value for _, value, _ in figures]
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
