"""Measures decisions per second of collect + update in configs/crafter_cpu.toml, and where the time goes.

    python -m bench.decision_rate [--set table.key=value ...]

There are two views, because they answer different questions:
1. Wall time of an iteration: collect, credit and store, update, publish. They follow each other and add up.
2. CPU time while rollouts are collected, by component: the environment (timed around each step inside the
   task app, so a step that was preempted counts too long), the rest of the task app (HTTP, prompts, new
   worlds), the gateway's thread (HTTP, rendering), the engine's thread (generation), other threads of Python
   in this process (orchestrator), and threads that libraries made. Decisions run in parallel, so the wall
   times of single decisions overlap and do not add up; CPU times do.

The first iteration is left out, because every part starts up in it. All other iterations train the policy;
in the job itself, only the critic learns in the first two. Threads are identified by the
names that the product gives them. A missing thread is an error, and not 0 seconds.
"""

import asyncio
import re
import tempfile
import threading
from pathlib import Path
from typing import Any

import psutil

from bench import kit
from bench.collect_rate import children_seconds
from service_kit.server import SERVER_THREAD
from trainer_backend.inference.engine import ENGINE_THREAD
from trainer_backend.job.load import load_job
from trainer_backend.rundir.layout import create_run
from trainer_backend.start import run_job

JOB = kit.ROOT / "configs" / "crafter_cpu.toml"
SETTINGS = (
    "training.iterations=4", "evaluation.instances=8", "evaluation.every_n_iters=1000",
    "warmup.episodes=160", "warmup.epochs=4", "warmup.batch_decisions=128", "training.critic_warmup=0",
)  # fmt: skip
WALL = (
    ("collect", "time/collect_s"), ("credit, store", "time/credit_s"),
    ("update", "time/update_s"), ("publish", "time/publish_s"),
)  # fmt: skip


# Names of threads in this process, and the component that each belongs to.
THREADS = {ENGINE_THREAD: "engine", SERVER_THREAD: "gateway"}
WHO = ("task app", "gateway", "engine", "other threads", "threads of libraries")


class CpuReporter(kit.Reporter):
    """Reads the CPU clocks when an iteration's rollouts are collected, and at its end."""

    def __init__(self) -> None:
        self.rows: list[tuple[dict[str, Any], dict[str, float]]] = []
        self._before: dict[str, float] = {}
        self._collected: dict[str, float] | None = None

    def say(self, text: str) -> None:
        print(text, flush=True)

    def stage(self, name: str, done: int, total: int) -> None:
        if re.match(r"collect \d", name) and done == total:  # not the teacher's, before any model is served
            now = serving_cpu_seconds()
            self._collected = {who: now[who] - self._before[who] for who in WHO}

    def metrics(self, row: dict[str, Any], line: str) -> None:
        if row["kind"] == "iteration":
            if self._collected is None:
                raise SystemExit(
                    f"iteration {row['iteration']}: no stage said that its rollouts were collected"
                )
            self.rows.append((row, self._collected))
        self._before, self._collected = cpu_seconds(), None


def serving_cpu_seconds() -> dict[str, float]:
    """Return `cpu_seconds`; raise SystemExit if the thread of the engine or the gateway is missing."""
    if missing := set(THREADS) - {thread.name for thread in threading.enumerate()}:
        raise SystemExit(f"no thread of this process is called {', '.join(sorted(missing))}")
    return cpu_seconds()


def cpu_seconds() -> dict[str, float]:
    """Return the CPU seconds so far of each component in `WHO`."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    clock: dict[str, float] = dict.fromkeys(WHO, 0.0)
    for thread in psutil.Process().threads():
        name = names.get(thread.id)
        who = "threads of libraries" if name is None else THREADS.get(name, "other threads")
        clock[who] += thread.user_time + thread.system_time
    clock["task app"] += children_seconds()  # the embedded one
    return clock


def report_shares(rows: list[tuple[dict[str, Any], dict[str, float]]]) -> None:
    """Print the means over the iterations, in milliseconds per decision."""
    decisions = sum(row["decision/count"] for row, _ in rows)
    wall = {label: 1e3 * sum(row[name] for row, _ in rows) / decisions for label, name in WALL}
    cpu = {who: 1e3 * sum(clock[who] for _, clock in rows) / decisions for who in WHO}
    environment = 1e3 * sum(row["time/environment_s"] for row, _ in rows) / decisions
    views = {
        "wall time of an iteration": wall,
        "CPU time while collecting": {
            "environment": environment,
            "HTTP etc., task app": max(cpu["task app"] - environment, 0.0),
            "HTTP etc., gateway": cpu["gateway"],
            "generation": cpu["engine"],
            "orchestrator": cpu["other threads"],
            "threads of libraries": cpu["threads of libraries"],
        },
    }
    for title, parts in views.items():
        total = sum(parts.values())
        print(f"\n{title:<28}{'ms a decision':>14}{'share':>9}")
        for name, value in parts.items():
            print(f"  {name:<26}{value:>14.3f}{value / total:>9.1%}")
    rate, collecting = 1e3 / sum(wall.values()), 1e3 / wall["collect"]
    print(f"\n{rate:.1f} decisions a second ({collecting:.1f} while collecting)")


def main() -> None:
    options = kit.options(__doc__, ("--set", [], "table.key=value"))
    job = load_job(JOB, (*SETTINGS, *options.set)).config
    reporter = CpuReporter()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run_job(job, create_run(job, Path(folder) / "run"), reporter, resume=False))
    report_shares(reporter.rows[1:])


if __name__ == "__main__":
    main()
