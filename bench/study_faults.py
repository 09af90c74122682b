"""Faults: short jobs of a trainer service in which each process is killed at random points, until all ended.

    python -m bench.study_faults [--processes | --quick] [--seeds 0 1] [--out runs/faults] (make study-faults)

Every job has an installation of its own: `turnwise trainer` with a real PostgreSQL, and a task app. It is
posted over HTTP with an Idempotency-Key, again until the service has answered. At moments that a seed draws,
while it is posted, starts, collects, learns, saves, evaluates, one of four gets SIGKILL: the service, the
process of the job, the task app, the database. The service starts the process of the job again, the study the
others. Then run directory and store must tell of the run that it would have been (fault_watch.py): every
iteration once, every planned rollout once, finished or with its failure, none in two lines of the ledger, all
that had been kept before a kill in its iteration, every seed as planned, no second job, no process left over.

With --processes each job has learner and two gateways in processes of their own, [cluster], and collects an
iteration ahead. Learner and gateways are killed too; the job's process starts them again. Then no token may
be older than training.max_staleness, and of what had been kept only rollouts of weights that no checkpoint
held may be missing in their iteration: those lie in an .unused- file, and none of them is learned from where
these weights were lost.

bench/results/faults.json and faults_processes.json have the figures, by seed: what is there is not run again.
Exit code 1 when something does not hold.
"""

import json
import random
import shutil
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import kit
from bench.fault_installation import KINDS, OF_A_JOB, Installation, Kind
from bench.fault_watch import Fault, Seen, Watch, drawn_faults, judge
from trainer_backend.job.load import dump_job, load_job

# Episodes of the demo's kind, few and short: a start takes longer than all iterations together.
SETTINGS = (
    "job.name=faults", "rollout.max_turns=12", "rollout.max_concurrent_rollouts=2",  # one after the other
    "warmup.episodes=8", "training.threads=1", "evaluation.instances=2", "evaluation.every_n_iters=1000",
    "services.task_app_wait_s=60.0",
)  # fmt: skip
# A checkpoint every second iteration: of those collected ahead some have weights that no checkpoint holds.
IN_PROCESSES = (
    "cluster.launcher=local", "services.gateways=2", "inference.threads=2",
    "training.max_staleness=1", "training.recovery_every=2",
)  # fmt: skip
# The figure of recovery: from a kill to the first new rollout.
RECOVERY_S = 20.0


@dataclass(frozen=True)
class Size:
    """How long a job is, an iteration takes about, what is killed once, and how many of it once more."""

    iterations: int
    episodes: int
    iteration_s: float
    kinds: tuple[Kind, ...] = KINDS
    more: int = 0
    settings: tuple[str, ...] = ()

    def faults(self, seed: int) -> list[Fault]:
        draws = random.Random(seed)
        kinds = (*self.kinds, *(draws.choice(self.kinds) for _ in range(self.more)))
        return drawn_faults(draws, kinds, iterations=self.iterations, iteration_s=self.iteration_s)


FULL = Size(iterations=6, episodes=16, iteration_s=2.0, more=1)
PROCESSES = replace(FULL, kinds=(*KINDS, *OF_A_JOB), settings=IN_PROCESSES)
QUICK = (
    Size(iterations=2, episodes=8, iteration_s=1.0, kinds=("service", "job")),
    Size(iterations=2, episodes=8, iteration_s=1.0, kinds=("task_app", "database")),
    Size(iterations=2, episodes=8, iteration_s=1.0, kinds=tuple(OF_A_JOB), settings=IN_PROCESSES),
)


def run_job(folder: Path, size: Size, seed: int) -> dict[str, Any]:
    """Run one job to its end with all its faults, and return its figures."""
    folder.mkdir(parents=True)
    begun_s, seen = time.monotonic(), Seen()
    with Installation(folder) as place, ThreadPoolExecutor(1) as posting:
        toml = job_text(size, seed, place.task_url)
        posted = posting.submit(place.post, toml, f"faults-{seed}")
        job = Watch(place, size.faults(seed), seen).until_it_ended()
        if job is None:
            seen.wrong.append("the job has not ended")
        else:
            posts = [posted.result(), place.post(toml, f"faults-{seed}")]
            seen.counts.update(posts=posts[0].times, attempts=job["attempt"])
            judge(place, job, posts, size.iterations, seen)
    return {
        "seconds": round(time.monotonic() - begun_s, 1), "counts": dict(seen.counts), "kept": len(seen.kept),
        "kills": dict(seen.kills), "losses": dict(seen.losses), "recovery_s": dict(seen.recovery_s),
        "answers_s": dict(seen.answers_s), "ages": sorted(seen.ages), "wrong": seen.wrong,
    }  # fmt: skip


def job_text(size: Size, seed: int, task_url: str) -> str:
    """The TOML of the posted job."""
    own = (
        f"training.iterations={size.iterations}", f"rollout.episodes_per_batch={size.episodes}",
        f"job.seed={seed}", f'services.task_url="{task_url}"',
    )  # fmt: skip
    return dump_job(
        load_job(kit.ROOT / "configs" / "crafter_cpu.toml", (*SETTINGS, *size.settings, *own)).config
    )


def study(folder: Path, results: Path, seeds: Sequence[int], sizes: Sequence[Size]) -> dict[str, Any]:
    """Run missing jobs, and write the results after each."""
    jobs = json.loads(results.read_text())["jobs"] if results.exists() else {}
    outcome = summary(jobs)
    for seed in seeds:
        if str(seed) in jobs:
            continue
        shutil.rmtree(folder / f"seed_{seed}", ignore_errors=True)
        jobs[str(seed)] = run_job(folder / f"seed_{seed}", sizes[seed % len(sizes)], seed)
        print(f"seed {seed}: {json.dumps(jobs[str(seed)])}", flush=True)
        outcome = summary(jobs)
        kit.write_results(results, outcome)
    return outcome


def summary(jobs: dict[str, Any]) -> dict[str, Any]:
    kinds = (*KINDS, *OF_A_JOB)
    recovery, answers = (
        {kind: told for kind in kinds if (told := times(job[name].get(kind, ()) for job in jobs.values()))}
        for name in ("recovery_s", "answers_s")
    )
    slow = [
        one > RECOVERY_S for job in jobs.values() for all_s in job["recovery_s"].values() for one in all_s
    ]
    return {
        "study": "faults",
        "machine": kit.describe_machine(),
        "counts": added(job["counts"] for job in jobs.values())
        | {"jobs": len(jobs), "kept": sum(job["kept"] for job in jobs.values())},
        "kills": added(job["kills"] for job in jobs.values()),
        "losses": added(job["losses"] for job in jobs.values()),
        "from_kill_to_first_new_rollout_s": recovery,
        f"of_those_above_{RECOVERY_S:g}_s": sum(slow),
        "from_kill_to_answer_out_of_the_store_s": answers,
        "holds": {
            "every job is the one that it would have been": not any(job["wrong"] for job in jobs.values())
        },
        "jobs": jobs,
    }


def added(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    return dict(sorted(sum(map(Counter, counts), Counter()).items()))


def times(found: Iterable[Sequence[float]]) -> dict[str, float] | None:
    """Count, median and longest over all jobs; None without any."""
    seconds = [one for of_job in found for one in of_job]
    if not seconds:
        return None
    return {"count": len(seconds), "median": statistics.median(seconds), "longest": max(seconds)}


def main(arguments: Sequence[str] | None = None) -> int:
    options = kit.options(
        __doc__,
        ("--quick", False, "three jobs, one in processes, with two kills each"),
        ("--processes", False, "jobs in processes of their own, collecting ahead"),
        ("--seeds", (), "default: 0 to 19"),
        ("--out", Path, "folder of the runs"),
        ("--results", Path, "JSON file to write"),
        arguments=arguments,
    )
    if options.quick and options.processes:
        raise SystemExit("--quick and --processes: one of them")
    name, sizes, count = "faults", (FULL,), 20
    if options.quick:
        name, sizes, count = "faults_quick", QUICK, len(QUICK)
    elif options.processes:
        name, sizes = "faults_processes", (PROCESSES,)
    folder = (options.out or kit.ROOT / "runs" / name).resolve()
    results = (
        options.results or (folder if options.quick else kit.ROOT / "bench" / "results") / f"{name}.json"
    )
    outcome = study(folder, results, options.seeds or range(count), sizes)
    print(json.dumps({key: value for key, value in outcome.items() if key != "jobs"}, indent=1))
    return 0 if all(outcome["holds"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
