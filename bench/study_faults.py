"""Faults: short jobs of a trainer service, during which its processes are killed at random times.

    python -m bench.study_faults [--processes] [--seeds 0 1] [--out runs/faults] (make study-faults)

Every job has an installation of its own: `turnwise trainer` with a real PostgreSQL, and a task app. The job
is posted over HTTP with an Idempotency-Key until the service answers. At times that a seed draws, from the
POST to the last evaluation, the service, the job's process, the task app or the database gets SIGKILL. The
service restarts the job's process; the study restarts the others. Afterwards, run directory and store must
be as without faults (fault_watch.py). Every iteration and every planned rollout must be there once, with the
planned seeds, and at most once in the ledger. A finished rollout that a kill found must be in its iteration.
There must be no second job, and no process left.

With --processes the learner and two gateways of each job are processes of their own ([cluster]), and the job
collects an iteration ahead. Learner and gateways are killed too; the job's process restarts them. Then no
token may be older than training.max_staleness. A finished rollout may be missing in its iteration only if no
checkpoint held the weights that sampled it; it is then in an .unused- file. If those weights were lost, no
iteration learns from it.

bench/results/faults.json and faults_processes.json have the figures by seed; a seed that they have is not run
again. The exit code is 1 if something does not hold.
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
from pathlib import Path
from typing import Any

from bench import kit
from bench.fault_installation import KINDS, OF_A_JOB, Installation, Kind
from bench.fault_watch import Fault, Seen, Watch, drawn_faults, judge
from trainer_backend.job.load import dump_job, load_job

# Episodes as in configs/crafter_cpu.toml, few and short: a start takes longer than all iterations together.
ITERATIONS, ITERATION_S = 6, 2.0  # an iteration takes about two seconds
SETTINGS = (
    "job.name=faults", f"training.iterations={ITERATIONS}", "rollout.episodes_per_batch=16",
    "rollout.max_turns=12", "rollout.max_concurrent_rollouts=2",  # one after the other
    "warmup.episodes=8", "training.threads=1", "evaluation.instances=2", "evaluation.every_n_iters=1000",
    "services.task_app_wait_s=60.0",
)  # fmt: skip
# With a checkpoint every second iteration, the weights that sampled some rollouts are in no checkpoint.
IN_PROCESSES = (
    "cluster.launcher=local", "services.gateways=2", "inference.threads=2",
    "training.max_staleness=1", "training.recovery_every=2",
)  # fmt: skip
# Times from a kill to the first new rollout that are longer than this are counted.
RECOVERY_S = 20.0


def choose_faults(kinds: Sequence[Kind], seed: int) -> list[Fault]:
    """Draw one fault of each kind, and one more of a random kind."""
    draws = random.Random(seed)
    more = draws.choice(kinds)
    return drawn_faults(draws, (*kinds, more), iterations=ITERATIONS, iteration_s=ITERATION_S)


def run_job(folder: Path, seed: int, *, in_processes: bool) -> dict[str, Any]:
    """Run one job to its end with all its faults, and return its figures."""
    kinds, settings = ((*KINDS, *OF_A_JOB), IN_PROCESSES) if in_processes else (KINDS, ())
    folder.mkdir(parents=True)
    begun_s, seen = time.monotonic(), Seen()
    with Installation(folder) as place, ThreadPoolExecutor(1) as posting:
        own = (*SETTINGS, *settings, f"job.seed={seed}", f'services.task_url="{place.task_url}"')
        toml = dump_job(load_job(kit.ROOT / "configs" / "crafter_cpu.toml", own).config)
        posted = posting.submit(place.post, toml, f"faults-{seed}")
        job = Watch(place, choose_faults(kinds, seed), seen).until_it_ended()
        if job is None:
            seen.wrong.append("the job has not ended")
        else:
            posts = [posted.result(), place.post(toml, f"faults-{seed}")]
            seen.counts.update(posts=posts[0].times, attempts=job["attempt"])
            judge(place, job, posts, ITERATIONS, seen)
    return {
        "seconds": round(time.monotonic() - begun_s, 1), "counts": dict(seen.counts), "kept": len(seen.kept),
        "kills": dict(seen.kills), "losses": dict(seen.losses), "recovery_s": dict(seen.recovery_s),
        "answers_s": dict(seen.answers_s), "ages": sorted(seen.ages), "wrong": seen.wrong,
    }  # fmt: skip


def study(folder: Path, results: Path, seeds: Sequence[int], *, in_processes: bool) -> dict[str, Any]:
    """Run missing jobs, and write the results after each."""
    jobs = json.loads(results.read_text())["jobs"] if results.exists() else {}
    outcome = summary(jobs)
    for seed in seeds:
        if str(seed) in jobs:
            continue
        shutil.rmtree(folder / f"seed_{seed}", ignore_errors=True)
        jobs[str(seed)] = run_job(folder / f"seed_{seed}", seed, in_processes=in_processes)
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
    """Return count, median and longest over all jobs; None if there is no time."""
    seconds = [one for of_job in found for one in of_job]
    if not seconds:
        return None
    return {"count": len(seconds), "median": statistics.median(seconds), "longest": max(seconds)}


def main(arguments: Sequence[str] | None = None) -> int:
    options = kit.options(
        __doc__,
        ("--processes", False, "jobs in processes of their own, collecting ahead"),
        ("--seeds", (), "default: 0 to 19"),
        ("--out", Path, "folder of the runs"),
        ("--results", Path, "JSON file to write"),
        arguments=arguments,
    )
    name = "faults_processes" if options.processes else "faults"
    folder = (options.out or kit.ROOT / "runs" / name).resolve()
    results = options.results or kit.ROOT / "bench" / "results" / f"{name}.json"
    outcome = study(folder, results, options.seeds or range(20), in_processes=options.processes)
    print(json.dumps({key: value for key, value in outcome.items() if key != "jobs"}, indent=1))
    return 0 if all(outcome["holds"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
