"""Pure: one episode as its page shows it: a line a decision, and all of one decision."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared_schemas.trajectory import StepData, Trajectory, exact_tokens
from trainer_backend.core.statistics import step_deltas
from trainer_backend.dashboard.figures import number, signed, spaced
from trainer_backend.dashboard.message_view import Call, MessageView, calls_of, prompt_of
from trainer_backend.report.seen import did, last_words, user_told

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
    """A number with its name, and what it means for who does not know the name."""

    name: str
    value: str
    meaning: str


@dataclass(frozen=True, slots=True)
class DecisionView:
    """All of one decision.

    Attributes:
        credit: what training made of it; empty where it made nothing.
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
    """Every decision of an episode; `columns` are its stored ones, empty where there are none."""
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
    """What is paid besides first unlocks: those say their names."""
    parts = [f"{part.source} {signed(part.value)}" for part in step.reward_parts if part.value]
    if step.observation_data.achievements_counts:
        return parts
    rewards = sum(step.env_rewards or ())
    return ([f"environment {signed(float(rewards))}"] if rewards else []) + parts


def _column(columns: Sequence[Columns], turn: int, name: str) -> float | None:
    return columns[turn - 1].get(name) if turn <= len(columns) else None


def _short(text: str) -> str:
    return text if len(text) <= _DID_CHARS else text[: _DID_CHARS - 1] + "…"
