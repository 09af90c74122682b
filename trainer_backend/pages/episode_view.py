"""Pure: an episode as a page shows it: a line per decision, and one decision with its whole prompt.

`turnwise inspect` and the report share its texts of what a decision saw, did and earned.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shared_schemas.messages import Message, ToolCall
from shared_schemas.trajectory import StepData, Trajectory, exact_tokens, prompts
from trainer_backend.core.statistics import step_deltas
from trainer_backend.pages.credit_view import Columns, Figure, credit_figures, credit_lines
from trainer_backend.pages.figures import MINUS, TIMES, clip, number, signed, spaced


def new_messages(step: StepData) -> list[str]:
    """Return the messages of a conversation's prompt that differ from the prompt before it.

    Edited messages come first, then new ones. The model's own answer is left out, since it is shown with the
    decision that gave it.
    """
    seen = step.observation_data
    own = seen.messages_reused > 0 and seen.messages[:1] and seen.messages[0].role == "assistant"
    new = seen.messages[1:] if own else seen.messages
    edits = [f"message {i} is now {message_text(message)}" for i, message in sorted(seen.changed.items())]
    return [*edits, *map(message_text, new)]


def whole_prompts(episode: Trajectory) -> list[list[str]]:
    """Return every message of the prompt of each decision."""
    return [[message_text(message) for message in prompt] for prompt in prompts(episode.steps)]


def last_messages(episode: Trajectory) -> list[str]:
    """Return the messages after a conversation's last answer, which are in no prompt."""
    in_prompts = sum(len(step.observation_data.messages) for step in episode.steps)
    return [message_text(message) for message in episode.full_history[in_prompts + 1 :]]


def message_text(message: Message) -> str:
    """Return a message as `role: text`; calls are shown by name and arguments."""
    pieces = [message.content] if message.content else []
    return f"{message.role}: {' '.join([*pieces, *map(_call, message.tool_calls or ())])}"


def action_text(step: StepData) -> str:
    """Return the calls of a decision, or its text if it has no call."""
    text = step.action_taken.get("content", step.raw_policy_output)
    return "; ".join(map(_call, step.tool_calls)) or str(text or step.action_taken)


def reward_parts(step: StepData) -> list[str]:
    """Return the parts of a decision's reward, without the environment's own reward."""
    return [f"{part.source} {part.value:+g}" for part in step.reward_parts]


def interaction_texts(step: StepData) -> list[str]:
    """Return what an interaction answered outside of prompts: its last response, and its metadata."""
    answer = step.step_info.user_answer
    if answer is None:
        return []
    texts = [] if answer.unshown is None else [f"user, not shown: {answer.unshown}"]
    if answer.metadata:
        texts.append(f"metadata: {json.dumps(answer.metadata, ensure_ascii=False)}")
    return texts


def last_message(step: StepData) -> str:
    """Return the last message of a prompt: the only one that changes between fresh prompts."""
    return "".join(str(message.content or "") for message in step.observation_data.messages[-1:])


def _call(call: ToolCall) -> str:
    return f"{call.function.name} {call.function.arguments}"


# kept: as in the previous prompt. new: not in it. edited: changed since it was new.
State = Literal["kept", "new", "edited"]


@dataclass(frozen=True, slots=True)
class MessageView:
    """A message of a prompt."""

    msg_id: int
    """Its number in the history, from 0."""
    role: str
    text: str
    calls: tuple[ToolCall, ...]
    state: State
    was: str = ""
    """Its text before the first edit; like `was_calls` empty if it was not edited."""
    was_calls: tuple[ToolCall, ...] = ()
    deleted: bool = False
    """The edit deleted it."""
    edited_at: int | None = None
    """The first turn whose prompt has it edited."""


def prompt_of(episode: Trajectory, turn: int) -> list[MessageView]:
    """Return every message of the prompt of a turn, in the order of the prompt."""
    walk = _Walk()
    for step in episode.steps[:turn]:
        walk.add(step)
    prompt, first, since, new_from = list(walk.prompt), dict(walk.first), dict(walk.since), walk.new_from
    for step in episode.steps[turn:]:
        walk.add(step)
    # A message that ends deleted, and is not edited after this prompt, is deleted in this prompt.
    deleted = {
        msg_id
        for msg_id in first
        if msg_id in episode.deleted_msg_ids
        and walk.prompt[msg_id : msg_id + 1] == prompt[msg_id : msg_id + 1]
    }
    views = []
    for msg_id, message in enumerate(prompt):
        was = first.get(msg_id)
        state: State = "new" if msg_id >= new_from else "kept" if was is None else "edited"
        view = MessageView(msg_id, message.role, message.content or "", message.tool_calls or (), state)
        if was is not None:
            view = replace(
                view, was=was.content or "", was_calls=was.tool_calls or (),
                deleted=msg_id in deleted, edited_at=since.get(msg_id),
            )  # fmt: skip
        views.append(view)
    return views


class _Walk:
    """The prompts of an episode, one decision after the other."""

    def __init__(self) -> None:
        self.prompt: list[Message] = []
        self.first: dict[int, Message] = {}  # by msg_id, the message before its first edit
        self.since: dict[int, int] = {}  # by msg_id, the turn of the first edit
        self.new_from = 0  # index of the first message that the prompt before did not have

    def add(self, step: StepData) -> None:
        """Move to the prompt of this decision."""
        seen = step.observation_data
        del self.prompt[seen.messages_reused :]
        for msg_id in [one for one in self.first if one >= seen.messages_reused]:
            self._forget(msg_id)  # another message takes its place
        for msg_id, message in seen.changed.items():
            original = self.first.setdefault(msg_id, self.prompt[msg_id])
            self.prompt[msg_id] = message
            self.since.setdefault(msg_id, step.turn)
            if message == original:  # the edit is undone
                self._forget(msg_id)
        self.prompt.extend(seen.messages)
        self.new_from = seen.messages_reused

    def _forget(self, msg_id: int) -> None:
        del self.first[msg_id], self.since[msg_id]


_DID_CHARS = 160
_NUMBER = re.compile(rf"({MINUS}?\d[\d.e+{MINUS}]*)")
BAR_WIDTH = 64.0


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar from the middle of a scale of BAR_WIDTH: to the right if positive, else to the left."""

    kind: str
    x: float
    width: float


@dataclass(frozen=True, slots=True)
class DecisionLine:
    """A line of the list of decisions."""

    turn: int
    action: str
    """The executed actions; in a conversation the calls or the text."""
    unlocked: tuple[str, ...]
    """Achievements, for the first time in the episode."""
    payments: tuple[str, ...]
    """Other rewards and costs, each with its sign."""
    invalid: bool
    reward: float | None
    return_to_go: float | None
    advantage: float | None
    bar: Bar | None
    """Its advantage, on the scale of the episode's largest; None without credit."""


@dataclass(frozen=True, slots=True)
class DecisionView:
    """All of one decision."""

    turn: int
    credit: tuple[Figure, ...]
    """Its rewards and advantages in training; empty if it was not trained on."""
    derivation: tuple[tuple[tuple[str, ...], str], ...]
    """How the advantage follows from its parts: equations, in pieces of text and number in turn, each with
    words about it."""
    measures: tuple[Figure, ...]
    """Counts and rewards, each with its meaning."""
    unlocked: tuple[str, ...]
    prompt: tuple[MessageView, ...]
    """The messages that the model saw."""
    fresh: bool
    """Each decision has a fresh prompt, so no message is marked as new."""
    calls: tuple[ToolCall, ...]
    answer: str
    """The model's answer as text, if it is known."""
    actions: tuple[str, ...]
    """Names of the executed actions."""
    invalid: str
    result: str
    after: tuple[str, ...]
    """The texts of an interaction, and the messages after the last answer."""
    facts: tuple[tuple[str, str], ...]
    state_key: str
    branch_returns: tuple[str, ...]


def decision_lines(episode: Trajectory, columns: Sequence[Columns]) -> list[DecisionLine]:
    """Return a line for every decision of an episode; `columns` are its stored columns, or empty."""
    advantages = [_column(columns, step.turn, "advantage") for step in episode.steps]
    largest = max((abs(value) for value in advantages if value is not None), default=0.0)
    talks = bool(episode.full_history)
    return [
        DecisionLine(
            turn=step.turn,
            action=clip(
                ("" if talks else " ".join(step.step_info.executed_actions)) or action_text(step), _DID_CHARS
            ),
            unlocked=tuple(map(spaced, step_deltas(step).unique)),
            payments=tuple(_payments(step)),
            invalid=step.step_info.invalid_reason is not None,
            reward=_column(columns, step.turn, "reward"),
            return_to_go=_column(columns, step.turn, "return_to_go"),
            advantage=advantage,
            bar=None if advantage is None else bar_of(advantage, largest),
        )
        for step, advantage in zip(episode.steps, advantages, strict=True)
    ]


def decision_view(episode: Trajectory, columns: Sequence[Columns], turn: int) -> DecisionView:
    """Return one decision of an episode, by its turn."""
    step = episode.steps[turn - 1]
    stored = columns[turn - 1] if turn <= len(columns) else {}
    after = interaction_texts(step) + (
        last_messages(episode) if turn == len(episode.steps) and episode.full_history else []
    )
    return DecisionView(
        turn=turn,
        credit=tuple(credit_figures(stored, signed)),
        derivation=tuple(
            (tuple(_NUMBER.split(spaced(line).replace("-", MINUS).replace("*", TIMES))), spaced(words))
            for line, words in credit_lines(stored)
        ),
        measures=tuple(_measures(step)),
        unlocked=tuple(map(spaced, step_deltas(step).unique)),
        prompt=tuple(prompt_of(episode, turn)),
        fresh=not episode.full_history,
        calls=step.tool_calls,
        answer=step.raw_policy_output or str(step.action_taken.get("content") or ""),
        actions=step.step_info.executed_actions,
        invalid=step.step_info.invalid_reason or "",
        result=step.step_info.tool_result,
        after=tuple(after),
        facts=tuple(_facts(step)),
        state_key=stored.get("state_key") or "",
        branch_returns=tuple(signed(value) for value in stored.get("branch_returns") or ()),
    )


def bar_of(advantage: float, largest: float) -> Bar:
    """Return the bar of an advantage; `largest` is the largest abs(advantage), whose bar fills its half."""
    middle = BAR_WIDTH / 2
    width = round(middle * min(1.0, abs(advantage) / largest), 1) if largest else 0.0
    return Bar("up", middle, width) if advantage >= 0 else Bar("down", middle - width, width)


def _measures(step: StepData) -> list[Figure]:
    delta = step_deltas(step)
    rewards = step.env_rewards or ()
    steps = f"sum over {len(rewards)} env step{'s' * (len(rewards) != 1)}"
    figures = [Figure("environment", signed(float(sum(rewards))), steps)]
    if step.observation_data.achievements_counts or delta.ach_delta:
        figures += [
            Figure("unique_delta", str(delta.unique_delta), "achievements unlocked for the first time"),
            Figure("ach_delta", str(delta.ach_delta), "achievements whose counter rose"),
        ]
    return figures + [
        Figure(part.source, signed(part.value), "paid beside the environment") for part in step.reward_parts
    ]


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
    """Return the rewards and costs of a decision; of an environment with achievements, without its own."""
    parts = [f"{part.source} {signed(part.value)}" for part in step.reward_parts if part.value]
    if step.observation_data.achievements_counts:
        return parts
    rewards = sum(step.env_rewards or ())
    return ([f"environment {signed(float(rewards))}"] if rewards else []) + parts


def _column(columns: Sequence[Columns], turn: int, name: str) -> float | None:
    return columns[turn - 1].get(name) if turn <= len(columns) else None
