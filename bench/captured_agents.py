"""Do agents that others wrote learn through a captured endpoint, and are their tokens exact?

    python -m venv AGENTS && AGENTS/bin/pip install openai-agents smolagents litellm
    python -m bench.captured_agents --python AGENTS/bin/python [--agent litellm] [--iterations 10]

openai-agents (Responses), smolagents (Chat Completions) and litellm (Messages) play the guessing game of
bench/agents/game.py, each in a process of its own for each episode. The model is tiny and new; it first
imitates random guesses, so what it learns afterwards is which number hides most often. For each agent:

    score         mean on held-out numbers, before and after
    difference    the largest between the sampler's log-prob of a token and the learner's
    drifted       sampled tokens that the learner does not train with the id and at the decision of their
                  sampling                                                                                 0

Results go to bench/results/captured_agents.json.

Left out: seeds. An episode costs the start of a Python process with the agent's imports, 1 to 4 s of CPU.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.kit import ROOT, options
from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import exact_tokens
from trainer_backend.core.segments import build_segments
from trainer_backend.job.load import dump_job, parse_job
from trainer_backend.rundir.rollout_files import read_rollouts

AGENTS = ("smolagents", "litellm", "openai_agents")
RESULTS = ROOT / "bench/results/captured_agents.json"


def tables(agent: str, iterations: int) -> dict[str, Any]:
    return {
        "job": {"name": f"captured_{agent}", "seed": 1},
        "services": {"task_plugins": [str(ROOT / "bench/agents/plugins.py")]},
        "model": {"preset": "tiny-0.3m", "device": "cpu"},
        "inference": {"max_model_len": 768},
        "rollout": {
            "env_name": f"agent:{agent}", "max_turns": 4, "max_tokens": 24, "timeout_s": 180.0,
            "episodes_per_batch": 16, "max_concurrent_rollouts": 3,
        },
        "warmup": {
            "policy_name": "guesser", "episodes": 16, "epochs": 12, "batch_decisions": 8,
            "learning_rate": 4e-3,
        },
        "training": {
            "iterations": iterations, "group_size": 8, "batch_decisions": 16, "threads": 1,
            "learning_rate": 2e-3, "checkpoint_every": iterations, "update_passes": 1,
        },
        "algorithm": {"advantage": "stepwise"},
        "evaluation": {"instances": 12, "every_n_iters": iterations},
    }  # fmt: skip


def train(agent: str, python: str, iterations: int, folder: Path) -> dict[str, Any]:
    """Train with one agent, and return its row of the results."""
    job = folder / f"{agent}.toml"
    job.write_text(dump_job(parse_job(tables(agent, iterations), where=agent).config))
    run, start_s = folder / agent, time.perf_counter()
    with (folder / f"{agent}.log").open("w") as log:
        subprocess.run(
            [sys.executable, "-m", "trainer_backend", "train", str(job), "--run", str(run)],
            stdout=log, stderr=log, env=os.environ | {"AGENTS_PYTHON": python}, check=True,
        )  # fmt: skip
    return {"agent": agent, "wall_s": round(time.perf_counter() - start_s), **row_of(run)}


def row_of(run: Path) -> dict[str, Any]:
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluations = [row["eval/outcome_reward"] for row in metrics if row["kind"] == "evaluation"]
    rows = [row for row in metrics if row["kind"] == "iteration"]
    rollouts = [
        one for file in sorted(run.glob("rollouts/iteration_*.parquet")) for one in read_rollouts(file)
    ]
    played = [one for one in rollouts if one.trajectory is not None]
    return {
        "iterations": len(rows),
        "score_before": evaluations[0],
        "score_after": evaluations[-1],
        "training_scores": [round(row["episode/outcome_reward"], 3) for row in rows],
        "episodes": len(played),
        "failures": len(rollouts) - len(played),
        "calls": sum(len(one.trajectory.steps) for one in played if one.trajectory),
        "sampled_tokens": sum(len(ids) for one in played for ids in sampled(one)),
        "drifted_tokens": sum(map(drifted, played)),
        "segments": sum(len(segments_of_rollout(one)) for one in played),
        "logprob_difference": max(row["mismatch/logprob_max"] for row in rows),
        "answers_that_text_would_change": sum(row["inference/drift_text"] for row in rows),
    }


def segments_of_rollout(rollout: Rollout) -> list[Any]:
    assert rollout.trajectory is not None
    return build_segments(rollout.trajectory.steps, rollout_id=rollout.rollout_id)


def sampled(rollout: Rollout) -> Iterable[tuple[int, ...]]:
    """The ids that the engine sampled, call by call."""
    assert rollout.trajectory is not None
    return [tokens.token_ids for step in rollout.trajectory.steps if (tokens := exact_tokens(step))]


def drifted(rollout: Rollout) -> int:
    """Sampled tokens that the learner does not train with the id and at the decision of their sampling."""
    trained: dict[int, list[int]] = {}
    for segment in segments_of_rollout(rollout):
        for t, token in zip(segment.decision, segment.token_ids[segment.sampled_positions], strict=True):
            trained.setdefault(int(t), []).append(int(token))
    calls = [list(ids) for ids in sampled(rollout)]
    lost = [len(ids) for t, ids in enumerate(calls) if trained.get(t, []) != ids]
    return sum(lost) + sum(len(ids) for t, ids in trained.items() if t >= len(calls))


def main() -> int:
    given = options(
        __doc__,
        ("--python", sys.executable, "of the virtual environment with the agents"),
        ("--agent", [], "one of them; may be repeated"),
        ("--iterations", 10, "of each"),
        ("--folder", "", "for the runs"),
    )
    folder = Path(given.folder or tempfile.mkdtemp(prefix="captured_agents_"))
    folder.mkdir(parents=True, exist_ok=True)
    rows = {row["agent"]: row for row in (json.loads(RESULTS.read_text()) if RESULTS.exists() else [])}
    for agent in given.agent or AGENTS:
        rows[agent] = train(agent, given.python, given.iterations, folder)
        print(json.dumps(rows[agent]), flush=True)
        RESULTS.write_text(json.dumps(list(rows.values()), indent=1) + "\n")
    drift = sum(row["drifted_tokens"] for row in rows.values())
    print(f"drifted tokens {drift}: {'ok' if drift == 0 else 'MISSED'}")
    return int(drift > 0)


if __name__ == "__main__":
    sys.exit(main())
