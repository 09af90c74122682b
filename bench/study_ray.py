"""Kills one of two Ray nodes on this machine during an update: is the run the same as without the kill?

    python -m bench.study_ray [--out FILE] [--runs N]

A deterministic job of two iterations runs in one process. It runs again with `[cluster] launcher = "ray"`: a
learner and two gateways on two Ray nodes, and a head node without CPUs. In the update of iteration 2, the
learner's node is killed with all its processes, a gateway among them. Figures:

    plans, sampled actions, both updates, final weights    equal to those of one process
    rollouts lost                                          0: each is trained on once
    goes_on_s                                              from the kill to the next update, at most 60

With [learner] nnodes = 2 the first update on two nodes is compared too, to 1e-6. Needs turnwise[ray].
"""

import asyncio
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ.update(RAY_USAGE_STATS_ENABLED="0")

import psutil
import torch
from ray.cluster_utils import Cluster
from safetensors.torch import load_file

from bench.kit import ROOT, Reporter, options, report, write_results
from trainer_backend.job.load import parse_job
from trainer_backend.job.schema import JobConfig
from trainer_backend.rundir.layout import RunDirectory, create_run
from trainer_backend.rundir.rollout_files import read_rollouts
from trainer_backend.rundir.spool import read_ledger
from trainer_backend.start import run_job

RESULTS = ROOT / "bench" / "results" / "ray.json"
MOST_S, CLOSE = 60.0, 1e-6
_NODES, _CPUS = 2, 3
JOB: dict[str, Any] = {
    "job": {"name": "ray", "seed": 1},
    "model": {"preset": "tiny-0.3m", "device": "cpu"},
    "services": {"gateways": 2},
    "inference": {"max_model_len": 256, "deterministic": True},
    "rollout": {
        "env_config": {"text": "compact", "max_actions": 4},
        "max_turns": 4, "episodes_per_batch": 8, "max_tokens": 8,
    },
    "warmup": {
        "episodes": 4, "epochs": 1, "batch_decisions": 12, "learning_rate": 6e-3,
        "policy_config": {"memory": False, "max_actions": 4},
    },
    "training": {"iterations": 2, "group_size": 4, "batch_decisions": 16, "threads": 1},
    "evaluation": {"instances": 1, "every_n_iters": 2},
}  # fmt: skip


class Story(Reporter):
    """A run's reporter: prints lines with their times, and calls `kill` once in the update of iteration 2."""

    def __init__(self, kill: Any = None) -> None:
        self._kill, self._began = kill, time.monotonic()
        self.killed_s: float | None = None
        self.goes_on_s: float | None = None
        self.learners = 0

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:7.1f} s  {text}", flush=True)

    def stage(self, name: str, done: int, total: int) -> None:
        if name != "update 2":
            return
        if self._kill is not None:
            self.killed_s, kill, self._kill = time.monotonic(), self._kill, None
            threading.Thread(target=kill).start()
        elif self.killed_s is not None and self.learners == 2 and self.goes_on_s is None:
            self.goes_on_s = time.monotonic() - self.killed_s
            self.say(f"the run goes on, {self.goes_on_s:.1f} s after the node was killed")

    def process(self, name: str, **state: Any) -> None:
        self.say(f"{state['role']} {name}: {state['state']}")
        self.learners += (state["role"], state["state"]) == ("learner", "serving")


def job_with(**tables: Mapping[str, Any]) -> JobConfig:
    return parse_job({**JOB, **tables}, where="bench/study_ray.py").config


def play(job: JobConfig, folder: Path, story: Story) -> RunDirectory:
    run = create_run(job, folder)
    asyncio.run(run_job(job, run, story, resume=False))
    return run


def kill_node_of_learner(cluster: Cluster, folder: Path) -> None:
    """Kill the Ray node of the learner and all processes that it has started, as a power cut does."""
    for node in cluster.worker_nodes.copy():
        (raylet,) = (entry.process.pid for entry in node.all_processes["raylet"])
        below = psutil.Process(raylet).children(recursive=True)
        if any("trainer_backend.learner.process" in _words(process) for process in below):
            for process in below:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            cluster.remove_node(node, allow_graceful=False)
            return
    raise RuntimeError("no node has the learner")


def _words(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return list(process.cmdline())
    return []


def read_facts(run: RunDirectory) -> dict[str, Any]:
    """Return a run's plans, actions and learned rollouts, its updates, and its final weights."""
    stored = [item for n in (1, 2) for item in read_rollouts(run.rollouts_file(f"iteration_{n}"))]
    played = [item.trajectory for item in stored if item.trajectory is not None]
    rows = [row for row in run.metrics() if row["kind"] == "iteration"]
    return {
        "plan": [(item.group_id, item.sibling) for item in stored],
        "seeds": [trajectory.seed for trajectory in played],
        "actions": [step.step_info.executed_actions for trajectory in played for step in trajectory.steps],
        "learned_from": sorted(
            name.partition("/")[2] for line in read_ledger(run.path) for name in line.rollout_ids
        ),
        "updates": [
            {name: value for name, value in row.items() if name.startswith(("loss/", "optim/"))}
            for row in rows
        ],
        "weights": {
            name: weight
            for file in (run.checkpoints / "iteration_2").glob("model*.safetensors")
            for name, weight in load_file(file).items()
        },
    }


def under_ray(folder: Path, *, kills: bool, **learner: int) -> tuple[dict[str, Any], Story]:
    head = {"num_cpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(_NODES):
            cluster.add_node(num_cpus=_CPUS)
        cluster.wait_for_nodes()
        table = {"launcher": "ray", "ray_address": cluster.address, "wait_s": 180}
        job = job_with(cluster=table, learner=learner)
        story = Story((lambda: kill_node_of_learner(cluster, folder)) if kills else None)
        return read_facts(play(job, folder, story)), story
    finally:
        cluster.shutdown()


def main() -> int:
    flags = (("--out", RESULTS, "where the figures are written"), ("--runs", 3, "runs with a kill"))
    chosen = options(__doc__, *flags)
    times: list[float] = []
    missed = 0
    with tempfile.TemporaryDirectory() as root:
        services = {"services": {"gateways": 1}}
        whole = read_facts(play(job_with(**services), Path(root) / "whole", Story()))
        for number in range(chosen.runs):
            facts, story = under_ray(Path(root) / f"killed_{number}", kills=True)
            for name in ("plan", "seeds", "actions", "updates", "learned_from"):
                missed += report(f"{name} as in one process", facts[name] == whole[name])
            missed += report("rollouts lost: 0", facts["learned_from"] == whole["learned_from"])
            same = all(torch.equal(facts["weights"][name], value) for name, value in whole["weights"].items())
            missed += report("weights as in one process, bit for bit", same)
            assert story.goes_on_s is not None, "the node was killed, and the run ended"
            times.append(story.goes_on_s)
        slowest = max(times)
        missed += report(f"goes on within {slowest:.1f} s (at most {MOST_S:g})", slowest <= MOST_S)
        two, _ = under_ray(Path(root) / "two", kills=False, nnodes=2)
        other = whole["updates"][0]  # relative differences, with a denominator of at least 1
        difference = max(
            abs(value - other[name]) / max(1.0, abs(other[name])) for name, value in two["updates"][0].items()
        )
        figure = f"first update on two nodes: {difference:.1e} (at most {CLOSE:g})"
        missed += report(figure, difference <= CLOSE)
        missed += report("plan on two nodes as in one process", two["plan"] == whole["plan"])
    figures = {
        "goes_on_s": [round(time_s, 1) for time_s in times],
        "goes_on_median_s": round(statistics.median(times), 1),
        "rollouts_lost": 0 if not missed else None, "first_update_on_two_nodes": difference,
        "load": round(os.getloadavg()[1], 1), "cores": os.cpu_count(), "met": not missed,
    }  # fmt: skip
    write_results(chosen.out, figures)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
