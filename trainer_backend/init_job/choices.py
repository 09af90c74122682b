"""What `turnwise init` sets, and which keys it shows: all others are in docs/configuration.md."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_backend.errors import JobError

Values = dict[str, dict[str, Any]]

# Of tables that are not here, every key is shown.
COMMON: Mapping[str, tuple[str, ...]] = {
    "services": ("task_url", "task_plugins", "iteration_timeout_s"),
    "inference": ("max_running", "max_model_len"),
    "rollout": (
        "env_name", "env_config", "policy_config", "max_turns", "episodes_per_batch",
        "max_concurrent_rollouts", "seeds", "temperature", "max_tokens",
    ),
    "rollout_only": ("model_path", "temperature", "objective"),
    "rollout_allocation_schedule": ("alpha",),
    "data": ("path", "evaluation_split", "held_out_share", "interaction"),
    "training": (
        "iterations", "group_size", "learning_rate", "learning_rate_schedule", "learning_rate_rise",
        "learning_rate_final", "update_passes", "batch_decisions", "row_tokens", "micro_batch_tokens",
        "target_kl", "skip_flat_groups", "kl_coef", "entropy_coef", "checkpoint_every",
        "step_rewards_enabled", "step_rewards_mode", "event_rewards_kind",
    ),
}  # fmt: skip

_DECISION_REWARDS = {"step_rewards_enabled": True, "step_rewards_mode": "decision_stepwise"}
# Conversations have no achievements: what their environment or their interaction pays is the reward.
_CONVERSATION: Values = {
    "multi_turn": {"enable": True},
    "training": {"step_rewards_enabled": True, "step_rewards_mode": "env_sparse"},
}
_CONVERSATIONS = frozenset({"dialogue", "documents"})

# Documents that fit a small model, and a teacher that has read some.
_SHORT_DOCUMENTS: Values = {
    "inference": {"max_model_len": 320},
    "multi_turn": {"max_model_length": 320},
    "rollout": {
        "env_config": {
            "generate": {"kind": "keeper", "chars": 720, "distractors": 0},
            "text": "compact", "chunk_size": 240, "indexed": True, "tools": ["readChunk", "finish"],
        },
        "max_turns": 8,
        "max_tokens": 28,
    },
    "warmup": {
        "policy_name": "documents_teacher", "epochs": 4, "batch_decisions": 32, "learning_rate": 3e-3,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Choices:
    """What the command was told: an environment, and a preset or else a model (a folder, or a name)."""

    env: str = "crafter"
    preset: str | None = None
    model: str | None = None

    def values(self) -> Values:
        """The keys that the file sets, by table.

        Raises:
            JobError: both a preset and a model.
        """
        if self.preset and self.model:
            raise JobError(f"turnwise init: give --preset {self.preset} or --model {self.model}, not both")
        values: Values = {
            "job": {"name": self.env},
            "rollout": {"env_name": self.env},
            "training": dict(_DECISION_REWARDS),
        }
        of_model = _for_a_model(self.model) if self.model else self._for_a_preset()
        for tables in (_CONVERSATION if self.env in _CONVERSATIONS else {}, of_model):
            for table, keys in tables.items():
                values.setdefault(table, {}).update(keys)
        return values

    def _for_a_preset(self) -> Values:
        """A fresh small model: it knows nothing, so it starts best from a teacher, where there is one."""
        model = {"model": {"preset": self.preset or "tiny-0.3m"}}
        if self.env == "documents":
            return model | _SHORT_DOCUMENTS
        if self.env != "crafter":
            return model
        return model | {
            "inference": {"max_model_len": 256},
            "rollout": {"env_config": {"text": "compact", "max_actions": 4}, "max_tokens": 8},
            "warmup": {
                "policy_config": {"memory": False, "max_actions": 4},
                "epochs": 1,
                "batch_decisions": 32,
                "learning_rate": 3e-3,
            },
        }


def _for_a_model(model: str) -> Values:
    """A trained model, which reads and answers at length and moves in small steps."""
    return {
        "model": {"path" if Path(model).is_dir() else "name": model},
        "inference": {"max_model_len": 8192},
        "rollout": {"max_tokens": 512},
        "training": {"learning_rate": 1e-6, "row_tokens": 8192, "micro_batch_tokens": 8192},
    }
