"""The inputs and outputs of every estimator, and shared code of estimators that compare whole episodes.

An estimator gets all episodes of the batch, in any order, and its job keys. It returns an `Advantages`, which
contains the [T] advantages of each episode, their parts, and counts. It raises AdvantageError in the cases
that `siblings` lists, and if an episode lacks inputs that the estimator needs: state keys, texts, values or
branches.
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
    """Id of the rollout; error messages contain it."""
    group_id: str
    """Id of the group. Siblings share it: they have the same environment and the same start."""
    rewards_T: Sequence[float]
    """[T] reward of each decision, from `shared_schemas.rewards.reward_vector`; T >= 1."""
    state_keys_T: Sequence[str] = ()
    """[T] key of the state before each decision; equal keys mean equal states. This field and the following
    fields down to `branch_returns_T` are empty or None unless the estimator needs them."""
    texts_T: Sequence[str] = ()
    """[T] text of the observation before each decision."""
    values_T: Sequence[float] = ()
    """[T] value V(s_t) that a critic predicts, in units of the reward."""
    token_values: ByToken | None = None
    """Values of a critic that was trained per token: for each sampled token, the value at the position that
    predicts the token."""
    branch_returns_T: Sequence[Sequence[float]] = ()
    """[T] discounted returns of the branches that start before each decision; empty for most decisions."""
    final_score: float | None = None
    """Score of the whole episode; None: the sum of its rewards."""
    truncated: bool = False
    """Whether a limit cut the episode short while the policy could have continued."""
    value_after: float | None = None
    """Critic's value of the state after the last decision; None if no limit cut the episode short, or if the
    value is unknown."""

    @property
    def score(self) -> float:
        """The episode's score R: `final_score`, or the sum of the rewards if `final_score` is None."""
        return math.fsum(self.rewards_T) if self.final_score is None else self.final_score

    @property
    def score_size(self) -> float:
        """The magnitude against which rounding errors of the score are judged.

        `shared_schemas.rounding` describes the test.
        """
        return math.fsum(map(abs, self.rewards_T)) if self.final_score is None else abs(self.final_score)


class EstimatorKeys(Table):
    """Base class of the job keys of estimators, with the `[algorithm]` key that all estimators may read."""

    gamma: float = Field(default=0.97, ge=0, le=1)
    """discount per decision"""

    def for_critic(self) -> Self:
        """Return the keys with which the critic's targets are computed.

        A target is the critic's value plus the advantage that the estimator computes with these keys.
        """
        return self


class ScoreKeys(EstimatorKeys):
    """Keys of estimators that compare whole episodes."""

    episode_score: Literal["rewards", "outcome"] = "rewards"
    """score by which whole episodes are compared; rewards: the sum of r_t; outcome: the episode's outcome,
    which is the score of the job's reward function if it has one. The returns of decisions always come from
    r_t"""


Parts = Mapping[str, Sequence[Sequence[float | None]]]


@dataclass(frozen=True, slots=True)
class Advantages:
    per_episode: list[list[float]]
    """[T] advantages of each episode, in float64 and in the order of the given episodes."""
    diagnostics: dict[str, float] = field(default_factory=dict)
    """Counts by metric name (`advantages/...`)."""
    parts: Parts = field(default_factory=dict)
    """Intermediate values by the names of `derivation.PARTS`. Each has the shape of `per_episode`, with None
    for a decision that lacks the part. The equations of the estimator's derivation compute the advantages
    from parts and rewards, up to an error of 1e-12 times the largest number. Parts are stored with the
    rollouts and shown to users."""
    per_token: list[ByToken] | None = None
    """For each given episode, the advantages of its sampled tokens. Training then uses these advantages, and
    `per_episode` contains their mean over each decision. None if the estimator does not tell tokens apart."""


Keys = TypeVar("Keys", bound=EstimatorKeys)
Estimator = Callable[[Sequence[EpisodeRewards], Keys], Advantages]


@dataclass(frozen=True, slots=True)
class EstimatorPlug(Generic[Keys]):
    """An estimator that a job selects by name. Each file of this folder lists its estimators in `PLUGS`."""

    compute: Estimator[Keys]
    keys: type[Keys]
    """Class of the job keys that the estimator reads. Keys that the table [algorithm] does not define are in
    [algorithm.NAME]."""
    derivation: Derivation = field(default_factory=Derivation)
    """How the advantages follow from their parts. An estimator without equations reports no parts."""
    needs_state_keys: bool = False
    """Whether each decision needs the key of its state."""
    needs_texts: bool = False
    """Whether each decision needs the text of its observation."""
    needs_values: ValueLevel | None = None
    """Whether the estimator reads a critic's values per decision or per token; None: it needs no critic."""
    needs_branches: bool = False
    """Whether some decisions need branches that start before them."""
    divides_by_std: bool = False
    """Whether the estimator divides by a standard deviation, always or with `fnorm = "std"`."""
    compares_siblings: bool = True
    """Whether the advantages depend on how episodes are grouped."""
    bias: str = ""
    """Why these advantages always bias the policy gradient; empty if the gradient is unbiased at gamma 1 with
    fixed denominators (DESIGN.md 4.6)."""
    values: Mapping[str, float | str] = field(default_factory=dict)
    """Defaults from the estimator's paper, by dotted job key. Values that the job sets take precedence."""


def siblings(episodes: Sequence[EpisodeRewards]) -> Mapping[str, list[int]]:
    """Return, by group id, the indices of the group's episodes, with groups in order of first appearance.

    Raises AdvantageError if an episode has no decision, or if a reward or a score is not finite.
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
    """Raise AdvantageError unless each episode has exactly one input per decision.

    `columns` contains the inputs of each episode. `what` names the inputs in the error message, and `why` is
    the part of the message that says why they are needed.
    """
    for episode, column_T in zip(episodes, columns, strict=True):
        given, decisions = len(column_T), len(episode.rewards_T)
        if given != decisions:
            message = f"{given} {what} for {decisions} decisions; {why}"
            raise AdvantageError(message, where=place(episode.rollout_id), hint=hint)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing scores with each other: advantage = (score - baseline) / scale.

    If all scores are equal, or if there is only one, each score is its own baseline and the scale is 1.
    """

    advantages: Sequence[float]
    baselines: Sequence[float]
    scale: float = 1.0


class Compare(Protocol):
    """Compares the [G] scores of a group; `size` is the largest `score_size` of the group's episodes."""

    def __call__(self, scores: Sequence[float], /, *, size: float) -> Comparison: ...


def against_siblings(episodes: Sequence[EpisodeRewards], compare: Compare) -> Advantages:
    """Compare the scores within each group; all decisions of an episode get the same advantage."""
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
    """Count the groups, the groups without spread, and the episodes without siblings.

    A group without spread has two or more episodes, and all of its advantages are 0. `advantages` has one row
    per episode; if `advantages` is empty, no group is counted as without spread.
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
