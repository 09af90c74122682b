"""The plug boards of the trainer: every name that a job may choose, and what it stands for.

Reading this file imports no torch.
"""

from collections.abc import Mapping
from typing import TypeVar

from shared_schemas.base import did_you_mean
from trainer_backend.core.advantages.episodes import Estimator
from trainer_backend.core.advantages.grpo import grpo, grpo_no_std
from trainer_backend.core.advantages.stepwise import stepwise
from trainer_backend.core.aggregation import Aggregation, decision_mean, episode_equal, token_mean
from trainer_backend.core.losses import PolicyLoss, clipped_policy_loss
from trainer_backend.core.presets import PRESETS, Preset
from trainer_backend.errors import JobError

Plug = TypeVar("Plug")

ESTIMATORS: dict[str, Estimator] = {"grpo": grpo, "grpo_no_std": grpo_no_std, "stepwise": stepwise}
LOSSES: dict[str, PolicyLoss] = {"clipped": clipped_policy_loss}
AGGREGATIONS: dict[str, Aggregation] = {
    "token_mean": token_mean,
    "decision_mean": decision_mean,
    "episode_equal": episode_equal,
}


def estimator(name: str) -> Estimator:
    """The advantage estimator of that name; JobError, which lists those there are, if there is none."""
    return _chosen(ESTIMATORS, name, key="algorithm.advantage")


def policy_loss(name: str) -> PolicyLoss:
    """The policy loss of that name; JobError if there is none."""
    return _chosen(LOSSES, name, key="algorithm.loss")


def aggregation(name: str) -> Aggregation:
    """The loss aggregation of that name; JobError if there is none."""
    return _chosen(AGGREGATIONS, name, key="training.aggregation")


def preset(name: str) -> Preset:
    """The shape of the small model of that name; JobError if there is none."""
    return _chosen(PRESETS, name, key="model.preset")


def _chosen(board: Mapping[str, Plug], name: str, *, key: str) -> Plug:
    if name not in board:
        raise JobError(f"{key} is {name!r}{did_you_mean(name, board)}")
    return board[name]
