"""A whole iteration of configs/crafter_online.toml for bench/gpu.py, with a model of random weights."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import kit
from bench.gpu_report import Report
from bench.gpu_setup import Plan, config_of, model_of
from trainer_backend.learner.device import Placement
from trainer_backend.models import train_tokenizer
from trainer_backend.models.folder import save_model_folder
from trainer_backend.rundir.layout import open_run

JOB = kit.ROOT / "configs" / "crafter_online.toml"
# Random weights never write a call, and their episodes would end after five decisions; this is about time.
SETTINGS = (
    "training.iterations=1",
    "training.checkpoint_every=1",
    "evaluation.instances=1",
    "rollout.max_turns=10",
    "rollout.max_invalid_decisions=10",
    "rollout.max_tokens=64",
    "model.chat_template_kwargs={}",  # our tokenizer's template reads none
)
SMALLER = (
    "rollout.episodes_per_batch=4",
    "rollout.max_turns=2",
    "rollout.max_tokens=8",
    "training.group_size=2",
)


def iteration_figure(report: Report, name: str, plan: Plan, placement: Placement) -> None:
    """Play and train 64 episodes of up to 10 decisions of 64 tokens, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        model = model_folder(Path(folder) / "model", name, placement)
        run = Path(folder) / "run"
        row = played(report, model, run, placement, SMALLER if name == "tiny" else ())
    seconds = {key: value for key, value in row.items() if key.startswith("time/")}
    told = ", ".join(f"{key.removeprefix('time/')} {value:.1f}" for key, value in seconds.items())
    report.add(
        "iteration",
        name,
        f"crafter_online: {row['episode/count']:.0f} episodes, {row['decision/count']:.0f} decisions; {told}",
        row=row,
    )


def model_folder(folder: Path, name: str, placement: Placement) -> Path:
    """A folder as a user would bring one: the shape's weights, random, and a tokenizer of Crafter's texts."""
    # Not above: a machine without crafter still measures everything else.
    from task_app.environments.crafter.environment import CrafterConfig, CrafterEnvironment

    environment = CrafterEnvironment(CrafterConfig(text="full", max_actions=8))
    texts = [environment.reset(seed).text for seed in range(8)]
    config = config_of(name)
    tokenizer = train_tokenizer(texts, min(4096, config.vocab_size))
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    save_model_folder(folder, model_of(config, placement.device), tokenizer)
    return folder


def played(
    report: Report, model: Path, run: Path, placement: Placement, settings: tuple[str, ...]
) -> dict[str, Any]:
    """The iteration's row of metrics.

    Raises:
        RuntimeError: the run failed, with the end of what it said; or took longer than is left.
    """
    given = (f'model.path="{model}"', f'model.device="{placement.device.type}"', *SETTINGS, *settings)
    command = [sys.executable, "-m", "trainer_backend", "train", str(JOB), "--run", str(run), "--no-report"]
    for setting in given:
        command += ["--set", setting]
    try:
        done = subprocess.run(
            command, cwd=kit.ROOT, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True, text=True, timeout=max(1.0, report.left_s), check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(
            f"the iteration took more than the {error.timeout:.0f} s that were left"
        ) from error
    if done.returncode != 0:
        raise RuntimeError(f"the run ended with code {done.returncode}: {(done.stdout + done.stderr)[-400:]}")
    return next(row for row in open_run(run).metrics() if row["kind"] == "iteration")
