"""GAE: generalised advantages, with a critic's values as baselines instead of siblings' returns."""

import math
from collections.abc import Sequence
from typing import Self

from pydantic import Field

from trainer_backend.core.advantages.derivation import LATER, Derivation
from trainer_backend.core.advantages.episodes import (
    Advantages,
    EpisodeRewards,
    EstimatorKeys,
    EstimatorPlug,
    group_counts,
    refuse_incomplete,
    siblings,
)
from trainer_backend.core.critic import ByToken, explained_variance
from trainer_backend.core.keys import refuse_no_share
from trainer_backend.core.metric import Metric, Row
from trainer_backend.core.rewards import discounted_returns
from trainer_backend.errors import AdvantageError, place


class LambdaKeys(EstimatorKeys):
    """Keys of estimators that compute generalised advantages."""

    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """gae, gagpo: lambda over decisions; a higher lambda gives longer returns more weight"""


class GaeKeys(LambdaKeys):
    """Keys of `gae`."""

    critic_lambda: float | None = Field(default=None, ge=0, le=1)
    """gae: lambda of the critic's targets; absent: gae_lambda. At 1 the targets are the returns, so the
    critic does not learn from its own errors (decoupled GAE of VC-PPO, arXiv:2503.01491)"""
    bootstrap_truncated: bool = False
    """gae: if a limit cut an episode short, its return continues with the critic's value of the last state,
    not with 0. Measuring this value needs one more token from the policy per such episode"""

    def for_critic(self) -> Self:
        return self if (own := self.critic_lambda) is None else self.model_copy(update={"gae_lambda": own})


class GaeTokenKeys(GaeKeys):
    """Keys of `gae_token`."""

    gae_token_lambda: float = Field(default=1.0, ge=0, le=1)
    """gae_token: lambda between the tokens of one decision; gae_lambda applies between decisions"""


def gae(episodes: Sequence[EpisodeRewards], keys: GaeKeys) -> Advantages:
    """Compute generalised advantage estimates over decisions, from a critic's values V(s_t).

        A_t     = delta_t + gamma * lambda * A_{t+1},          A_T = 0
        delta_t = r_t + gamma * V(s_{t+1}) - V(s_t),           V(s_T) = 0

    V(s_T), the value after the last decision, is 0 even if a limit ended the episode: the limit is a rule of
    the task, and the critic learns how it lowers the return. With bootstrap_truncated, V(s_T) of an episode
    that a limit cut short is `value_after`, the critic's value of the episode's last state. If `value_after`
    is unknown, because the prompt of a further decision did not fit, V(s_T) is 0. Advantages are not
    standardised, and do not depend on groups.

    Source: Schulman et al., GAE, arXiv:1506.02438, eq. 16; over turns: Turn-PPO, arXiv:2512.17008; limits:
    Pardo et al., Time Limits in RL, arXiv:1712.00378, section 4. verl standardises the advantages over the
    batch, which hides the unit of the rewards; this code does not.
    """
    counts = _counts(episodes, keys)
    for episode in episodes:
        _refuse_other_values(episode, "gae")
    advantages = [
        generalised_advantages(
            episode.rewards_T,
            episode.values_T,
            gamma=keys.gamma,
            gae_lambda=keys.gae_lambda,
            value_after=_value_after(episode, keys),
        )
        for episode in episodes
    ]
    rows = zip(episodes, advantages, strict=True)
    return Advantages(advantages, counts, _by_name([_parts(*row, keys) for row in rows]))


def _parts(episode: EpisodeRewards, advantages_T: Sequence[float], keys: GaeKeys) -> dict[str, list[float]]:
    """Return the [T] parts of one episode, by name."""
    gamma, carried = keys.gamma, keys.gamma * keys.gae_lambda
    next_T = [*episode.values_T[1:], _value_after(episode, keys)]
    columns = zip(episode.rewards_T, next_T, episode.values_T, strict=True)
    return {
        "value": list(episode.values_T),
        "next_value": next_T,
        "discount": [gamma] * len(next_T),
        "td_error": [reward + gamma * after - value for reward, after, value in columns],
        "later": [*(carried * advantage for advantage in advantages_T[1:]), 0.0],
    }


def gae_token(episodes: Sequence[EpisodeRewards], keys: GaeTokenKeys) -> Advantages:
    """Compute `gae` over sampled tokens; gamma and gae_lambda apply once per decision, not per token.

    For token j of the n tokens of decision t, `next` is the token that was sampled next, in the same decision
    or in a later one:

        A_{t,j}     = delta_{t,j} + c * A_next,                 A_next = 0 after the episode's last token
        delta_{t,j} = r + g * V_next - V_{t,j}
        inside a decision (j < n - 1)           r = 0     g = 1         c = gae_token_lambda
        at a decision's last token (j = n - 1)  r = r_t   g = gamma     c = gamma * gae_lambda
        after the episode's last token          V_next = V(s_T) of `gae`

    Only sampled tokens count, so the length of a prompt or observation does not change any advantage. At
    gae_token_lambda = 1, A_{t,j} is the lambda-return of `gae` minus V_{t,j}, so long answers get as much
    credit as short ones. Below 1, a token's own effect on V, which is delta_{t,j}, counts more than the
    effects of later tokens. If gamma applied per token, the discount of a reward would depend on the number
    of tokens.

    The advantage and the parts of a decision are means over its tokens, except for `value`, which is V at its
    first token.

    Source: the sources of `gae`; Verlog, for separate discounts of tokens and decisions; VAGEN,
    arXiv:2510.16907, for two levels of the recursion. VAGEN starts the recursion over a turn's tokens from
    the advantage of that turn. This code starts it from the advantage of the next decision's first token.
    """
    counts = _counts(episodes, keys)
    of_tokens = [_token_advantages(episode, keys) for episode in episodes]
    rows = zip(episodes, of_tokens, strict=True)
    parts = _by_name([_parts_of_tokens(*row, keys) for row in rows])
    return Advantages([item.means_T for item in of_tokens], counts, parts, of_tokens)


def _parts_of_tokens(
    episode: EpisodeRewards, of_tokens: ByToken, keys: GaeTokenKeys
) -> dict[str, list[float]]:
    """Return the [T] parts of one episode, by name.

    `td_error` and `later` are means over the tokens of a decision. For token j of n, `later` is the advantage
    of the next decision's first token, multiplied by gamma * gae_lambda * gae_token_lambda^(n - 1 - j).
    """
    carried, inside = keys.gamma * keys.gae_lambda, keys.gae_token_lambda
    firsts_T = of_tokens.firsts_T
    later_T = [
        carried * _mean_power(inside, len(row)) * following
        for row, following in zip(of_tokens.rows_T, [*firsts_T[1:], 0.0], strict=True)
    ]
    td_errors_T = [mean - later for mean, later in zip(of_tokens.means_T, later_T, strict=True)]
    return {"value": list(episode.values_T), "td_error": td_errors_T, "later": later_T}


def _mean_power(base: float, count: int) -> float:
    """Compute the mean of base^k for k = 0 .. count - 1."""
    return 1.0 if base == 1.0 else (1.0 - base**count) / (count * (1.0 - base))


def generalised_advantages(
    rewards: Sequence[float],
    values: Sequence[float],
    *,
    gamma: float,
    gae_lambda: float,
    value_after: float = 0.0,
) -> list[float]:
    """Compute the advantages of one episode as in `gae`; `value_after` is V after the last reward."""
    refuse_no_share(gamma=gamma, gae_lambda=gae_lambda)
    advantages = [0.0] * len(rewards)
    advantage, next_value = 0.0, value_after
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * next_value - values[t]
        advantage = delta + gamma * gae_lambda * advantage
        advantages[t], next_value = advantage, values[t]
    return advantages


def _token_advantages(episode: EpisodeRewards, keys: GaeTokenKeys) -> ByToken:
    gamma, inside, between = keys.gamma, keys.gae_token_lambda, keys.gae_lambda
    values = _token_values(episode)
    rows_T: list[list[float]] = [[] for _ in values]
    advantage, next_value = 0.0, _value_after(episode, keys)
    for t in reversed(range(len(values))):
        reward, discount, carried = episode.rewards_T[t], gamma, gamma * between  # of the last token
        row = [0.0] * len(values[t])
        for j in reversed(range(len(row))):
            value = values[t][j]
            advantage = reward + discount * next_value - value + carried * advantage
            row[j], next_value = advantage, value
            reward, discount, carried = 0.0, 1.0, inside
        rows_T[t] = row
    return ByToken(rows_T)


def _token_values(episode: EpisodeRewards) -> Sequence[Sequence[float]]:
    if episode.token_values is None:
        raise AdvantageError(
            "no values of its tokens; gae_token needs those of a critic that was trained by token",
            where=place(episode.rollout_id),
        )
    _refuse_other_values(episode, "gae_token")
    for t, row in enumerate(episode.token_values.rows_T):
        for j, value in enumerate(row):
            if not math.isfinite(value):
                raise AdvantageError(f"the value is {value}", where=place(episode.rollout_id, t + 1, j))
    return episode.token_values.rows_T


def _refuse_other_values(episode: EpisodeRewards, name: str) -> None:
    hint = "They are stored while a run trains with an estimator that needs a critic."
    why = f"{name} needs one for each"
    refuse_incomplete([episode], [episode.values_T], "values of a critic", why, hint)
    for t, value in enumerate(episode.values_T):
        if not math.isfinite(value):
            raise AdvantageError(f"the value is {value}", where=place(episode.rollout_id, t + 1))


def _value_after(episode: EpisodeRewards, keys: GaeKeys) -> float:
    """Return V(s_T).

    V(s_T) is 0, except for a truncated episode with `bootstrap_truncated` and a known `value_after`.
    """
    is_bootstrapped = keys.bootstrap_truncated and episode.truncated
    return episode.value_after if is_bootstrapped and episode.value_after is not None else 0.0


METRICS = (
    Row(
        Metric("advantages/truncated", "episodes that a limit cut short"),
        Metric("advantages/bootstrapped", "those that continue with the critic's value"),
        when="only with `bootstrap_truncated`",
    ),
)


def _counts(episodes: Sequence[EpisodeRewards], keys: GaeKeys) -> dict[str, float]:
    counts = group_counts(siblings(episodes), [])
    if not keys.bootstrap_truncated:
        return counts
    cut = [episode for episode in episodes if episode.truncated]
    for episode in cut:
        if episode.value_after is not None and not math.isfinite(episode.value_after):
            message = f"the value after its last decision is {episode.value_after}"
            raise AdvantageError(message, where=place(episode.rollout_id))
    return counts | {
        "advantages/truncated": float(len(cut)),
        "advantages/bootstrapped": float(sum(episode.value_after is not None for episode in cut)),
    }


def _by_name(parts: Sequence[dict[str, list[float]]]) -> dict[str, list[list[float]]]:
    """Convert one dict of parts per episode into one list per part, with one entry per episode."""
    return {name: [row[name] for row in parts] for name in (parts[0] if parts else ())}


CRITIC_METRICS = (
    Row(
        Metric("value/explained_variance", "share of the variance of the returns G_t that V(s_t) predicted",
               "critic", "explained"),
        when="only with a critic",
        note="1: all; 0: none; below 0: worse than a constant. Absent where all returns are equal",
    ),
    Row(
        Metric("value/mean", "mean V(s_t) of the batch's decisions, before the critic learned from them",
               "critic", "mean V"),
        Metric("value/return_mean", "mean return G_t of the same decisions", "critic", "mean return"),
        when="only with a critic",
        note="Where `value/mean` stays above it, the critic is too high on average. With "
        "`bootstrap_truncated` V also counts what comes after a limit, and G_t does not",
    ),
)  # fmt: skip


def foretold(episodes: Sequence[EpisodeRewards], gamma: float) -> dict[str, float]:
    """Return the mean of V(s_t), the mean of G_t, and the share of the variance of G_t that V explains.

    The values were computed before the critic learned from these episodes. G_t is a discounted sum of
    rewards, not a target of the critic, because targets consist partly of the values themselves. The share is
    left out if all returns are equal.
    """
    values = [value for episode in episodes for value in episode.values_T]
    returns = [g for episode in episodes for g in discounted_returns(episode.rewards_T, gamma)]
    explained = explained_variance(values, returns)
    count = max(len(values), 1)
    found = {"value/mean": math.fsum(values) / count, "value/return_mean": math.fsum(returns) / count}
    return found if explained is None else found | {"value/explained_variance": explained}


PLUGS = {
    "gae": EstimatorPlug(
        gae,
        GaeKeys,
        Derivation(
            ("td_error = reward + discount * next_value - value", "advantage = td_error + later"), (LATER,)
        ),
        needs_values="decision",
        compares_siblings=False,
    ),
    "gae_token": EstimatorPlug(
        gae_token,
        GaeTokenKeys,
        Derivation(
            ("advantage = td_error + later",),
            (("td_error", "what the decision changed, mean over its tokens"), LATER),
        ),
        needs_values="token",
        compares_siblings=False,
    ),
}
