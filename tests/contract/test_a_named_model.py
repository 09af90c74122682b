"""Model folders as the hub has them: their own templates and calls, and a config's adapters."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.conftest import rows_of, tiny_job, train_job
from tests.model_folders import edit_json
from tests.tiny_families import tiny_model
from trainer_backend.job.schema import JobConfig
from trainer_backend.learner.loading import load_checkpoint
from trainer_backend.models.folder import load_model_folder, load_tokenizer
from trainer_backend.rundir.new_job import load_new_job
from trainer_backend.rundir.rollout_files import read_rollouts


def short_job(folder: Path, warmup: Mapping[str, object] | None, **overrides: object) -> JobConfig:
    """4 episodes of 3 decisions, one iteration."""
    short = {
        "model__preset": None,
        "model__path": str(folder),
        "inference__max_model_len": 640,
        "rollout__env_config": {"text": "compact", "max_actions": 2},
        "rollout__max_tokens": 32,
        "rollout__max_turns": 3,
        "rollout__episodes_per_batch": 4,
        "rollout__temperature": 0.3,
        "training__iterations": 1,
        "evaluation__instances": 1,
    }
    job = tiny_job(**short | overrides)
    table = None if warmup is None else job.warmup.model_copy(update=warmup)
    return job.model_copy(update={"warmup": table})


def test_a_model_that_knows_nothing_runs_through_an_iteration(
    model_folders: Mapping[str, Path], tmp_path: Path
):
    directory, reporter, progress = train_job(short_job(model_folders["llama"], None), tmp_path / "run")
    assert (progress.iteration, progress.policy_version) == (1, 1)
    assert f"model: {model_folders['llama']}" in reporter.lines
    (row,) = rows_of(directory, "iteration")
    assert row["decision/count"] == 12 and row["episode/invalid_frac"] == 1
    assert row["mismatch/logprob_max"] < 1e-4
    for rollout in read_rollouts(directory.rollouts_file("iteration_1")):
        assert all(step.step_info.invalid_reason for step in rollout.trajectory.steps)


def test_a_warmed_up_model_calls_its_tool_in_its_own_format(
    model_folders: Mapping[str, Path], tmp_path: Path
):
    warmup = {
        "episodes": 12,
        "epochs": 10,
        "batch_decisions": 12,
        "learning_rate": 1e-2,
        "policy_config": {"memory": False, "max_actions": 2},
    }
    directory, _, _ = train_job(short_job(model_folders["mistral"], warmup), tmp_path / "run")
    (row,) = rows_of(directory, "iteration")
    assert row["episode/invalid_frac"] < 1, "some of its calls were carried out"
    assert row["mismatch/logprob_max"] < 1e-4
    before = load_file(directory.checkpoints / "iteration_0" / "model.safetensors")
    model, _ = load_model_folder(directory.checkpoints / "iteration_1")
    assert type(model).__name__ == "MistralForCausalLM"
    assert any(not torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# States; experts, sinks and windows; scales and caps. The tests of engine and learner have the other kinds.
@pytest.mark.parametrize("kind", ["qwen3_5_text", "gpt_oss", "gemma2"])
def test_each_kind_of_layer_is_sampled_trained_and_loaded_again(
    kind: str, model_folders: Mapping[str, Path], tmp_path: Path
):
    tokenizer, folder = load_tokenizer(model_folders["qwen3"]), tmp_path / "model"
    ends = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    model = tiny_model(kind, vocab_size=len(tokenizer) + 8, max_position_embeddings=1024, **ends)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    job = short_job(folder, None, rollout__max_tokens=8, rollout__max_turns=2)
    directory, _, _ = train_job(job, tmp_path / "run")
    (row,) = rows_of(directory, "iteration")
    assert row["mismatch/logprob_max"] < 1e-4
    assert row["optim/steps"] > 0
    trained, told = AutoModelForCausalLM.from_pretrained(
        directory.checkpoints / "iteration_1", output_loading_info=True
    )
    assert (type(trained), told["missing_keys"], told["unexpected_keys"]) == (type(model), set(), set())
    assert any(not torch.equal(*pair) for pair in zip(trained.parameters(), model.parameters(), strict=True))


ROOT = Path(__file__).parents[2]

SMALLER = [
    'model.device="cpu"',
    "rollout.episodes_per_batch=4",
    "rollout.max_turns=2",
    "rollout.max_tokens=16",
    "training.iterations=1",
    "training.group_size=2",
    "evaluation.instances=1",
]


def test_it_trains_adapters_on_a_folder_with_full_prompts_and_a_checkpoint_loads_as_the_whole_model(
    model_folders: Mapping[str, Path], tmp_path: Path
):
    folder = tmp_path / "Qwen3-tiny"
    shutil.copytree(model_folders["qwen3"], folder)
    edit_json(folder / "config.json", max_position_embeddings=4096)  # rotary positions have no weights
    overrides = [f'model.path="{folder}"', *SMALLER]
    job = load_new_job([ROOT / "configs/crafter_online.toml"], overrides).config
    directory, reporter, _ = train_job(job, tmp_path / "run")
    (row,) = rows_of(directory, "iteration")
    assert row["episode/count"] == 4 and row["decision/count"] == 8
    assert row["mismatch/logprob_max"] < 1e-4
    assert row["inference/prompt_tokens_reused"] > 0, "the system prompt is computed once"
    assert any(line.startswith("memory (cpu") for line in reporter.lines)
    assert not (directory.checkpoints / "iteration_1/model.safetensors").exists()
    model, _ = load_checkpoint(job.model, directory.checkpoints / "iteration_1")
    assert not [name for name, _ in model.named_parameters() if "lora" in name]
