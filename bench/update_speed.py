"""CPU time of an update at the demo's shape, of this tree beside another one: the same episodes and weights.

    python -m bench.update_speed --against ../other/tree [--rounds 7] [--run RUN] [--profile]

The demo's job plays an iteration (bench/demo_iteration.py), or RUN holds it already. Then a process for each
tree takes its checkpoint and its rollouts and makes the update, from the same weights each time, in turns
with the other one. Printed are the medians of CPU seconds, the median of the ratios of two that follow each
other, and their spread. Without --against this tree is timed alone. --profile adds where its time goes.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench import kit
from trainer_backend.credit.credit import NOTHING, CreditAssignment
from trainer_backend.job.load import load_job
from trainer_backend.learner.config import LearnerConfig
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.rundir.layout import open_run
from trainer_backend.rundir.rollout_files import read_rollouts


def update_of(run: Path) -> Callable[[], dict[str, float]]:
    """The update of a played iteration: each call makes it anew, on a learner of its own."""
    directory = open_run(run)
    job = load_job(run / "job.toml").config
    episodes = (
        CreditAssignment.of(job)
        .credit(read_rollouts(directory.rollouts_file("iteration_1")), NOTHING)
        .episodes
    )
    config, checkpoint = LearnerConfig.of(job), directory.checkpoints / "iteration_0"

    def update() -> dict[str, float]:
        learner, _ = LocalLearner.resumed(config, checkpoint)
        began_s = time.process_time()
        metrics = learner.update(episodes, iteration=1)
        return {**metrics, "cpu_s": time.process_time() - began_s}

    return update


def work(run: Path) -> None:
    """In a process of a tree: an update for each line of stdin, a line with its seconds for each."""
    update = update_of(run)
    for _ in sys.stdin:
        metrics = update()
        print(metrics["cpu_s"], metrics["optim/steps"], flush=True)


@contextmanager
def timed(tree: Path, run: Path) -> Iterator[Callable[[], float]]:
    """CPU seconds of one update by a tree's code, for each call."""
    environ = {**os.environ, "PYTHONPATH": str(tree), "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, str(Path(__file__).resolve()), "--work", str(run)]
    process = subprocess.Popen(
        command, cwd=tree, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None, "both are pipes"

    def once() -> float:
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        print(file=process.stdin, flush=True)
        return float(process.stdout.readline().split()[0])

    try:
        yield once
    finally:
        process.stdin.close()
        process.wait()


def profiled(run: Path) -> str:
    """Where the CPU time of an update goes, by operator."""
    from torch.profiler import ProfilerActivity, profile

    update = update_of(run)
    update()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        update()
    return str(
        profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=40, max_name_column_width=50)
    )


def compared(run: Path, against: Path | None, rounds: int) -> None:
    with ExitStack() as stack:
        trees = {"this": kit.ROOT} | ({} if against is None else {"other": against.resolve()})
        sides = {name: stack.enter_context(timed(tree, run)) for name, tree in trees.items()}
        times: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(rounds + 1):
            for name, once in sides.items():
                seconds = once()
                if number:  # the first has warmed up
                    times[name].append(seconds)
        for name, values in times.items():
            print(f"{name:5s} cpu {statistics.median(values):.2f} s ({min(values):.2f} to {max(values):.2f})")
        if against is not None:
            ratios = [other / this for this, other in zip(times["this"], times["other"], strict=True)]
            print(
                f"ratio x{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), "
                f"{rounds} rounds in turns"
            )


def main() -> int:
    options = kit.options(
        __doc__,
        ("--against", Path, "the root of another tree"),
        ("--rounds", 7),
        ("--run", Path, "a run that bench.demo_iteration has played"),
        ("--profile", False, "where the time of this tree goes"),
        ("--work", Path, "used by the script itself"),
    )
    if options.work is not None:
        work(options.work)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        run = options.run
        if run is None:
            from bench.demo_iteration import played_in

            run = Path(folder) / "run"
            played_in(run)
        compared(run.resolve(), options.against, options.rounds)
        if options.profile:
            print(profiled(run))
    return 0


if __name__ == "__main__":
    sys.exit(main())
