"""Four short jobs that must have the same metrics on every tree: a script for the steps of the redesign.

    python -m bench.equal_runs > FILE     play them, each in a process of its own (minutes)
    python -m bench.equal_runs A B        the differences between two such files; the exit code says whether

The jobs are deterministic, so every metric is compared exactly, except for what the machine decides
(`TIMED`): times, rates, and shares of time. The first job has a warm-up, and the others begin with what it
made. The files of each run and its job.toml are compared too. Other machines and other versions of torch
may have other numbers: play both trees on one.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tomli_w

from bench.kit import ROOT, environ_of
from bench.surface import compare_files

TIMED = re.compile(r"(time|timeline|perf)/|.*(_s|_seconds|_bytes|seconds_per_\w+|_per_s)$")
BASE: dict[str, Any] = {
    "job": {"seed": 1},
    "model": {"preset": "tiny-0.3m", "device": "cpu"},
    "inference": {"max_model_len": 256, "max_running": 16, "deterministic": True},
    "rollout": {
        "env_config": {"text": "compact", "max_actions": 4},
        "max_turns": 20,
        "max_invalid_decisions": 20,
        "episodes_per_batch": 8,
        "max_tokens": 8,
    },
    "training": {
        "iterations": 3,
        "group_size": 4,
        "batch_decisions": 64,
        "threads": 1,
        "checkpoint_every": 1,
        "step_rewards_enabled": True,
        "step_rewards_mode": "decision_stepwise",
    },
    "evaluation": {"instances": 4, "every_n_iters": 3},
}
# The changes of each job; {grpo} is the run directory of that job.
JOBS: dict[str, dict[str, Any]] = {
    "grpo": {
        "warmup": {
            "policy_name": "crafter_teacher",
            "policy_config": {"memory": False, "max_actions": 4},
            "episodes": 40,
            "epochs": 3,
            "batch_decisions": 16,
            "learning_rate": 6e-3,
        },
        "training": {
            "kl_coef": 0.05,
            "learning_rate_schedule": "cosine",
            "clip_dual": 3.0,
            "refill_rounds": 1,
        },
        "algorithm": {"advantage": "grpo", "loss": "dapo", "episode_score": "outcome"},
    },
    "gae_own_critic_kl": {
        "model": {"preset": None, "path": "{grpo}/checkpoints/iteration_0"},
        "rollout": {"invalid_action_penalty": -0.1},
        "training": {
            "critic": "own",
            "critic_warmup": 1,
            "value_clip": 0.5,
            "kl_reward_coef": 0.02,
            "kl_reward_kind": "k2",
            "step_rewards_beta": 0.1,
            "step_rewards_indicator_lambda": 0.2,
            "event_rewards_kind": "absolute",
            "aggregation": "episode_equal",
        },
        "algorithm": {"advantage": "gae", "gae_lambda": 0.9, "bootstrap_truncated": True},
    },
    "gigpo": {
        "model": {"preset": None, "path": "{grpo}/checkpoints/iteration_0"},
        "training": {"step_rewards_mode": "env_sparse", "update_passes": 3, "skip_certain_above": 0.99},
        "lora": {"rank": 2, "dropout": 0.1},
        "algorithm": {
            "advantage": "gigpo",
            "loss": "sapo",
            "omega": 0.3,
            "context_depth": 2,
            "ratio_level": "decision",
            "state_hashing_function": "text",
        },
    },
    "mixture": {
        "model": {"preset": None, "path": "{grpo}/checkpoints/iteration_0"},
        "rollout_only": [
            {"name": "later", "model_path": "{grpo}", "weight": 2.0, "behaviour_weight_mode": "mask"},
            {
                "name": "first",
                "model_path": "{grpo}/checkpoints/iteration_0",
                "objective": "single_ratio",
                "temperature": 1.2,
            },
        ],
        "rollout_allocation_schedule": {"type": "linear", "alpha_0": 0.2, "beta": 0.1, "unit": "rollout"},
        "training": {"behaviour_weight_cap": 1.5, "behaviour_weight_level": "decision", "value_coef": 0.4},
        "algorithm": {"advantage": "gae", "loss": "clipped"},
    },
}


def document(name: str, folder: Path) -> dict[str, Any]:
    """The TOML of a job: its tables over those of BASE."""
    tables: dict[str, Any] = {}
    for table in (*BASE, *(table for table in JOBS[name] if table not in BASE)):
        own = JOBS[name].get(table, {})
        tables[table] = own if isinstance(own, list) else {**BASE.get(table, {}), **own}
    tables["job"]["name"] = name
    tables["model"] = {key: value for key, value in tables["model"].items() if value is not None}
    return dict(json.loads(json.dumps(tables).replace("{grpo}", str(folder / "grpo"))))


def play(name: str, folder: Path) -> dict[str, Any]:
    """What a job left: digests of its last checkpoint, metrics, files, and its resolved job."""
    job, run = folder / f"{name}.toml", folder / name
    job.write_text(tomli_w.dumps(document(name, folder)), encoding="utf-8")
    begun = time.perf_counter()
    command = [sys.executable, "-m", "trainer_backend", "train", str(job), "--run", str(run), "--no-report"]
    variables = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environ_of(ROOT, variables), check=False, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout[-2_000:]}{done.stderr[-2_000:]}")
    print(f"{name}: {time.perf_counter() - begun:.0f} s", file=sys.stderr)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    resolved = (run / "job.toml").read_text(encoding="utf-8").replace(str(folder), "RUNS")
    weights = max(
        (run / "checkpoints").glob("iteration_*"), key=lambda path: int(path.name.partition("_")[2])
    )
    return {
        "weights": {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in weights.rglob("*.safetensors")
        },
        "metrics": {
            f"{number} {row['kind']}": {key: value for key, value in row.items() if not TIMED.match(key)}
            for number, row in enumerate(rows)
        },
        "files": sorted(path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()),
        "job": resolved.replace(str(ROOT), "ROOT").splitlines(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="*", help="two files to compare; none: play the jobs")
    asked = parser.parse_args(arguments)
    if asked.files:
        return compare_files(*asked.files)
    with TemporaryDirectory() as folder:
        found = {name: play(name, Path(folder)) for name in JOBS}
    print(json.dumps(found, indent=1, sort_keys=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
