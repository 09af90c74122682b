"""Values of a new job for each environment: the source of rewards, and settings that suit the model.

`turnwise init` writes these values. A fresh small model gets the settings of a job in configs/, with which it
is known to learn. The link `configs` next to this file puts that folder into an installed package.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli

from service_kit.plugin_file import find_entry_points
from trainer_backend.data.arithmetic import sums
from trainer_backend.job.schema import JobConfig
from trainer_backend.job.tables import table_model

Values = dict[str, dict[str, Any]]


def union(*parts: Values) -> Values:
    """Merge the tables of all parts. A key of a later part replaces the same key of an earlier part."""
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
    """Values for a fresh small model: a warm-up, short texts, and settings of RL. None means that a fresh
    model cannot learn in this environment."""
    trained: Values = field(default_factory=dict)
    """Values for a trained model, which reads and writes long texts."""
    files: Mapping[str, Callable[[], str]] = field(default_factory=dict)
    """Functions that return the texts of example files next to the job, by file name."""
    of_files: Values = field(default_factory=dict)
    """Values for every model that refer to these files."""


def read_config(name: str) -> Values:
    """Return the values of configs/NAME.toml that are not defaults, without the tables [job] and [model]."""
    document = tomli.loads((Path(__file__).parent / "configs" / f"{name}.toml").read_text(encoding="utf-8"))
    return {
        table: {
            key: value
            for key, value in keys.items()
            if value != table_model(JobConfig.model_fields[table]).model_fields[key].get_default()
        }
        for table, keys in document.items()
        if table not in ("job", "model")
    }


def environment_job(env: str) -> EnvironmentJob:
    """Return a new job's values for an environment, found by its name, by its prefix, or as a plug-in."""
    prefix, colon, _ = env.partition(":")
    return JOBS.get(env) or JOBS.get(prefix + colon) or _plugin_job(env)


# A decision is rewarded for the achievements that it earned.
_BY_ACHIEVEMENT: Values = {
    "training": {"step_rewards_enabled": True, "step_rewards_mode": "decision_stepwise"},
}
# The environment, or a conversation's interaction, rewards each decision.
_BY_ENVIRONMENT: Values = {
    "training": {"step_rewards_enabled": True, "step_rewards_mode": "env_sparse"},
}
_CONVERSATION = union(_BY_ENVIRONMENT, {"multi_turn": {"enable": True}})

# A warm-up on random calls teaches the syntax of a call. While rewards are rare, an entropy bonus would make
# the model forget it.
_BY_CHANCE: Values = {
    "warmup": {
        "policy_name": "random", "episodes": 300, "epochs": 6, "batch_decisions": 32, "learning_rate": 3e-3,
    },
    "training": {"learning_rate": 2e-4, "entropy_coef": 0.0},
}  # fmt: skip
_FROZEN_LAKE = read_config("frozen_lake")
# For environments of Gymnasium and others: FrozenLake's settings, except those that depend on its map.
_FOREIGN: Values = {
    "rollout": {"episodes_per_batch": _FROZEN_LAKE["rollout"]["episodes_per_batch"]},
    "warmup": _FROZEN_LAKE["warmup"],
    "training": {key: value for key, value in _FROZEN_LAKE["training"].items() if key != "row_tokens"},
    "algorithm": _FROZEN_LAKE["algorithm"],
}
# The prompt shows a trained model a server's answers to all calls, and a small model only the last answer.
_SERVER = EnvironmentJob(
    common=_BY_ENVIRONMENT,
    fresh=union(_FOREIGN, {"rollout": {"env_config": {"prompts": "fresh", "instructions": ""}}}),
    trained={"multi_turn": {"enable": True}},
)

# A dialogue has no questions and no scores of its own, so the job gets files with both.
_DIALOGUE = EnvironmentJob(
    common=_CONVERSATION,
    fresh=read_config("gsm8k_interaction"),
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


# By the name of the environment; a key that ends in a colon is the prefix of all environments of a kind.
JOBS: Mapping[str, EnvironmentJob] = {
    "babyai": EnvironmentJob(_BY_ACHIEVEMENT, read_config("babyai")),
    "crafter": EnvironmentJob(_BY_ACHIEVEMENT, read_config("crafter_cpu")),
    "dialogue": _DIALOGUE,
    "documents": EnvironmentJob(_CONVERSATION, read_config("documents_statelm")),
    # Achievements do not show what a wrong change costs; the environment's rewards do.
    "orders": EnvironmentJob(_BY_ENVIRONMENT, read_config("orders")),
    "sokoban": EnvironmentJob(_BY_ACHIEVEMENT, read_config("sokoban")),
    "gymnasium:": EnvironmentJob(
        _BY_ENVIRONMENT, union(_FOREIGN, {"rollout": {"env_config": {"instructions": ""}}})
    ),
    # Fresh models did not learn the usual map of 4 by 4, least of all with slips.
    "gymnasium:FrozenLake-v1": EnvironmentJob(_BY_ENVIRONMENT, _FROZEN_LAKE),
    "mcp:": _SERVER,
    "openenv:": _SERVER,
    # An agent writes its own prompts and expects words: no policy shows a fresh model how to answer.
    "agent:": EnvironmentJob(common=_BY_ENVIRONMENT, fresh=None),
    **dict.fromkeys(
        ("reasoning_gym:", "textarena:", "verifiers:"), EnvironmentJob(common=_CONVERSATION, fresh=None)
    ),
}


def _plugin_job(env: str) -> EnvironmentJob:
    """Return values for an environment of an installed package, which is rewarded by achievement.

    The warm-up imitates the policy `{env}_teacher` if it is installed, otherwise a random policy. Packages of
    `turnwise new env` contain a teacher. Without achievements, `turnwise check` warns of missing rewards.
    """
    teacher = f"{env}_teacher"
    if teacher not in find_entry_points("turnwise.policies").names:
        return EnvironmentJob(_BY_ACHIEVEMENT, fresh=_BY_CHANCE)
    warmup = {"policy_name": teacher, "batch_decisions": 32, "learning_rate": 3e-3}
    return EnvironmentJob(_BY_ACHIEVEMENT, fresh={"warmup": warmup})
