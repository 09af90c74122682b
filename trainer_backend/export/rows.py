"""Pure: an episode as rows for supervised training. Every answer that is worth imitating is in one row, once.

A row is what the model saw at one moment, with its answer: `messages` as chat completions have them.
Decisions whose prompts go on from one another share a row, that of the last of them; where a prompt begins
anew (Crafter's each time, a conversation's after an edit) a row begins. An assistant message has `weight` 1
where it is to be learned, as fine-tuning services read it, and 0 where another row has it, or where it was
refused.

Source: names of the row, synth_task_app.md section 5.3b; `weight`, OpenAI's chat format for fine-tuning.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared_schemas.messages import Message
from shared_schemas.rewards import DecisionRewards
from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import StepData, Trajectory, prompts
from trainer_backend.core.imitation import worth_imitating
from trainer_backend.core.statistics import step_deltas

Row = dict[str, Any]


@dataclass(slots=True)
class _View:
    """What a row is made of: a prompt that grew, and which of its messages are answers since it began."""

    prompt: tuple[Message, ...]
    steps: list[StepData]
    answers: dict[int, StepData] = field(default_factory=dict)


@dataclass(frozen=True)
class _About:
    """What all rows of a rollout tell of: `credits` and `deltas` by turn."""

    rollout: Rollout
    trajectory: Trajectory
    credits: Mapping[int, Mapping[str, Any]]
    deltas: Mapping[int, DecisionRewards]


def rows_of(rollout: Rollout, credits: Sequence[Mapping[str, Any]] = ()) -> list[Row]:
    """The rows of a rollout; none of a failed one, or where nothing is worth imitating.

    Args:
        credits: the stored columns of each decision (`reward`, `advantage`); absent: they are None.
    """
    trajectory = rollout.trajectory
    if trajectory is None:
        return []
    about = _About(
        rollout,
        trajectory,
        {credit["turn"]: credit for credit in credits},
        {step.turn: step_deltas(step) for step in trajectory.steps},
    )
    return [row for view in _views(trajectory) if (row := _row(about, view)) is not None]


def _views(trajectory: Trajectory) -> Iterator[_View]:
    view: _View | None = None
    for step, prompt in zip(trajectory.steps, prompts(trajectory.steps), strict=True):
        if view is not None and _goes_on(view, step, prompt):
            view.answers[len(view.prompt)] = view.steps[-1]
            view.prompt = prompt
            view.steps.append(step)
            continue
        if view is not None:
            yield view
        view = _View(prompt, [step])
    if view is not None:
        yield view


def _goes_on(view: _View, step: StepData, prompt: Sequence[Message]) -> bool:
    """The prompt holds the one before and, next, the answer to it."""
    seen, length = step.observation_data, len(view.prompt)
    whole = seen.messages_reused >= length and not seen.changed
    return whole and len(prompt) > length and prompt[length].role == "assistant"


def _row(about: _About, view: _View) -> Row | None:
    learned = [step for step in view.steps if worth_imitating(step)]
    if not learned:
        return None
    messages = [
        _message(message, learn=index in view.answers and worth_imitating(view.answers[index]))
        for index, message in enumerate(view.prompt)
    ]
    messages.append(_message(_answer(view.steps[-1]), learn=worth_imitating(view.steps[-1])))
    end = max(index for index, message in enumerate(messages) if message.get("weight"))
    return {
        "messages": messages[: end + 1],  # what comes after the last that is to be learned teaches nothing
        "tools": [tool.model_dump(mode="json") for tool in about.trajectory.tools],
        "metadata": _metadata(about, [step.turn for step in learned]),
    }


def _answer(step: StepData) -> Message:
    # The raw output of a call holds the call itself, which stands in tool_calls already.
    written = step.action_taken.get("content", step.raw_policy_output) or ""
    return Message(role="assistant", content=written, tool_calls=step.tool_calls or None)


def _message(message: Message, *, learn: bool) -> Row:
    found = message.model_dump(mode="json", exclude_none=True)
    return found | {"weight": int(learn)} if message.role == "assistant" else found


def _metadata(about: _About, turns: Sequence[int]) -> Row:
    """Of the learned decisions: `turns`, their achievements, and what training paid for them together."""
    rollout, trajectory = about.rollout, about.trajectory
    rewards = [about.credits.get(turn, {}).get("reward") for turn in turns]
    deltas = [about.deltas[turn] for turn in turns]
    so_far = (delta for turn, delta in about.deltas.items() if turn <= turns[-1])
    return {
        "session_id": rollout.rollout_id,
        "turn": turns[-1],
        "turns": turns,
        "model": trajectory.model or trajectory.policy_name,
        "provider": "turnwise",
        "env_name": trajectory.env_name,
        "iteration": rollout.iteration,
        "group_id": rollout.group_id,
        "seed": trajectory.seed,
        "outcome_reward": trajectory.outcome_reward,
        "reward": None if None in rewards else sum(rewards),
        "achievements": {
            "new_unique": sorted({name for delta in deltas for name in delta.unique}),
            "turned_true": sorted({name for delta in deltas for name in delta.all}),
            "cumulative_unique": sorted({name for delta in so_far for name in delta.unique}),
        },
    }
