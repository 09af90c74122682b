"""Rules that need the answers of a task app. They are checked at a run's start and by `turnwise check`."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from shared_schemas.base import did_you_mean
from shared_schemas.rollouts import MultiTurn
from trainer_backend.job.rollout_table import MultiTurnTable, RolloutTable
from trainer_backend.job.rule import Kind, Rule
from trainer_backend.job.rules import to_find, unknown_state_keys
from trainer_backend.job.training_table import AlgorithmTable, TrainingTable
from trainer_backend.plugins import estimator


@dataclass(frozen=True)
class Played:
    """The facts that these rules check: a task app's answers about an environment, and tables of the job."""

    rollout: RolloutTable
    multi_turn: MultiTurnTable
    algorithm: AlgorithmTable
    training: TrainingTable
    conversation: bool
    takes_answers: bool
    """Whether the environment accepts a message without a tool call."""
    rewards_decisions: bool
    """Whether a single decision can be rewarded: for an achievement, by an interaction, or because it is a
    call of an agent whose calls are rewarded."""
    state_keys: tuple[str, ...]
    has_interactions: bool
    has_curriculum: bool
    """Whether the job has [curriculum], so that some groups start at snapshots."""
    restorable: bool | None
    """Whether the environment supports snapshots; None if the task app is too old to report it."""
    reward_functions: tuple[str, ...]


def _plays_as_usual(played: Played, key: str) -> bool:
    value = getattr(played.multi_turn.for_requests(), key)
    return played.conversation or bool(value == getattr(MultiTurn(), key))


def _name_rewards(played: Played) -> str:
    name, known = str(played.rollout.reward_function), played.reward_functions
    told = f"unknown reward function {name!r}{did_you_mean(name, known) if known else '; it has none'}"
    return f"{told}. A file of the operator has it: services.task_plugins, or turnwise task-app --plugins"


def _make_rule(
    keys: tuple[str, ...],
    holds: Callable[[Played], bool],
    sentence: str | Callable[[Played], str | Iterable[str]],
    kind: Kind = "refusal",
) -> Rule[Played]:
    """Return a rule that is checked for `Played`; errors put the first key before the sentence."""
    return Rule(keys, holds, sentence, kind, "task_app")


TASK_APP_RULES = (
    _make_rule(
        ("multi_turn.enable", "rollout.env_name"),
        lambda p: p.multi_turn.enable or not p.conversation,
        "it is false, and the environment {rollout.env_name!r} is a conversation. With true, the other keys "
        "of [multi_turn] say what bounds it",
    ),
    _make_rule(
        ("algorithm.advantage", "rollout.env_name"),
        lambda p: not (p.conversation and estimator(p.algorithm.advantage).needs_branches),
        "{algorithm.advantage!r} plays on from snapshots, and {rollout.env_name!r} is a conversation, which "
        "no snapshot holds",
    ),
    _make_rule(
        ("curriculum.rule", "rollout.env_name"),
        lambda p: not p.has_curriculum or p.restorable is not False,
        "groups would start at snapshots, and {rollout.env_name!r} has none",
    ),
    _make_rule(
        ("algorithm.train_branches", "rollout.env_name"),
        lambda p: not (p.conversation and p.algorithm.train_branches),
        "it plays on from snapshots, and {rollout.env_name!r} is a conversation, which no snapshot holds",
    ),
    _make_rule(
        ("data.interaction", "rollout.env_name"),
        lambda p: not (p.conversation and p.has_interactions) or p.takes_answers,
        "it, or interaction_kwargs of a row, names an interaction that is never asked in "
        "{rollout.env_name!r}, where only tool calls count and which scores the episode itself: leave it out",
    ),
    *(
        _make_rule(
            (f"multi_turn.{key}", "rollout.env_name"),
            partial(_plays_as_usual, key=key),
            "it has no effect in {rollout.env_name!r}, whose prompts are fresh for each decision; "
            "rollout.env_name = 'dialogue', for prompts, or 'documents' holds a conversation",
            "not read",
        )
        for key in MultiTurn.model_fields
    ),
    _make_rule(
        ("rollout.state_keys", "rollout.env_name"),
        to_find,
        lambda p: unknown_state_keys(p.rollout.state_keys, p.state_keys, p.rollout.env_name),
    ),
    _make_rule(
        ("algorithm.state_hashing_function", "rollout.env_name"),
        lambda p: not estimator(p.algorithm.advantage).needs_state_keys,
        lambda p: unknown_state_keys([p.algorithm.state_hashing_function], p.state_keys, p.rollout.env_name),
    ),
    _make_rule(
        ("rollout.reward_function",),
        lambda p: p.rollout.reward_function in (None, *p.reward_functions),
        _name_rewards,
    ),
    _make_rule(
        ("training.step_rewards_mode", "rollout.env_name"),
        lambda p: (
            p.rewards_decisions
            or p.rollout.reward_function is not None
            or p.algorithm.episode_score == "outcome"
            or not p.training.step_rewards.emits_decision_rewards
        ),
        "training.step_rewards_mode = 'decision_stepwise' pays nothing in {rollout.env_name!r}: it has no "
        "achievements, and no interaction or reward function scores a decision, so every r_t is 0 but for "
        'penalties; "env_sparse" pays what the environment pays, "off" its outcome',
        "advice",
    ),
)
