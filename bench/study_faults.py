"""Faults: short jobs whose trainer and task app are killed at random points, until each has ended.

    python bench/study_faults.py [--quick] [--seeds 0 1 2] [--out runs/faults]        (make study-faults)

Every job trains against a task app in a process of its own. Both get SIGKILL at moments that a seed draws:
while the trainer starts, collects, learns, saves. The trainer is started again with --resume, the task app at
its address. Then the run directory must tell of the run that it would have been: every iteration once, every
planned rollout once, finished or with its failure, no rollout in two lines of the ledger, all that had been
kept before a kill in the iteration that it was for, and every seed as planned. bench/results/faults.json has
the figures, by seed: what is there is not run again. Exit code 1 when something does not hold.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: see trainer_backend.__main__

import argparse
import json
import math
import platform
import random
import shutil
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fault_processes import TaskApp, Trainer
from pydantic import SecretStr

from shared_schemas.rollouts import Rollout
from task_app.policies.openai import decision_seed
from trainer_backend.collect.plan import Inference, Planner
from trainer_backend.rundir.json_lines import read_texts
from trainer_backend.rundir.layout import RunDirectory, open_run
from trainer_backend.rundir.ledger import Consumed, read_ledger
from trainer_backend.rundir.rollout_files import read_rollouts
from trainer_backend.rundir.state import watch

ROOT = Path(__file__).resolve().parent.parent
# Episodes of the demo's kind, few and short: a start takes longer than all iterations together.
SETTINGS = (
    "job.name=faults", "rollout.max_turns=6", "rollout.episodes_per_batch=16",
    "rollout.max_concurrent_rollouts=4",  # so that they end one after the other
    "warmup.episodes=8", "training.threads=1", "evaluation.instances=2", "evaluation.every_n_iters=1000",
    "services.task_app_wait_s=60.0",
)  # fmt: skip
MOST_STARTS = 25


@dataclass(frozen=True)
class Size:
    """How long a job is, and how often its trainer and its task app are killed."""

    iterations: int
    trainer: int
    task_app: int
    settings: tuple[str, ...] = ()

    def of(self, seed: int) -> "Size":
        """That of one job: of the quick ones each has one fault."""
        if self is not QUICK:
            return self
        return replace(self, trainer=1 - seed % 2, task_app=seed % 2)


@dataclass
class Seen:
    """What happened to one job, and what does not hold of it."""

    counts: Counter[str] = field(default_factory=Counter)
    recovery_s: list[float] = field(default_factory=list)
    kept: dict[str, Rollout] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def hold(self, what: str, *, holds: bool) -> None:
        if not holds and what not in self.wrong:
            self.wrong.append(what)


FULL = Size(iterations=6, trainer=3, task_app=2)
QUICK = Size(iterations=2, trainer=1, task_app=1, settings=("rollout.episodes_per_batch=8",))


def run_job(folder: Path, size: Size, seed: int) -> dict[str, Any]:
    """One job to its end, through all that is done to it; its figures."""
    folder.mkdir(parents=True)
    draws, seen, run = random.Random(seed), Seen(), folder / "run"
    faults = ["trainer"] * size.trainer + ["task_app"] * size.task_app
    draws.shuffle(faults)
    begun_s, app, code = time.monotonic(), TaskApp(folder / "task_app.log"), -1
    own = (f"training.iterations={size.iterations}", f"job.seed={seed}", f'services.task_url="{app.url}"')
    settings = (*SETTINGS, *size.settings, *own)
    try:
        while code != 0 and seen.counts["starts"] < MOST_STARTS:
            seen.counts["starts"] += 1
            code = one_start(Trainer(run, app, settings), app, faults, draws, size, seen)
            keep_in_mind(run, seen)
    finally:
        app.kill()
    judge(open_run(run), size, seen)
    return {
        "counts": dict(seen.counts), "seconds": round(time.monotonic() - begun_s, 1),
        "recovery_s": [round(seconds, 2) for seconds in seen.recovery_s],
        "kept": len(seen.kept), "wrong": seen.wrong,
    }  # fmt: skip


def one_start(
    trainer: Trainer, app: TaskApp, faults: list[str], draws: random.Random, size: Size, seen: Seen
) -> int:
    """Let it train, and do to it and its task app what its turn has come for; its exit code."""
    try:
        while faults:
            iteration = draws.randrange(-1, size.iterations)
            if not trainer.lives_until(iteration, draws.uniform(0.0, 4.0 if iteration < 0 else 1.0)):
                break
            fault = faults.pop()
            seen.counts[f"{fault}_killed"] += 1
            if fault == "trainer":
                trainer.kill()
            else:
                app.restart()
        trainer.lives_until(-1, math.inf)
    finally:
        trainer.kill()
    if trainer.first_rollout_s is not None and seen.counts["starts"] > 1:
        seen.recovery_s.append(trainer.first_rollout_s)
    code = trainer.process.returncode
    seen.counts["ended_by_itself"] += code not in (0, -signal.SIGKILL)
    return code


def keep_in_mind(run: Path, seen: Seen) -> None:
    """What stands in spools between two starts has finished, and must be what its iteration ends with."""
    for path in run.glob("rollouts/iteration_*.spool.jsonl"):
        for line in read_texts(path)[0][1:]:
            rollout = Rollout.model_validate_json(line)
            seen.kept[path_of(rollout.rollout_id)] = rollout


def path_of(rollout_id: str) -> str:
    """Without the id of the start, and without the number of an attempt."""
    return rollout_id.partition("/")[2].partition(":")[0]


def judge(run: RunDirectory, size: Size, seen: Seen) -> None:
    """Whether the run is the one that it would have been."""
    every, state = list(range(1, size.iterations + 1)), watch(run.path).state
    rows = [(row["kind"], row["iteration"]) for row in run.metrics()]
    seen.hold("ended", holds=state is not None and (state.state, state.iteration) == ("ended", every[-1]))
    seen.hold("one row an iteration", holds=[n for kind, n in rows if kind == "iteration"] == every)
    seen.hold("both evaluations", holds=[n for kind, n in rows if kind == "evaluation"] == [0, every[-1]])
    ledger = read_ledger(run.path)
    consumed = Counter(name for line in ledger for name in line.rollout_ids)
    seen.hold("one line of the ledger an iteration", holds=[line.iteration for line in ledger] == every)
    seen.hold("no rollout twice in the ledger", holds=set(consumed.values()) == {1})
    planner = Planner(run.job(), "any", Inference("http://any", "any/actor", SecretStr("any")))
    for line in ledger:
        stored = read_rollouts(run.rollouts_file(f"iteration_{line.iteration}"))
        judge_iteration(stored, line, planner, seen)


def judge_iteration(stored: Sequence[Rollout], line: Consumed, planner: Planner, seen: Seen) -> None:
    """Every planned rollout once; learned from is what finished, and that is what was kept before a kill."""
    told, planned = f"iteration {line.iteration}: ", planner.training(line.iteration)
    finished = {path_of(item.rollout_id): item for item in stored if item.trajectory is not None}
    names = sorted(path_of(item.rollout_id) for item in stored)
    seen.counts["failed"] += len(stored) - len(finished)
    seen.counts["trained"] += len(line.rollout_ids)
    seen.hold(told + "planned", holds=names == sorted(path_of(item.rollout_id) for item in planned))
    seen.hold(told + "learned", holds=sorted(map(path_of, line.rollout_ids)) == sorted(finished))
    recorded = all(item.trajectory is not None or item.failure is not None for item in stored)
    seen.hold(told + "recorded", holds=recorded)
    for request in planned:
        item = finished.get(path_of(request.rollout_id))
        if item is None or item.trajectory is None:
            continue
        sampling, kept = item.trajectory.steps[0].sampling, seen.kept.get(path_of(request.rollout_id))
        drawn = (item.trajectory.seed, sampling.seed if sampling else None)
        asked = (request.start.seed, decision_seed(request.policy.config["seed"], 1))
        seen.hold(told + "seeds", holds=drawn == asked)
        seen.hold(told + "kept", holds=kept is None or kept.trajectory == item.trajectory)


def study(folder: Path, results: Path, seeds: Sequence[int], size: Size) -> dict[str, Any]:
    """Run what is missing; the results, which are also written after every job."""
    jobs = json.loads(results.read_text())["jobs"] if results.exists() else {}
    for seed in seeds:
        if str(seed) not in jobs:
            shutil.rmtree(folder / f"seed_{seed}", ignore_errors=True)
            jobs[str(seed)] = run_job(folder / f"seed_{seed}", size.of(seed), seed)
            print(f"seed {seed}: {json.dumps(jobs[str(seed)])}", flush=True)
        outcome = summary(jobs, size)
        results.parent.mkdir(parents=True, exist_ok=True)
        results.write_text(json.dumps(outcome, indent=1) + "\n")
    return outcome


def summary(jobs: dict[str, Any], size: Size) -> dict[str, Any]:
    counts: Counter[str] = sum((Counter(job["counts"]) for job in jobs.values()), Counter())
    recovery = sorted(seconds for job in jobs.values() for seconds in job["recovery_s"])
    return {
        "study": "faults",
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform()},
        "iterations": size.iterations,
        "counts": dict(counts) | {"jobs": len(jobs), "kept": sum(job["kept"] for job in jobs.values())},
        "recovery_to_the_first_new_rollout_s": {
            "median": statistics.median(recovery), "longest": recovery[-1],
        } if recovery else None,
        "holds": {
            "every job is the one that it would have been": not any(job["wrong"] for job in jobs.values())
        },
        "jobs": jobs,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two jobs, a fault each; shows that it works")
    parser.add_argument("--seeds", type=int, nargs="+", default=None, help="default: 0 to 19")
    parser.add_argument("--out", type=Path, default=None, help="folder of the runs")
    parser.add_argument("--results", type=Path, default=None, help="JSON file to write")
    options = parser.parse_args(arguments)
    name = "faults_quick" if options.quick else "faults"
    folder = (options.out or ROOT / "runs" / name).resolve()
    results = options.results or (folder if options.quick else ROOT / "bench" / "results") / f"{name}.json"
    seeds = options.seeds or range(2 if options.quick else 20)
    outcome = study(folder, results, seeds, QUICK if options.quick else FULL)
    print(json.dumps({key: value for key, value in outcome.items() if key != "jobs"}, indent=1))
    return 0 if all(outcome["holds"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
