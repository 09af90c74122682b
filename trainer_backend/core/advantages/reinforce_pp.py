"""REINFORCE++: returns against the whole batch, not against siblings."""

import math
from collections.abc import Sequence
from dataclasses import replace

from trainer_backend.core.advantages.episodes import (
    AdvantageConfig,
    Advantages,
    EpisodeRewards,
    group_counts,
    siblings,
)
from trainer_backend.core.advantages.spread import relative, standardised
from trainer_backend.core.rewards import discounted_returns


def reinforce_pp(episodes: Sequence[EpisodeRewards], config: AdvantageConfig) -> Advantages:
    """Return-to-go, standardised over all decisions of the batch.

        A_{i,t} = (G_{i,t} - mean G) / std G

    The mean and the sample std run over every decision of every episode, each counting once. Others run
    them over tokens, so that long answers count more; here a decision is what is credited. A batch without
    spread has advantage 0. Groups are not compared: worlds of unlike difficulty share one baseline.

    Args:
        episodes: all episodes of the batch.
        config: gamma is read.

    Returns:
        [T] advantages for each episode, their parts, and counts.

    Raises:
        AdvantageError: see `siblings`.
        ValueError: gamma is outside [0, 1].

    Source: Hu et al., REINFORCE++, arXiv:2501.03262, eq. 7 to 9, with decisions for tokens; its KL term, a
    part of the reward there, is training.kl_reward_coef.
    """
    returns = [discounted_returns(episode.rewards_T, config.gamma) for episode in episodes]
    found, baseline = _standardised_over_the_batch(episodes, returns)
    others = sum(map(len, returns)) - 1.0
    parts = {
        "return": returns,
        "baseline": baseline,
        "compared": [[others] * len(row_T) for row_T in returns],
        **found.parts,
    }
    return replace(found, parts=parts)


def reinforce_pp_baseline(episodes: Sequence[EpisodeRewards], config: AdvantageConfig) -> Advantages:
    """Scores against their group's mean, then standardised over all decisions of the batch.

        A_{i,t} = (B_i - mean B) / std B,     B_i = R_i - mean_j R_j over the siblings j

    gamma is not used. All else as in `reinforce_pp`; so a lone episode, whose B is 0, gets -mean B / std B.

    Source: Hu et al., REINFORCE++, arXiv:2501.03262, section 3.3 (REINFORCE++-baseline).
    """
    scores = [[0.0] * len(episode.rewards_T) for episode in episodes]
    baselines, compared, centred = list(scores), list(scores), list(scores)
    for members in siblings(episodes).values():
        scores_G = [episodes[index].score for index in members]
        mean = math.fsum(scores_G) / len(scores_G)
        for index, score in zip(members, scores_G, strict=True):
            decisions = len(episodes[index].rewards_T)
            scores[index], baselines[index] = [score] * decisions, [mean] * decisions
            compared[index], centred[index] = [len(members) - 1.0] * decisions, [score - mean] * decisions
    found, baseline = _standardised_over_the_batch(episodes, centred)
    parts = {"score": scores, "baseline": baselines, "compared": compared, "batch_baseline": baseline}
    return replace(found, parts={**parts, **found.parts})


def _standardised_over_the_batch(
    episodes: Sequence[EpisodeRewards], values: Sequence[Sequence[float]]
) -> tuple[Advantages, list[list[float]]]:
    """The advantages, with the part `scale`, and the baseline of each decision."""
    groups = siblings(episodes)
    compared = relative([value for row_T in values for value in row_T], standardised)
    of_decisions, of_baselines = iter(compared.advantages), iter(compared.baselines)
    advantages = [[next(of_decisions) for _ in row_T] for row_T in values]
    flat = sum(
        len(members) > 1 and not any(value for index in members for value in advantages[index])
        for members in groups.values()
    )
    scale = [[compared.scale] * len(row_T) for row_T in values]
    baselines = [[next(of_baselines) for _ in row_T] for row_T in values]
    return Advantages(advantages, group_counts(groups, flat=flat), {"scale": scale}), baselines
