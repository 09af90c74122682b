"""medians.py: an estimator that subtracts the group's median, and a loss with a penalty instead of a clip."""

from statistics import median

from trainer_backend.core.advantages.episodes import EstimatorKeys, siblings
from trainer_backend.core.losses import RangeKeys
from trainer_backend.core.rewards import discounted_returns
from trainer_backend.operator_plugins import estimator, loss


class MedianKeys(EstimatorKeys):
    share: float = 1.0
    """Fraction of the median that is subtracted."""


@estimator("median_return", keys=MedianKeys)
def median_return(episodes, keys):
    """Return each decision's return-to-go, minus `share` times the median of its group at the same turn."""
    returns = [discounted_returns(episode.rewards_T, keys.gamma) for episode in episodes]
    advantages = [[] for _ in episodes]
    for members in siblings(episodes).values():
        for i in members:
            for t, own in enumerate(returns[i]):
                middle = median(returns[j][t] for j in members if t < len(returns[j]))
                advantages[i].append(own - keys.share * middle)
    return advantages


@loss("spo", keys=RangeKeys)
def spo(logprobs, proximal, advantages, weights, keys):
    """Simple policy optimization (arXiv:2401.16025): a squared penalty keeps the ratio near 1."""
    ratio = (logprobs - proximal).exp()
    penalty = advantages.abs() / (2 * keys.clip_high) * (ratio - 1).square()
    return -((ratio * advantages - penalty) * weights).sum()
