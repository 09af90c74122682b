"""Values of a job for each environment: the rewards, and the settings with which a fresh small model learns.

`turnwise init` writes these values. They repeat configs/, which an installed package does not have, and
tests/trainer_backend/test_init_job.py compares the two.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from service_kit.plugin_file import find_entry_points
from trainer_backend.data.arithmetic import sums

Values = dict[str, dict[str, Any]]


def union(*parts: Values) -> Values:
    """Return all tables of the parts; a key of a later part replaces the same key of an earlier one."""
    whole: Values = {}
    for part in parts:
        for table, keys in part.items():
            whole.setdefault(table, {}).update(keys)
    return whole


@dataclass(frozen=True, slots=True)
class EnvironmentJob:
    common: Values
    """Values for every model: the source of r_t, and whether the environment is a conversation."""
    fresh: Values | None
    """Values for a fresh small model: a warm-up, short texts, and settings of RL. None: a fresh model cannot
    learn in this environment."""
    trained: Values = field(default_factory=dict)
    """Values for a trained model, which reads and answers at length."""
    files: Mapping[str, Callable[[], str]] = field(default_factory=dict)
    """Example files next to the job, by name."""
    of_files: Values = field(default_factory=dict)
    """Values for every model that name these files."""


def environment_job(env: str) -> EnvironmentJob:
    """Return the values of an environment, of its kind (a prefix), or of a plug-in."""
    prefix, colon, _ = env.partition(":")
    return JOBS.get(env) or JOBS.get(prefix + colon) or _plugin_job(env)


# Achievements pay, each to the decision that earned it.
_BY_ACHIEVEMENT: Values = {
    "training": {"step_rewards_enabled": True, "step_rewards_mode": "decision_stepwise"},
}
# The environment, or a conversation's interaction, pays each decision.
_BY_ENVIRONMENT: Values = {
    "training": {"step_rewards_enabled": True, "step_rewards_mode": "env_sparse"},
}
_CONVERSATION = union(_BY_ENVIRONMENT, {"multi_turn": {"enable": True}})

# A warm-up on random calls teaches the form of a call. While rewards are rare, an entropy bonus would unlearn
# it.
_BY_CHANCE: Values = {
    "warmup": {
        "policy_name": "random", "episodes": 300, "epochs": 6, "batch_decisions": 32, "learning_rate": 3e-3,
    },
    "training": {"learning_rate": 2e-4, "entropy_coef": 0.0},
}  # fmt: skip
# The settings of configs/frozen_lake.toml that do not depend on its map.
_FOREIGN = union(
    _BY_CHANCE,
    {
        "rollout": {"episodes_per_batch": 128},
        "training": {
            "iterations": 30, "group_size": 128, "batch_decisions": 256, "learning_rate": 5e-4,
            "target_kl": 0.02,
        },
        "algorithm": {"advantage": "grpo", "gamma": 0.95},
    },
)  # fmt: skip
# A server's answers to all calls form a conversation; only the last one fits a small model.
_SERVER = EnvironmentJob(
    common=_BY_ENVIRONMENT,
    fresh=union(_FOREIGN, {"rollout": {"env_config": {"prompts": "fresh", "instructions": ""}}}),
    trained={"multi_turn": {"enable": True}},
)

_CRAFTER = EnvironmentJob(
    common=_BY_ACHIEVEMENT,
    fresh={
        "inference": {"max_model_len": 256},
        "rollout": {"env_config": {"text": "compact", "max_actions": 4}, "max_tokens": 8},
        "warmup": {
            "policy_name": "crafter_teacher", "policy_config": {"memory": False, "max_actions": 4},
            "epochs": 1, "batch_decisions": 32, "learning_rate": 3e-3,
        },
        "training": {
            "iterations": 46, "group_size": 1, "learning_rate_rise": 0.05, "learning_rate_final": 0.0,
            "update_passes": 1, "batch_decisions": 256, "entropy_coef": 0.0, "critic": "own",
            "critic_warmup": 2, "critic_learning_rate": 1.5e-3, "critic_passes": 1, "checkpoint_every": 12,
        },
        "algorithm": {"advantage": "gae", "gamma": 0.9, "gae_lambda": 0.9},
        "evaluation": {"every_n_iters": 23},
    },
)  # fmt: skip

_SOKOBAN = EnvironmentJob(
    common=_BY_ACHIEVEMENT,
    fresh={
        "inference": {"max_model_len": 192},
        "rollout": {
            "env_config": {"text": "compact", "size": 6, "boxes": 1}, "max_turns": 20,
            "episodes_per_batch": 256, "max_tokens": 6, "temperature": 1.3,
        },
        "warmup": {
            "policy_name": "sokoban_teacher", "policy_config": {"epsilon": 0.2}, "episodes": 1000,
            "epochs": 1, "batch_decisions": 64, "learning_rate": 3e-3,
        },
        "training": {
            "iterations": 60, "group_size": 8, "learning_rate": 1.5e-3, "learning_rate_rise": 0.05,
            "learning_rate_final": 0.2, "batch_decisions": 256, "entropy_coef": 0.002, "target_kl": 0.06,
            "checkpoint_every": 10,
        },
        "algorithm": {"gamma": 0.95},
        "evaluation": {"every_n_iters": 20, "instances": 300},
    },
)  # fmt: skip

_BABYAI = EnvironmentJob(
    common=_BY_ACHIEVEMENT,
    fresh={
        "inference": {"max_model_len": 128},
        "rollout": {
            "env_config": {"level": "GoToLocal", "text": "compact", "length": 20}, "max_turns": 20,
            "episodes_per_batch": 256, "max_tokens": 6,
        },
        "warmup": {
            "policy_name": "babyai_teacher", "policy_config": {"epsilon": 0.2}, "episodes": 400, "epochs": 3,
            "batch_decisions": 64, "learning_rate": 3e-3,
        },
        "training": {
            "iterations": 20, "learning_rate": 1e-3, "learning_rate_rise": 0.05, "learning_rate_final": 0.2,
            "batch_decisions": 256,
        },
        "algorithm": {"gamma": 0.95},
        "evaluation": {"every_n_iters": 20, "instances": 300},
    },
)  # fmt: skip

# Achievements do not show what a wrong change costs; the environment's rewards do.
_ORDERS = EnvironmentJob(
    common=_BY_ENVIRONMENT,
    fresh={
        "inference": {"max_model_len": 224},
        "rollout": {
            "env_config": {"requests": 2, "rules": False, "marks": True}, "max_turns": 10,
            "invalid_action_penalty": -0.05, "episodes_per_batch": 128, "max_tokens": 24,
        },
        "warmup": {
            "policy_name": "orders_teacher", "policy_config": {"epsilon": 0.1}, "episodes": 1000, "epochs": 4,
            "batch_decisions": 64, "learning_rate": 3e-3,
        },
        "training": {
            "iterations": 60, "learning_rate": 1e-3, "learning_rate_final": 0.2, "target_kl": 0.02,
            "batch_decisions": 256,
        },
        "algorithm": {"gamma": 0.95},
        "evaluation": {"every_n_iters": 20, "instances": 300},
    },
)  # fmt: skip

_DOCUMENTS = EnvironmentJob(
    common=_CONVERSATION,
    fresh={
        "inference": {"max_model_len": 224, "max_running": 64},
        "multi_turn": {
            "statelm_enabled": True, "context_tools": ["deleteContext"], "max_model_length": 224,
        },
        "rollout": {
            "env_config": {
                "generate": {"kind": "keeper", "chars": 1440, "distractors": 0}, "text": "compact",
                "chunk_size": 240, "indexed": True, "tools": ["readChunk", "finish"],
            },
            "max_turns": 14, "episodes_per_batch": 128, "max_tokens": 28,
        },
        "warmup": {
            "policy_name": "documents_teacher", "policy_config": {"forgets": 0.4}, "episodes": 450,
            "epochs": 6, "batch_decisions": 32,
        },
        "training": {"learning_rate": 3e-4, "learning_rate_final": 0.2, "batch_decisions": 128},
        "algorithm": {"gamma": 1.0},
        "evaluation": {"instances": 64},
    },
)  # fmt: skip


# A dialogue has neither questions nor scores of its own.
_DIALOGUE = EnvironmentJob(
    common=_CONVERSATION,
    fresh={
        "inference": {"max_model_len": 320},
        "multi_turn": {"max_model_length": 320},
        "rollout": {"episodes_per_batch": 128, "max_tokens": 40},
        "warmup": {
            "policy_name": "sums_teacher", "policy_config": {"right": 0.5}, "episodes": 800, "epochs": 4,
            "batch_decisions": 32, "learning_rate": 3e-3,
        },
        "training": {
            "iterations": 30, "learning_rate": 4e-4, "update_passes": 1, "batch_decisions": 128,
            "entropy_coef": 0.0,
        },
        "algorithm": {"gamma": 1.0},
        "evaluation": {"every_n_iters": 15, "instances": 120},
    },
    files={
        "short_sums.jsonl": lambda: "".join(  # the rows of configs/data/short_sums.jsonl
            json.dumps(row) + "\n" for row in sums(480, steps=1, seed=1, largest=9)
        ),
        "interactions.yaml": lambda: (
            "# Answers as the user, and scores each answer by its last number (docs/plugins.md).\n"
            'interaction:\n  - class_name: "task_app.interactions.gsm8k.Gsm8kInteraction"\n    config: {}\n'
        ),
    },
    of_files={
        "data": {"path": "short_sums.jsonl", "held_out_share": 0.25, "interaction": "gsm8k"},
        "multi_turn": {"interaction_config_path": "interactions.yaml", "max_user_turns": 2},
        "rollout": {"max_turns": 3},
    },
)  # fmt: skip

_GYMNASIUM = EnvironmentJob(
    common=_BY_ENVIRONMENT,
    fresh=union(_FOREIGN, {"rollout": {"env_config": {"instructions": ""}}}),
)
# Its usual map of 4 by 4 was not learned, least of all with slips.
_FROZEN_LAKE = EnvironmentJob(
    common=_BY_ENVIRONMENT,
    fresh=union(
        _FOREIGN,
        {
            "inference": {"max_model_len": 128},
            "rollout": {
                "env_config": {
                    "kwargs": {"is_slippery": False, "desc": ["SFF", "FHF", "FFG"]},
                    "action_names": ["left", "down", "right", "up"], "instructions": "",
                },
                "max_turns": 20,
            },
            "training": {"row_tokens": 128},
            "evaluation": {"every_n_iters": 30, "instances": 20},
        },
    ),
)  # fmt: skip

# By name; a key that ends in a colon is the prefix of all environments of a kind.
JOBS: Mapping[str, EnvironmentJob] = {
    "babyai": _BABYAI,
    "crafter": _CRAFTER,
    "dialogue": _DIALOGUE,
    "documents": _DOCUMENTS,
    "orders": _ORDERS,
    "sokoban": _SOKOBAN,
    "gymnasium:": _GYMNASIUM,
    "gymnasium:FrozenLake-v1": _FROZEN_LAKE,
    "mcp:": _SERVER,
    "openenv:": _SERVER,
    # Answers in words, and prompts of an agent's own: no policy shows a fresh model how to answer.
    "agent:": EnvironmentJob(common=_BY_ENVIRONMENT, fresh=None),
    **dict.fromkeys(
        ("reasoning_gym:", "textarena:", "verifiers:"), EnvironmentJob(common=_CONVERSATION, fresh=None)
    ),
}


def _plugin_job(env: str) -> EnvironmentJob:
    """Return values for the environment of an installed package.

    A package of `turnwise new env` has a teacher with a fixed name. The environment may have no achievements;
    then `turnwise check` warns that nothing is paid.
    """
    teacher = f"{env}_teacher"
    if teacher not in find_entry_points("turnwise.policies").names:
        return EnvironmentJob(_BY_ACHIEVEMENT, fresh=_BY_CHANCE)
    warmup = {"policy_name": teacher, "batch_decisions": 32, "learning_rate": 3e-3}
    return EnvironmentJob(_BY_ACHIEVEMENT, fresh={"warmup": warmup})
