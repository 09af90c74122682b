"""REINFORCE++: compares decisions and episodes with the whole batch, not only with their siblings."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from shared_schemas.rounding import largest
from trainer_backend.core.advantages.derivation import BY_A_STD, OF_GROUP, SPREAD, Derivation
from trainer_backend.core.advantages.episodes import (
    Advantages,
    EpisodeRewards,
    EstimatorKeys,
    EstimatorPlug,
    ScoreKeys,
    against_siblings,
    group_counts,
    siblings,
)
from trainer_backend.core.advantages.spread import relative, standardised, unscaled
from trainer_backend.core.rewards import discounted_returns, discounted_sizes


def reinforce_pp(episodes: Sequence[EpisodeRewards], keys: EstimatorKeys) -> Advantages:
    """Standardise returns-to-go over all decisions of the batch.

        A_{i,t} = (G_{i,t} - mean G) / std G

    G is the return-to-go. Each decision counts once in the mean and in the sample std. Other implementations
    count each token, so that long answers count more. If all returns of the batch are equal, all advantages
    are 0. Groups do not matter: tasks of different difficulty have the same baseline.

    Source: Hu et al., REINFORCE++, arXiv:2501.03262, eq. 7 to 9, with decisions instead of tokens. The
    paper's reward contains a KL term; here, training.kl_reward_coef adds it to the reward.
    """
    returns = [discounted_returns(episode.rewards_T, keys.gamma) for episode in episodes]
    sizes = [size for episode in episodes for size in discounted_sizes(episode.rewards_T, keys.gamma)]
    found, baseline = _standardise_batch(episodes, returns, size=max(sizes, default=0.0))
    others = sum(map(len, returns)) - 1.0
    parts = {
        "return": returns,
        "baseline": baseline,
        "compared": [[others] * len(row_T) for row_T in returns],
        **found.parts,
    }
    return replace(found, parts=parts)


def reinforce_pp_baseline(episodes: Sequence[EpisodeRewards], keys: ScoreKeys) -> Advantages:
    """Subtract the group's mean from each score, then standardise over all decisions of the batch.

        A_{i,t} = (B_i - mean B) / std B,     B_i = R_i - mean_j R_j over all episodes j of the group

    gamma is not used. A lone episode has B = 0, so its advantage is -mean B / std B.

    Source: Hu et al., REINFORCE++, arXiv:2501.03262, section 3.3 (REINFORCE++-baseline).
    """
    centred = against_siblings(episodes, partial(relative, scale=unscaled))
    # In groups without spread all differences are exactly 0, so what is not 0 is no rounding error.
    size = largest(value for row_T in centred.per_episode for value in row_T)
    found, baseline = _standardise_batch(episodes, centred.per_episode, size=size)
    return replace(found, parts={**centred.parts, **found.parts, "batch_baseline": baseline})


def _standardise_batch(
    episodes: Sequence[EpisodeRewards], values: Sequence[Sequence[float]], *, size: float
) -> tuple[Advantages, list[list[float]]]:
    """Return the standardised values as advantages with the part `scale`, and each decision's baseline.

    `values` contains one number for each decision of each episode. `size` is explained in `relative`.
    """
    compared = relative([value for row_T in values for value in row_T], standardised, size=size)
    of_decisions, of_baselines = iter(compared.advantages), iter(compared.baselines)
    advantages = [[next(of_decisions) for _ in row_T] for row_T in values]
    scale = [[compared.scale] * len(row_T) for row_T in values]
    baselines = [[next(of_baselines) for _ in row_T] for row_T in values]
    counts = group_counts(siblings(episodes), advantages)
    return Advantages(advantages, counts, {"scale": scale}), baselines


PLUGS = {
    "reinforce_pp": EstimatorPlug(
        reinforce_pp,
        EstimatorKeys,
        Derivation(
            ("advantage = (return - baseline) / scale",),
            (("baseline", "mean of {compared} other decision[s] of the batch and itself"), ("scale", SPREAD)),
        ),
        divides_by_std=True,
        compares_siblings=False,
        bias=BY_A_STD,
    ),
    "reinforce_pp_baseline": EstimatorPlug(
        reinforce_pp_baseline,
        ScoreKeys,
        Derivation(
            ("advantage = (score - baseline - batch_baseline) / scale",),
            (
                OF_GROUP,
                ("batch_baseline", "mean of score - baseline over the decisions of the batch"),
                ("scale", SPREAD),
            ),
        ),
        divides_by_std=True,
        bias=BY_A_STD,
    ),
}
