"""Pure: makes the contents of an episode's page: a line per decision, and one decision in detail.

`turnwise inspect` and the report use these functions too, so they show the same texts.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shared_schemas.messages import Message, ToolCall
from shared_schemas.trajectory import StepData, Trajectory, exact_tokens
from trainer_backend.core.advantages.derivation import AT_FORK, PARTS
from trainer_backend.core.statistics import step_deltas
from trainer_backend.pages.figures import MINUS, TIMES, clip, number, signed, spaced
from trainer_backend.plugins import ESTIMATORS

Columns = Mapping[str, Any]  # the values of one decision, by column of the Parquet file
Figure = tuple[str, str, str]  # a number: its name, its value, the meaning of its name


def new_messages(step: StepData) -> list[str]:
    """Return the messages of a decision's prompt that were edited or added since the previous prompt.

    Edited messages come first. The model's previous answer is left out, because its own decision shows it.
    """
    seen = step.observation_data
    own = seen.messages_reused > 0 and seen.messages[:1] and seen.messages[0].role == "assistant"
    new = seen.messages[1:] if own else seen.messages
    edits = [f"message {i} is now {message_text(message)}" for i, message in sorted(seen.changed.items())]
    return [*edits, *map(message_text, new)]


def last_messages(episode: Trajectory) -> list[str]:
    """Return the messages that follow the model's last answer in a conversation. No prompt contains them."""
    in_prompts = sum(len(step.observation_data.messages) for step in episode.steps)
    return [message_text(message) for message in episode.full_history[in_prompts + 1 :]]


def message_text(message: Message) -> str:
    """Return a message as `role: text`, followed by the name and arguments of each tool call."""
    pieces = [message.content] if message.content else []
    return f"{message.role}: {' '.join([*pieces, *map(_call, message.tool_calls or ())])}"


def action_text(step: StepData) -> str:
    """Return the tool calls of a decision as text, or the model's text if it called no tool."""
    text = step.action_taken.get("content", step.raw_policy_output)
    return "; ".join(map(_call, step.tool_calls)) or str(text or step.action_taken)


def interaction_texts(step: StepData) -> list[str]:
    """Return the texts of an interaction that no prompt shows: its last response, and its metadata."""
    answer = step.step_info.user_answer
    if answer is None:
        return []
    texts = [] if answer.unshown is None else [f"user, not shown: {answer.unshown}"]
    if answer.metadata:
        texts.append(f"metadata: {json.dumps(answer.metadata, ensure_ascii=False)}")
    return texts


def last_message(step: StepData) -> str:
    """Return the text of the last message of a decision's prompt.

    It is for episodes that are not conversations: their prompts differ only in the last message.
    """
    return "".join(str(message.content or "") for message in step.observation_data.messages[-1:])


def _call(call: ToolCall) -> str:
    return f"{call.function.name} {call.function.arguments}"


def show_prompt(episode: Trajectory, turn: int) -> list[dict[str, Any]]:
    """Return a dict for every message of a turn's prompt, in order.

    `state` is "new" if the previous prompt lacks the message, "edited" if the message differs from its
    original, and otherwise "kept". For an edited message, `was` and `was_calls` contain the original text and
    tool calls, and `edited_at` is the turn of the first edit.
    """
    prompt, edits, new_from = _walk(episode.steps[:turn])
    last, _, _ = _walk(episode.steps)
    views = []
    for msg_id, message in enumerate(prompt):
        was, edited_at = edits.get(msg_id, (None, None))
        views.append({
            "msg_id": msg_id, "role": message.role, "text": message.content or "",
            "calls": message.tool_calls or (),
            "state": "new" if msg_id >= new_from else "kept" if was is None else "edited",
            "was": "" if was is None else was.content or "",
            "was_calls": () if was is None else was.tool_calls or (),
            # At the end of the episode the message is deleted and has this text, so it is deleted here too.
            "deleted": was is not None and msg_id in episode.deleted_msg_ids
            and last[msg_id : msg_id + 1] == [message],
            "edited_at": edited_at,
        })  # fmt: skip
    return views


def _walk(steps: Sequence[StepData]) -> tuple[list[Message], dict[int, tuple[Message, int]], int]:
    """Return the prompt of the last decision in `steps`, its edits, and the index of its first new message.

    The edits map the index of each edited message to the original message and the turn of its first edit.
    """
    prompt: list[Message] = []
    edits: dict[int, tuple[Message, int]] = {}
    new_from = 0
    for step in steps:
        seen, new_from = step.observation_data, step.observation_data.messages_reused
        del prompt[new_from:]  # new messages replace these
        edits = {msg_id: edit for msg_id, edit in edits.items() if msg_id < new_from}
        for msg_id, message in seen.changed.items():
            original, _ = edits.setdefault(msg_id, (prompt[msg_id], step.turn))
            prompt[msg_id] = message
            if message == original:  # the edit is undone
                del edits[msg_id]
        prompt.extend(seen.messages)
    return prompt, edits, new_from


_DID_CHARS = 160
_NUMBER = re.compile(rf"({MINUS}?\d[\d.e+{MINUS}]*)")
BAR_WIDTH = 64.0


def decision_lines(episode: Trajectory, columns: Sequence[Columns]) -> list[dict[str, Any]]:
    """Return the template values of the list of decisions: a dict for every decision of an episode.

    `columns` has the stored columns of each decision, or is empty. In the result, `action` contains the
    executed actions or, in a conversation, the tool calls or the text. `unlocked` contains the achievements
    that are new in the episode, and `payments` the other rewards and costs. `bar` shows a stored advantage.
    """
    stored: list[Columns] = [*columns, *[{}] * (len(episode.steps) - len(columns))]
    largest = max((abs(row["advantage"]) for row in stored if row.get("advantage") is not None), default=0.0)
    talks = bool(episode.full_history)
    lines = []
    for step, row in zip(episode.steps, stored, strict=False):
        executed = "" if talks else " ".join(step.step_info.executed_actions)
        advantage = row.get("advantage")
        lines.append({
            "turn": step.turn, "action": clip(executed or action_text(step), _DID_CHARS),
            "unlocked": [spaced(name) for name in step_deltas(step).unique],
            "payments": _payments(step), "invalid": step.step_info.invalid_reason is not None,
            "reward": row.get("reward"), "return_to_go": row.get("return_to_go"), "advantage": advantage,
            "bar": None if advantage is None else draw_bar(advantage, largest),
        })  # fmt: skip
    return lines


def decision_view(episode: Trajectory, columns: Sequence[Columns], turn: int) -> dict[str, Any]:
    """Return the template values about one decision of an episode: prompt, answer, rewards and credit."""
    step = episode.steps[turn - 1]
    stored = columns[turn - 1] if turn <= len(columns) else {}
    talks = bool(episode.full_history)
    return {
        "turn": turn,
        "credit": credit_figures(stored, signed),
        # Equations as alternating texts and numbers, each with an explanation.
        "derivation": [
            (_NUMBER.split(spaced(line).replace("-", MINUS).replace("*", TIMES)), spaced(words))
            for line, words in credit_lines(stored)
        ],
        "measures": _measures(step),
        "unlocked": [spaced(name) for name in step_deltas(step).unique],
        "prompt": show_prompt(episode, turn),
        "fresh": not talks,  # each decision has a fresh prompt, so no message is marked as new
        "calls": step.tool_calls,
        "answer": step.raw_policy_output or str(step.action_taken.get("content") or ""),
        "actions": step.step_info.executed_actions,
        "invalid": step.step_info.invalid_reason or "",
        "result": step.step_info.tool_result,
        "after": interaction_texts(step)
        + (last_messages(episode) if talks and turn == len(episode.steps) else []),
        "facts": _facts(step),
        "state_key": stored.get("state_key") or "",
        "branch_returns": [signed(value) for value in stored.get("branch_returns") or ()],
    }


def draw_bar(advantage: float, largest: float) -> dict[str, Any]:
    """Return the position and width of a bar that shows an advantage in a picture of width BAR_WIDTH.

    The bar extends from the middle to the right for a positive advantage, and to the left for a negative one.
    An advantage whose absolute value is `largest` fills its half of the picture.
    """
    middle = BAR_WIDTH / 2
    width = round(middle * min(1.0, abs(advantage) / largest), 1) if largest else 0.0
    up = advantage >= 0
    return {"kind": "up" if up else "down", "x": middle if up else middle - width, "width": width}


def _measures(step: StepData) -> list[Figure]:
    delta = step_deltas(step)
    rewards = step.env_rewards or ()
    steps = f"sum over {len(rewards)} env step{'s' * (len(rewards) != 1)}"
    figures = [("environment", signed(float(sum(rewards))), steps)]
    if step.observation_data.achievements_counts or delta.ach_delta:
        figures += [
            ("unique_delta", str(delta.unique_delta), "achievements unlocked for the first time"),
            ("ach_delta", str(delta.ach_delta), "achievements whose counter rose"),
        ]
    paid = "paid in addition to the environment"
    return figures + [(part.source, signed(part.value), paid) for part in step.reward_parts]


def _facts(step: StepData) -> list[tuple[str, str]]:
    info, call = step.step_info, exact_tokens(step)
    facts = [("policy", step.policy_name)]
    if call is not None:
        facts.append(("versions", ", ".join(dict.fromkeys(str(version) for _, version in call.versions))))
        facts.append(("sampled", f"{len(call.token_ids)} tokens, ended by {call.finish_reason}"))
    if info.prompt_tokens is not None:
        facts.append(("prompt", f"{info.prompt_tokens:,} tokens"))
    if step.sampling is not None:
        facts.append(("temperature", f"{step.sampling.temperature:g}"))
        facts.append(("truncation", step.sampling.truncation))
    times = {"policy": info.policy_s, "environment": info.environment_s, "interaction": info.interaction_s}
    texts = [
        f"{who} {number(seconds, 'seconds')}"
        for who, seconds in times.items()
        if seconds or who != "interaction"
    ]
    facts.append(("time", ", ".join(texts)))
    return [(name, value) for name, value in facts if value]


def _payments(step: StepData) -> list[str]:
    """Return a decision's rewards and costs as texts.

    If the environment has achievements, its own reward is left out: the achievements are shown instead.
    """
    parts = [f"{part.source} {signed(part.value)}" for part in step.reward_parts if part.value]
    if step.observation_data.achievements_counts:
        return parts
    rewards = sum(step.env_rewards or ())
    return ([f"environment {signed(float(rewards))}"] if rewards else []) + parts


_CREDIT = (
    ("reward", "r_t", "what this decision earned"),
    ("return_to_go", "return-to-go", "discounted sum of r from here on"),
    ("value", "V", "the return that the critic expected"),
    ("episode_advantage", "A_E", "its episode against the siblings"),
    ("step_advantage", "A_S", "the decision against others made in the same state"),
    ("advantage", "advantage", "what the update was given"),
)


def credit_figures(stored: Columns, show: Callable[[float], str]) -> list[Figure]:
    """Return (name, value, meaning) of each stored reward and advantage of a decision, as texts."""
    numbers = _numbers(stored)
    values = [(title, numbers.get(name), meaning) for name, title, meaning in _CREDIT]
    return [(title, show(value), meaning) for title, value, meaning in values if value is not None]


def credit_lines(stored: Columns) -> list[tuple[str, str]]:
    """Return the equations that compute a decision's advantage from its parts, each with an explanation.

    Return an empty list if the stored estimator is missing or unknown, as in files of earlier versions.
    """
    plug, numbers = ESTIMATORS.get(stored.get("estimator") or ""), _numbers(stored)
    if plug is None:
        return []
    is_first_after_fork = numbers.get("continuations") is not None
    return (AT_FORK if is_first_after_fork else plug.derivation).lines(numbers, _shown)


def _numbers(stored: Columns) -> dict[str, float | None]:
    """Return the stored reward, return-to-go, advantage, and parts of the advantage by name.

    Earlier versions stored some parts in separate columns instead of in `advantage_parts`.
    """
    names = {*PARTS, "reward", "return_to_go", "advantage"}
    return {name: stored.get(name) for name in names} | (stored.get("advantage_parts") or {})


_ROUNDING = 1e-12  # smaller values are rounding errors of sums, and are shown as 0


def _shown(value: float) -> str:
    """Format a value precisely enough to check sums: three decimals; below 0.1, three significant digits."""
    value = 0.0 if abs(value) < _ROUNDING else value
    text = f"{value:.3f}" if abs(value) >= 0.1 or value == 0.0 else f"{value:.3g}"
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text
