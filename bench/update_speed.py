"""Compares the time of an update of this tree and of another one, with the same episodes and weights.

    python -m bench.update_speed [--against ../other/tree] [--rounds 7] [--run RUN]

configs/crafter_cpu.toml plays an iteration (bench/played_iteration.py), unless RUN has one. A process for
each tree then reads the checkpoint and the rollouts, and repeats the update of policy and critic from the
same weights. The trees take turns. The script prints medians and ranges of CPU seconds, wall seconds, and the
ratio of a round (other / this). Without another tree, only this tree is timed.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench import kit
from trainer_backend import job_parts, learner_parts
from trainer_backend.credit.recredit import stored_iterations, stored_measured
from trainer_backend.job.load import load_job
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.rundir.layout import open_run


def make_update(run: Path) -> Callable[[], dict[str, float]]:
    """Return a function that repeats the update of a played iteration, each time on a new learner."""
    directory = open_run(run)
    job = load_job(run / "job.toml").config
    (rollouts,), (measured,) = stored_iterations(directory, (1,)), stored_measured(directory, (1,))
    episodes = job_parts.credit(job).credit(rollouts, measured).episodes
    config, checkpoint = learner_parts.learner_config(job), directory.checkpoints / "iteration_0"

    def update() -> dict[str, float]:
        learner, _ = LocalLearner.resumed(config, checkpoint)
        cpu_s, clock_s = time.process_time(), time.perf_counter()
        metrics = learner.update(episodes, iteration=1)
        return {**metrics, "cpu_s": time.process_time() - cpu_s, "clock_s": time.perf_counter() - clock_s}

    return update


def work(run: Path) -> None:
    """Be a tree's worker: for each line of stdin, make an update and print its seconds."""
    update = make_update(run)
    for _ in sys.stdin:
        metrics = update()
        print("answer", json.dumps({name: metrics[name] for name in ("cpu_s", "clock_s")}), flush=True)


def compared(run: Path, against: Path | None, rounds: int) -> None:
    work = ("--work", str(run))
    sides = {"this": kit.Side(kit.ROOT, work)}
    if against is not None:
        sides["other"] = kit.Side(against.resolve(), work)
    rows = kit.compare_sides(__file__, sides, rounds)
    for what in ("cpu", "clock"):
        columns = {name: [row[f"{what}_s"] for row in found] for name, found in rows.items()}
        for name, values in columns.items():
            print(f"{name:5s} {what:5s} {kit.spread(values)} s")
        if "other" in columns:
            ratios = [other / this for this, other in zip(columns["this"], columns["other"], strict=True)]
            print(f"ratio {what:5s} x{kit.spread(ratios)}, {rounds} rounds in turns")


def main() -> int:
    options = kit.options(
        __doc__,
        ("--against", Path, "the root of another tree"),
        ("--rounds", 7),
        ("--run", Path, "a run that bench.played_iteration has played"),
        ("--work", Path, "used by the script itself"),
    )
    if options.work is not None:
        work(options.work)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        run = options.run
        if run is None:
            from bench.played_iteration import played_in

            run = Path(folder) / "run"
            played_in(run)
        compared(run.resolve(), options.against, options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
