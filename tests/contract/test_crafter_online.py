"""`configs/crafter_online.toml` as it stands, but for what a small machine lacks: a GPU, weights, hours."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from tests.conftest import rows_of, train_job
from trainer_backend.learner.loading import load_checkpoint
from trainer_backend.rundir.new_job import load_new_job

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
    folder = with_positions(model_folders["qwen3"], 4096, tmp_path / "Qwen3-tiny")
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


def with_positions(folder: Path, positions: int, copy: Path) -> Path:
    """The same model, made for longer sequences: rotary positions have no weights."""
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": positions}))
    return copy
