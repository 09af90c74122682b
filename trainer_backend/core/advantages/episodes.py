"""The inputs and outputs of every estimator, and the shared code for one advantage per episode.

An estimator takes all episodes of the batch, groups in any order, and its keys. It returns an `Advantages`:
the [T] advantages of each episode, their parts, and counts. It raises AdvantageError where `siblings` does,
and if an episode lacks inputs that the estimator needs: state keys, texts, values or branches.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, Self, TypeVar

from pydantic import Field

from trainer_backend.core.advantages.derivation import Derivation
from trainer_backend.core.critic import ByToken, ValueLevel
from trainer_backend.core.keys import Table
from trainer_backend.core.metric import Metric, Row
from trainer_backend.errors import AdvantageError, place


@dataclass(frozen=True, slots=True)
class EpisodeRewards:
    """The inputs of an estimator for one episode."""

    rollout_id: str
    """Named in errors."""
    group_id: str
    """Equal for siblings: same environment, same start."""
    rewards_T: Sequence[float]
    """[T] reward of each decision, from `shared_schemas.rewards.reward_vector`; T >= 1."""
    state_keys_T: Sequence[str] = ()
    """[T] name of the state before each decision; equal names are equal states. This column, and each one
    down to `branch_returns_T`, is empty or None unless the estimator needs it."""
    texts_T: Sequence[str] = ()
    """[T] text of the observation before each decision."""
    values_T: Sequence[float] = ()
    """[T] V(s_t) of a critic, in reward units."""
    token_values: ByToken | None = None
    """V of a critic that was trained by token, at the prediction of each sampled token."""
    branch_returns_T: Sequence[Sequence[float]] = ()
    """[T] discounted returns of the branches from before each decision; most decisions have none."""
    final_score: float | None = None
    """Score of the whole episode, if it is not the sum of its rewards."""
    truncated: bool = False
    """Whether a limit cut the episode short while the policy could have continued."""
    value_after: float | None = None
    """V of the state after the last decision, if a limit cut the episode short; None: unknown."""

    @property
    def score(self) -> float:
        """R: final_score, or the sum of the rewards."""
        return math.fsum(self.rewards_T) if self.final_score is None else self.final_score

    @property
    def score_size(self) -> float:
        """Return the size to which rounding errors of the score are relative (`shared_schemas.rounding`)."""
        return math.fsum(map(abs, self.rewards_T)) if self.final_score is None else abs(self.final_score)


class EstimatorKeys(Table):
    """The key of `[algorithm]` that every estimator may read; classes with more keys inherit from it."""

    gamma: float = Field(default=0.97, ge=0, le=1)
    """discount per decision"""

    def for_critic(self) -> Self:
        """Return the keys with which advantage plus value is the critic's target."""
        return self


class ScoreKeys(EstimatorKeys):
    """Keys of estimators that compare whole episodes."""

    episode_score: Literal["rewards", "outcome"] = "rewards"
    """score of a whole episode among siblings: the sum of r_t, or the outcome, which is the score of a reward
    function if there is one; returns of decisions come from r_t either way"""


Parts = Mapping[str, Sequence[Sequence[float | None]]]


@dataclass(frozen=True, slots=True)
class Advantages:
    per_episode: list[list[float]]
    """For each episode, in the order given, its [T] advantages, in float64."""
    diagnostics: dict[str, float] = field(default_factory=dict)
    """Counts by metric name (`advantages/...`)."""
    parts: Parts = field(default_factory=dict)
    """The parts of the advantages, by the names of `derivation.PARTS`, each in the shape of per_episode; None
    where a decision lacks the part. The estimator's derivation computes the advantages from parts and
    rewards, to 1e-12 of the largest number. Parts are stored with the rollouts and shown."""
    per_token: list[ByToken] | None = None
    """Advantages of sampled tokens in the same order, from an estimator that distinguishes them. These are
    then trained, and per_episode holds the mean of each decision."""


Keys = TypeVar("Keys", bound=EstimatorKeys)
Estimator = Callable[[Sequence[EpisodeRewards], Keys], Advantages]


@dataclass(frozen=True, slots=True)
class EstimatorPlug(Generic[Keys]):
    """An estimator that a job can name; each file of this folder lists its own in `PLUGS`, by name."""

    compute: Estimator[Keys]
    keys: type[Keys]
    """The keys that it reads from [algorithm], or from `[algorithm.NAME]` if [algorithm] lacks them."""
    derivation: Derivation = field(default_factory=Derivation)
    """How its advantages follow from their parts; without equations it reports no parts."""
    needs_state_keys: bool = False
    """Whether decisions must carry the name of their state."""
    needs_texts: bool = False
    """Whether decisions must carry the text of their observation."""
    needs_values: ValueLevel | None = None
    """Whether it reads a critic's values by decision or by token; None: it needs no critic."""
    needs_branches: bool = False
    """Whether branches must be played from before some of the decisions."""
    divides_by_std: bool = False
    """Whether it divides by a standard deviation, always or with `fnorm = "std"`."""
    compares_siblings: bool = True
    """Whether its advantages depend on the groups of the episodes."""
    bias: str = ""
    """Why its advantages never give the policy gradient; empty if they do at gamma 1 with fixed denominators
    (DESIGN.md 4.6)."""
    values: Mapping[str, float | str] = field(default_factory=dict)
    """Defaults from its paper, by dotted key of the job; the job's own values win."""


def siblings(episodes: Sequence[EpisodeRewards]) -> Mapping[str, list[int]]:
    """Return the indices of the episodes of each group, groups in order of first appearance.

    Raises AdvantageError for an episode without a decision, or with a reward or score that is not finite.
    """
    groups: dict[str, list[int]] = {}
    for index, episode in enumerate(episodes):
        if not episode.rewards_T:
            raise AdvantageError("no decision to give credit to", where=place(episode.rollout_id))
        for t, reward in enumerate(episode.rewards_T):
            if not math.isfinite(reward):
                raise AdvantageError(f"the reward is {reward}", where=place(episode.rollout_id, t + 1))
        if not math.isfinite(episode.score):
            raise AdvantageError(f"the score is {episode.score}", where=place(episode.rollout_id))
        groups.setdefault(episode.group_id, []).append(index)
    return groups


def refuse_incomplete(
    episodes: Sequence[EpisodeRewards],
    columns: Iterable[Sequence[object]],
    what: str,
    why: str,
    hint: str | None = None,
) -> None:
    """Refuse an episode whose column has fewer or more entries than decisions.

    `columns` holds one column per episode. Errors call the entries `what`, and say `why` they are needed.
    """
    for episode, column_T in zip(episodes, columns, strict=True):
        given, decisions = len(column_T), len(episode.rewards_T)
        if given != decisions:
            message = f"{given} {what} for {decisions} decisions; {why}"
            raise AdvantageError(message, where=place(episode.rollout_id), hint=hint)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Scores that were compared with each other: advantage = (score - baseline) / scale.

    Without spread, as for a single score, each score is its own baseline, and the scale is 1.
    """

    advantages: Sequence[float]
    baselines: Sequence[float]
    scale: float = 1.0


class Compare(Protocol):
    """Compares the [G] scores of a group; `size` is their largest score_size (`shared_schemas.rounding`)."""

    def __call__(self, scores: Sequence[float], /, *, size: float) -> Comparison: ...


def against_siblings(episodes: Sequence[EpisodeRewards], compare: Compare) -> Advantages:
    """Compare the scores of each group; all decisions of an episode get the episode's advantage."""
    names = ("score", "baseline", "compared", "scale")
    advantages: list[list[float]] = [[] for _ in episodes]
    parts: dict[str, list[list[float]]] = {name: [[] for _ in episodes] for name in names}
    groups = siblings(episodes)
    for members in groups.values():
        scores_G = [episodes[index].score for index in members]
        compared = compare(scores_G, size=max(episodes[index].score_size for index in members))
        rows = zip(members, scores_G, compared.advantages, compared.baselines, strict=True)
        for index, score, advantage, baseline in rows:
            decisions = len(episodes[index].rewards_T)
            advantages[index] = [advantage] * decisions
            values = (score, baseline, len(members) - 1.0, compared.scale)
            for name, value in zip(names, values, strict=True):
                parts[name][index] = [value] * decisions
    return Advantages(advantages, group_counts(groups, advantages), parts)


METRICS = (
    Row(
        Metric("advantages/groups", "groups"),
        Metric("advantages/groups_without_spread", "groups of two or more that the estimator cannot tell "
               "apart (equal scores, or with `stepwise` equal returns)"),
        Metric("advantages/lone_episodes", "episodes without a sibling"),
    ),
)  # fmt: skip


def group_counts(
    groups: Mapping[str, Sequence[int]], advantages: Sequence[Sequence[float]]
) -> dict[str, float]:
    """Count groups, groups of two or more whose advantages are all 0, and lone episodes.

    `advantages` has a row per episode; it is empty for estimators that compare no siblings.
    """
    flat = [
        members
        for members in groups.values()
        if advantages and len(members) > 1 and not any(any(advantages[index]) for index in members)
    ]
    return {
        "advantages/groups": float(len(groups)),
        "advantages/groups_without_spread": float(len(flat)),
        "advantages/lone_episodes": float(sum(len(members) == 1 for members in groups.values())),
    }
