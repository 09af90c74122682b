"""Names of other systems lead to ours, wherever they stand."""

import re
from pathlib import Path
from typing import Any

import pytest

from trainer_backend.errors import JobError
from trainer_backend.job.docs import table_model
from trainer_backend.job.foreign_keys import FOREIGN_TABLES, NEW_NAMES, SYSTEMS, find_our_key
from trainer_backend.job.load import load_job, parse_job
from trainer_backend.job.schema import JobConfig

OURS = {table: set(table_model(field).model_fields) for table, field in JobConfig.model_fields.items()}
TARGETS = [
    *((f"{system}: {name}", ours) for system, names in SYSTEMS.items() for name, ours in names.items()),
    *((f"[{table}]", place) for table, place in FOREIGN_TABLES.items() if place),
]


def refusal(document: dict[str, Any]) -> list[str]:
    with pytest.raises(JobError) as caught:
        parse_job({"model": {"preset": "tiny-0.3m"}, **document}, where="x")
    return str(caught.value).splitlines()


def test_every_name_leads_to_a_key_that_a_job_has():
    for name, target in TARGETS:
        places = re.findall(r"\[([a-z_.]+)\]|\b([a-z_]+\.[a-z_.]+)|^([a-z]+)$", target)
        assert places, (name, target)
        for place in map("".join, places):
            table, _, key = place.partition(".")
            assert table in OURS and (not key or key.partition(".")[0] in OURS[table]), (name, place)


def test_a_name_has_one_meaning_and_is_found_in_the_tables_of_its_system():
    names = [name for names in SYSTEMS.values() for name in names]
    assert len(names) == len(set(names))
    own = {f"{table}.{key}" for table, keys in OURS.items() for key in keys}
    # A launcher's config of a policy or environment is free, and read by the task app.
    assert not own & set(names) - set(NEW_NAMES)
    assert find_our_key("actor_rollout_ref.rollout.n") == find_our_key("rollout.n") == "training.group_size"
    assert find_our_key("rollout.nn") is None


@pytest.mark.parametrize(
    ("document", "told"),
    [
        # verl's tables as they are: a line for each key, by its own place
        (
            {"actor_rollout_ref": {"rollout": {"n": 5, "temperature": 1.0}, "actor": {"x": 1}}},
            [
                "x: actor_rollout_ref.rollout.n is not a key. Did you mean training.group_size?",
                "x: actor_rollout_ref.rollout.temperature is not a key. Did you mean rollout.temperature?",
                "x: actor_rollout_ref.actor.x is not a key, and no key here is like it: leave it out",
            ],
        ),
        ({"algorithm": {"adv_estimator": "grpo"}}, ["Did you mean algorithm.advantage? Known: "]),
        ({"algorithm": {"kl_ctrl": {"kl_coef": 0.1}}}, ["Did you mean training.kl_reward_coef? Known: "]),
        # the unknown key stands before the missing one that it is
        ({"data": {"train_files": "a"}}, ["x: data.train_files is not a key. Did", "data.path is required"]),
        # a key of ours in another table
        ({"rollout": {"max_model_length": 8}}, ["Did you mean multi_turn.max_model_length? Known: "]),
        ({"training": {"seed": 8}}, ["Did you mean job.seed? Known: "]),
        # TRL's have no table
        ({"num_generations": 8}, ["num_generations is not a key. Did you mean training.group_size? Known: "]),
        ({"training": {"beta": 0.04}}, ["Did you mean training.kl_coef? Known: "]),
        ({"learning_rate": 1e-6}, ["Did you mean training.learning_rate or warmup.learning_rate? Known: "]),
        # prime-rl's
        ({"orchestrator": {"rollouts_per_example": 8}}, ["Did you mean training.group_size?"]),
        ({"trainer": {"optim": {"lr": 1e-6}}}, ["x: trainer.optim.lr is not a key. Did you mean training.l"]),
        ({"orchestrator": {"train": {"source": [{"name": "a"}]}}}, ["Did you mean rollout.env_name?"]),
        # in the table that has such a key itself
        ({"warmup": {"lr": 1e-6}}, ["Did you mean warmup.learning_rate? Known: "]),
        ({"lora": {"r": 8}}, ["Did you mean lora.rank? Known: "]),
        # needed nowhere here
        ({"data": {"path": "a", "return_raw_chat": True}}, ["return_raw_chat is not a key, and needs none"]),
        (
            {"actor_rollout_ref": {"rollout": {"calculate_log_probs": True}}},
            ["x: actor_rollout_ref.rollout.calculate_log_probs is not a key, and needs none: every sample"],
        ),
    ],
)
def test_a_key_of_another_system_is_refused_with_ours(document: dict[str, Any], told: list[str]):
    lines = refusal(document)
    assert len(lines) == len(told)
    assert all(part in line for part, line in zip(told, lines, strict=True)), lines


@pytest.mark.parametrize("override", ["algorithm.adv_estimator=grpo", "warmup={}", "model.path=/a/b"])
def test_an_override_in_the_place_of_a_file_is_refused_with_the_option(override: str):
    with pytest.raises(JobError, match=re.escape(f"no such file. Did you mean --set '{override}'?")):
        load_job(Path(override))


def test_the_table_vllm_is_told_with_its_place():
    loaded = parse_job({"model": {"preset": "tiny-0.3m"}, "vllm": {"dtype": "auto"}}, where="x")
    told = "[vllm] is for other backends and is not read; here it is [inference.vllm]"
    assert loaded.warnings == (told,)
