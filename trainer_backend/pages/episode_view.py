"""Pure: how a page shows an episode: one line for each decision, and one decision with its whole prompt."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shared_schemas.messages import Message, ToolCall
from shared_schemas.trajectory import StepData, Trajectory, exact_tokens, prompts
from trainer_backend.core.statistics import step_deltas
from trainer_backend.pages.figures import number, signed, spaced

# Pure: what one decision saw, did and earned, in texts, for `turnwise inspect` and the report.


def news(step: StepData) -> list[str]:
    """What the prompt of a conversation's decision shows that the one before did not.

    First the messages that were edited since, as they are shown now; then the new ones, but for the model's
    own answer, which stands with the decision that gave it.
    """
    seen = step.observation_data
    own = seen.messages_reused > 0 and seen.messages[:1] and seen.messages[0].role == "assistant"
    new = seen.messages[1:] if own else seen.messages
    edited = [f"message {i} is now {told(message)}" for i, message in sorted(seen.changed.items())]
    return [*edited, *map(told, new)]


def whole_prompts(episode: Trajectory) -> list[list[str]]:
    """Every message of the prompt of each decision."""
    return [[told(message) for message in prompt] for prompt in prompts(episode.steps)]


def last_words(episode: Trajectory) -> list[str]:
    """What a conversation holds after its last answer: results that no prompt showed any more."""
    shown = sum(len(step.observation_data.messages) for step in episode.steps)
    return [told(message) for message in episode.full_history[shown + 1 :]]


def told(message: Message) -> str:
    """Return a message as `role: text`; calls are shown by name and arguments."""
    return f"{message.role}: {' '.join(_pieces(message))}"


def did(step: StepData) -> str:
    """The calls of a decision, or else what it wrote."""
    written = step.action_taken.get("content", step.raw_policy_output)
    return "; ".join(map(_call, step.tool_calls)) or str(written or step.action_taken)


def parts_earned(step: StepData) -> list[str]:
    """Return the parts of a decision's reward beside the environment's own reward."""
    return [f"{part.source} {part.value:+g}" for part in step.reward_parts]


def user_told(step: StepData) -> list[str]:
    """What an interaction said of it that no prompt shows: its words at the end, and its metadata."""
    answer = step.step_info.user_answer
    if answer is None:
        return []
    words = [] if answer.unshown is None else [f"user, not shown: {answer.unshown}"]
    return (
        [*words, f"metadata: {json.dumps(answer.metadata, ensure_ascii=False)}"] if answer.metadata else words
    )


def last_seen(step: StepData) -> str:
    """The last message of its prompt, alone: all of a fresh prompt that changes."""
    return _content(step.observation_data.messages[-1:])


def _content(messages: Sequence[Message]) -> str:
    return "\n".join(str(message.content or "") for message in messages)


def _pieces(message: Message) -> Iterator[str]:
    if message.content:
        yield message.content
    yield from map(_call, message.tool_calls or ())


def _call(call: ToolCall) -> str:
    return f"{call.function.name} {call.function.arguments}"


# kept: as in the previous prompt. new: not shown before. edited: its text was another one before.
State = Literal["kept", "new", "edited"]


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call: its arguments are the JSON that the model wrote."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class MessageView:
    """A message of a prompt.

    Attributes:
        msg_id: its number in the history, from 0.
        text, calls: as they are shown to the model.
        was, was_calls: what stood there before the first edit; of an edited one alone.
        deleted: nothing of it is shown but that it was there.
        edited_at: the turn whose prompt showed it edited for the first time.
    """

    msg_id: int
    role: str
    text: str
    calls: tuple[Call, ...]
    state: State
    was: str = ""
    was_calls: tuple[Call, ...] = ()
    deleted: bool = False
    edited_at: int | None = None


def prompt_of(episode: Trajectory, turn: int) -> list[MessageView]:
    """Every message of the prompt of a decision, by its turn from 1, in the order that the model saw them."""
    walk = _Walk()
    for step in episode.steps[:turn]:
        walk.go_on(step)
    shown, first, since, new_from = list(walk.shown), dict(walk.first), dict(walk.since), walk.new_from
    for step in episode.steps[turn:]:
        walk.go_on(step)
    # What is deleted in the end, and was edited last as it is seen here, is deleted here.
    gone = {
        msg_id
        for msg_id in first
        if msg_id in episode.deleted_msg_ids and walk.shown[msg_id : msg_id + 1] == shown[msg_id : msg_id + 1]
    }
    return [
        _view(
            index, message, first.get(index), since.get(index), new=index >= new_from, deleted=index in gone
        )
        for index, message in enumerate(shown)
    ]


class _Walk:
    """The prompts of an episode, one decision after the other.

    Attributes:
        shown: the prompt as it is now.
        first: by msg_id, what stood there before the first edit; since: from which turn on it is edited.
        new_from: where the messages begin that the prompt before did not have.
    """

    def __init__(self) -> None:
        self.shown: list[Message] = []
        self.first: dict[int, Message] = {}
        self.since: dict[int, int] = {}
        self.new_from = 0

    def go_on(self, step: StepData) -> None:
        """To the prompt of this decision."""
        seen = step.observation_data
        del self.shown[seen.messages_reused :]
        for msg_id in [one for one in self.first if one >= seen.messages_reused]:
            self._forget(msg_id)  # another message will stand at that place
        for msg_id, message in seen.changed.items():
            original = self.first.setdefault(msg_id, self.shown[msg_id])
            self.shown[msg_id] = message
            self.since.setdefault(msg_id, step.turn)
            if message == original:  # an edit was taken back
                self._forget(msg_id)
        self.shown.extend(seen.messages)
        self.new_from = seen.messages_reused

    def _forget(self, msg_id: int) -> None:
        del self.first[msg_id], self.since[msg_id]


def _view(
    msg_id: int, message: Message, was: Message | None, edited_at: int | None, *, new: bool, deleted: bool
) -> MessageView:
    state: State = "new" if new else "kept" if was is None else "edited"
    text, calls = message.content or "", calls_of(message.tool_calls or ())
    if was is None:
        return MessageView(msg_id, message.role, text, calls, state)
    return MessageView(
        msg_id, message.role, text, calls, state, was.content or "", calls_of(was.tool_calls or ()),
        deleted, edited_at,
    )  # fmt: skip


def calls_of(calls: Sequence[ToolCall]) -> tuple[Call, ...]:
    """Of a message, or of a decision."""
    return tuple(Call(call.function.name, call.function.arguments) for call in calls)


Columns = Mapping[str, Any]  # of one decision in a Parquet file

_CREDIT = (
    ("reward", "r_t", "what this decision earned"),
    ("return_to_go", "return-to-go", "discounted sum of r from here on"),
    ("value", "V", "the return that the critic expected"),
    ("episode_advantage", "A_E", "its episode against the siblings"),
    ("step_advantage", "A_S", "the decision against others made in the same state"),
    ("advantage", "advantage", "what the update was given"),
)
_DID_CHARS = 160
BAR_WIDTH = 64.0


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar from the middle of a scale of BAR_WIDTH, to the right where it is good, else to the left."""

    kind: str
    x: float
    width: float


@dataclass(frozen=True, slots=True)
class DecisionLine:
    """A line of the list of decisions.

    Attributes:
        did: what was executed; in a conversation what was called, or else written.
        unlocked: achievements, for the first time in the episode.
        paid: what earned or cost something beside those, each with its sign.
        bar: its advantage, drawn beside the largest of the episode; None without credit.
    """

    turn: int
    did: str
    unlocked: tuple[str, ...]
    paid: tuple[str, ...]
    invalid: bool
    reward: float | None
    return_to_go: float | None
    advantage: float | None
    bar: Bar | None


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its name, and an explanation for readers who do not know the name."""

    name: str
    value: str
    meaning: str


@dataclass(frozen=True, slots=True)
class DecisionView:
    """All of one decision.

    Attributes:
        credit: its rewards and advantages in training; empty if it was not trained on.
        measured: what was counted and paid, each with what it means.
        prompt: the messages that the model saw.
        fresh: the prompt is written anew for each decision, so nothing in it is "new".
        wrote: the model's answer as text, where it is known.
        executed: names of what the environment carried out.
        after: what an interaction said beside its score; messages after the last answer.
    """

    turn: int
    credit: tuple[Figure, ...]
    measured: tuple[Figure, ...]
    unlocked: tuple[str, ...]
    prompt: tuple[MessageView, ...]
    fresh: bool
    calls: tuple[Call, ...]
    wrote: str
    executed: tuple[str, ...]
    invalid: str
    result: str
    after: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    state_key: str
    branch_returns: tuple[str, ...]


def decision_lines(episode: Trajectory, columns: Sequence[Columns]) -> list[DecisionLine]:
    """Return a line for every decision of an episode; `columns` are its stored columns, or empty."""
    known = [_column(columns, step.turn, "advantage") for step in episode.steps]
    largest = max((abs(value) for value in known if value is not None), default=0.0)
    talks = bool(episode.full_history)
    return [
        DecisionLine(
            turn=step.turn,
            did=_short(("" if talks else " ".join(step.step_info.executed_actions)) or did(step)),
            unlocked=tuple(map(spaced, step_deltas(step).unique)),
            paid=tuple(_paid(step)),
            invalid=step.step_info.invalid_reason is not None,
            reward=_column(columns, step.turn, "reward"),
            return_to_go=_column(columns, step.turn, "return_to_go"),
            advantage=advantage,
            bar=None if advantage is None else bar_of(advantage, largest),
        )
        for step, advantage in zip(episode.steps, known, strict=True)
    ]


def decision_view(episode: Trajectory, columns: Sequence[Columns], turn: int) -> DecisionView:
    """One decision, by its turn from 1, which the episode must have."""
    step = episode.steps[turn - 1]
    stored = columns[turn - 1] if turn <= len(columns) else {}
    after = user_told(step) + (
        last_words(episode) if turn == len(episode.steps) and episode.full_history else []
    )
    return DecisionView(
        turn=turn,
        credit=tuple(_credit(stored)),
        measured=tuple(_measured(step)),
        unlocked=tuple(map(spaced, step_deltas(step).unique)),
        prompt=tuple(prompt_of(episode, turn)),
        fresh=not episode.full_history,
        calls=calls_of(step.tool_calls),
        wrote=step.raw_policy_output or str(step.action_taken.get("content") or ""),
        executed=step.step_info.executed_actions,
        invalid=step.step_info.invalid_reason or "",
        result=step.step_info.tool_result,
        after=tuple(after),
        facts=tuple(_facts(step)),
        state_key=stored.get("state_key") or "",
        branch_returns=tuple(signed(value) for value in stored.get("branch_returns") or ()),
    )


def bar_of(advantage: float, largest: float) -> Bar:
    """Beside the largest abs(advantage) of the episode, which fills its half."""
    middle = BAR_WIDTH / 2
    width = round(middle * min(1.0, abs(advantage) / largest), 1) if largest else 0.0
    return Bar("up", middle, width) if advantage >= 0 else Bar("down", middle - width, width)


def _credit(stored: Columns) -> list[Figure]:
    return [
        Figure(title, signed(stored[name]), meaning)
        for name, title, meaning in _CREDIT
        if stored.get(name) is not None
    ]


def _measured(step: StepData) -> list[Figure]:
    delta = step_deltas(step)
    rewards = step.env_rewards or ()
    steps = f"sum over {len(rewards)} env step{'s' * (len(rewards) != 1)}"
    found = [Figure("environment", signed(float(sum(rewards))), steps)]
    if step.observation_data.achievements_counts or delta.ach_delta:
        found.append(
            Figure("unique_delta", str(delta.unique_delta), "achievements unlocked for the first time")
        )
        found.append(Figure("ach_delta", str(delta.ach_delta), "achievements whose counter rose"))
    parts = [
        Figure(part.source, signed(part.value), "paid beside the environment") for part in step.reward_parts
    ]
    return found + parts


def _facts(step: StepData) -> list[tuple[str, str]]:
    info, call = step.step_info, exact_tokens(step)
    found = [("policy", step.policy_name)]
    if call is not None:
        found.append(("versions", ", ".join(dict.fromkeys(str(version) for _, version in call.versions))))
        found.append(("sampled", f"{len(call.token_ids)} tokens, ended by {call.finish_reason}"))
    if info.prompt_tokens is not None:
        found.append(("prompt", f"{info.prompt_tokens:,} tokens"))
    if step.sampling is not None:
        found.append(("temperature", f"{step.sampling.temperature:g}"))
    times = {"policy": info.policy_s, "environment": info.environment_s, "interaction": info.interaction_s}
    shown = [
        f"{who} {number(seconds, 'seconds')}"
        for who, seconds in times.items()
        if seconds or who != "interaction"
    ]
    found.append(("time", ", ".join(shown)))
    return [(name, value) for name, value in found if value]


def _paid(step: StepData) -> list[str]:
    """Return the rewards and costs beside first unlocks, which are shown by name."""
    parts = [f"{part.source} {signed(part.value)}" for part in step.reward_parts if part.value]
    if step.observation_data.achievements_counts:
        return parts
    rewards = sum(step.env_rewards or ())
    return ([f"environment {signed(float(rewards))}"] if rewards else []) + parts


def _column(columns: Sequence[Columns], turn: int, name: str) -> float | None:
    return columns[turn - 1].get(name) if turn <= len(columns) else None


def _short(text: str) -> str:
    return text if len(text) <= _DID_CHARS else text[: _DID_CHARS - 1] + "…"
