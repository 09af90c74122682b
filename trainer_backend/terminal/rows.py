"""Makes rows for supervised training. Each answer worth imitating is learned in exactly one row.

A row is a prompt of the model with its answer, as chat `messages`. Decisions share a row while each prompt
continues the previous prompt and its answer. Any other prompt begins a new row: every prompt in Crafter, and
a conversation's prompt after a context edit. An assistant message has `weight` 1 if it is to be learned, and
0 if it is learned in another row or not worth imitating. Fine-tuning services read this key.

Source: names of the row, synth_task_app.md section 5.3b; `weight`, OpenAI's chat format for fine-tuning.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared_schemas.messages import Message
from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import DecisionRewards, StepData, Trajectory, prompts, read_answer
from trainer_backend.core.imitation import worth_imitating
from trainer_backend.core.statistics import step_deltas

Row = dict[str, Any]


@dataclass(slots=True)
class _View:
    """The material of one row. `prompt` grows with each decision that continues it.

    `answers` maps the index of each earlier answer in `prompt` to its decision.
    """

    prompt: tuple[Message, ...]
    steps: list[StepData]
    answers: dict[int, StepData] = field(default_factory=dict)


def make_rows(rollout: Rollout, credits: Sequence[Mapping[str, Any]] = ()) -> list[Row]:
    """Return the rows of a rollout: none if it failed, or if no decision is worth imitating.

    `credits` are the stored columns of each decision.
    """
    trajectory = rollout.trajectory
    if trajectory is None:
        return []
    deltas = {step.turn: step_deltas(step) for step in trajectory.steps}
    by_turn = {credit["turn"]: credit for credit in credits}
    tools = [tool.model_dump(mode="json") for tool in trajectory.tools]
    rows = []
    for view in _views(trajectory):
        if learned := [step.turn for step in view.steps if worth_imitating(step)]:
            metadata = _metadata(rollout, trajectory, by_turn, deltas, learned)
            rows.append({"messages": _messages(view), "tools": tools, "metadata": metadata})
    return rows


def _views(trajectory: Trajectory) -> Iterator[_View]:
    view: _View | None = None
    for step, prompt in zip(trajectory.steps, prompts(trajectory.steps), strict=True):
        seen = step.observation_data
        if (
            view is not None
            # The prompt continues the previous one and its answer.
            and seen.messages_reused >= len(view.prompt)
            and not seen.changed
            and [message.role for message in prompt[len(view.prompt) :][:1]] == ["assistant"]
        ):
            view.answers[len(view.prompt)] = view.steps[-1]
            view.prompt = prompt
            view.steps.append(step)
            continue
        if view is not None:
            yield view
        view = _View(prompt, [step])
    if view is not None:
        yield view


def _messages(view: _View) -> list[Row]:
    messages = [
        _message(message, learn=index in view.answers and worth_imitating(view.answers[index]))
        for index, message in enumerate(view.prompt)
    ]
    messages.append(_message(read_answer(view.steps[-1]), learn=worth_imitating(view.steps[-1])))
    end = max(index for index, message in enumerate(messages) if message.get("weight"))
    return messages[: end + 1]  # no later message is to be learned


def _message(message: Message, *, learn: bool) -> Row:
    row = message.model_dump(mode="json", exclude_none=True)
    return row | {"weight": int(learn)} if message.role == "assistant" else row


def _metadata(
    rollout: Rollout,
    trajectory: Trajectory,
    credits: Mapping[int, Mapping[str, Any]],
    all_deltas: Mapping[int, DecisionRewards],
    turns: Sequence[int],
) -> Row:
    """Return the metadata of a row whose learned decisions are `turns`, such as their total reward.

    The keys of `credits` and `all_deltas` are turns.
    """
    rewards = [credits.get(turn, {}).get("reward") for turn in turns]
    deltas = [all_deltas[turn] for turn in turns]
    so_far = (delta for turn, delta in all_deltas.items() if turn <= turns[-1])
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
