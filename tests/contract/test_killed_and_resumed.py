"""kill -9, and then --resume: real processes, real model, a task app that dies, a directory that is taken."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import ListReporter, decisions_by_turn, rows_of, tiny_job, train_job
from tests.trainer_backend.rundir.disk import make_read_only, mounted
from trainer_backend.errors import RunDirectoryError, RunNotWritten, TaskAppError
from trainer_backend.job.load import dump_job
from trainer_backend.rundir.layout import RunDirectory, create_run, open_run
from trainer_backend.rundir.lock import run_lock
from trainer_backend.rundir.rollout_files import read_rollouts
from trainer_backend.rundir.spool import LEDGER_FILE, read_ledger
from trainer_backend.rundir.state import STATE_FILE, read_state, read_status
from trainer_backend.start import run_job

# Two of everything: threads of an update, its steps, siblings; and dropout, which draws.
EXACT: dict[str, Any] = {
    "inference__deterministic": True,
    "training__iterations": 3,
    "training__group_size": 2,
    "training__threads": 2,
    "training__batch_decisions": 4,
    "training__checkpoint_every": 3,
    "rollout__episodes_per_batch": 4,
    "rollout__max_turns": 2,
    "warmup__episodes": 4,
    "warmup__epochs": 1,
    "evaluation__instances": 1,
    "evaluation__every_n_iters": 3,
    "lora__rank": 2,
    "lora__dropout": 0.1,
}
FORKED: dict[str, Any] = {
    "algorithm__train_branches": True,
    "algorithm__branches_per_episode": 2,
    "algorithm__fork_rule": "surprise",
    "rollout__max_turns": 4,
}


def exact_job(**overrides: Any):
    return tiny_job(**EXACT | overrides)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return train_job(exact_job(**FORKED), tmp_path_factory.mktemp("unbroken") / "run")[0]


def killed(folder: Path, *, part: str, number: int) -> RunDirectory:
    """A run of the job that was killed when it was about to write, see `tests.killed_turnwise`."""
    (folder / "job.toml").write_text(dump_job(exact_job(**FORKED)))
    command = [sys.executable, "-m", "tests.killed_turnwise", part, str(number)]
    command += ["train", str(folder / "job.toml"), "--run", str(folder / "run")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    run = open_run(folder / "run")
    assert read_status(run.path).interrupted
    return run


def plan_of(run: RunDirectory, iteration: int) -> list[tuple[Any, ...]]:
    stored = read_rollouts(run.rollouts_file(f"iteration_{iteration}"))
    return [
        (item.group_id, item.sibling, item.trajectory.seed, item.trajectory.steps[0].sampling.seed)
        for item in stored
        if item.trajectory is not None and item.trajectory.steps[0].sampling is not None
    ]


def actions_of(run: RunDirectory, iteration: int) -> list[tuple[str, ...]]:
    stored = read_rollouts(run.rollouts_file(f"iteration_{iteration}"))
    return [
        step.step_info.executed_actions
        for item in stored
        if item.trajectory
        for step in item.trajectory.steps
    ]


def advantages_of(run: RunDirectory, iteration: int) -> dict[tuple[Any, ...], float]:
    """Of the decisions of an iteration's continuations."""
    found = decisions_by_turn(run.rollouts_file(f"branches_{iteration}"))
    return {(path.partition("/")[2], turn): item["advantage"] for (path, turn), item in found.items()}


def learned_from(run: RunDirectory) -> list[tuple[int, list[str]]]:
    """The iterations of the ledger, each with the paths of its rollouts."""
    return [
        (line.iteration, sorted(name.partition("/")[2] for name in line.rollout_ids))
        for line in read_ledger(run.path)
    ]


def assert_equal_runs(run: RunDirectory, whole: RunDirectory, weights: str = "model.safetensors") -> None:
    """Plans, actions, advantages of continuations, ledger, and the last checkpoint bit for bit."""
    assert learned_from(run) == learned_from(whole)
    iterations = [iteration for iteration, _ in learned_from(whole)]
    for iteration in iterations:
        assert plan_of(run, iteration) == plan_of(whole, iteration)
        assert actions_of(run, iteration) == actions_of(whole, iteration)
        assert advantages_of(run, iteration) == advantages_of(whole, iteration) != {}
    for name in (weights, "training_state/optimizer.safetensors", "training_state/rng.safetensors"):
        ours, expected = (
            load_file(item.checkpoints / f"iteration_{iterations[-1]}" / name) for item in (run, whole)
        )
        assert ours.keys() == expected.keys()
        assert all(torch.equal(ours[key], expected[key]) for key in expected), name


class KillsTheTaskApp(ListReporter):
    """When the first rollouts of iteration 3 have come."""

    def stage(self, name: str, done: int, total: int) -> None:
        if name == "collect 3" and 1 <= done < total and not self.stages:
            self.stages.append((name, done, total))
            children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
            # Other tests of this process have children too; the run's own is the youngest task app.
            *_, child = [pid for pid in children if b"task_app" in Path(f"/proc/{pid}/cmdline").read_bytes()]
            os.kill(int(child), signal.SIGKILL)


@pytest.mark.timeout(480)
def test_a_kill_amid_forks_and_then_of_the_task_app_change_no_bit_of_three_iterations(
    unbroken: RunDirectory, tmp_path: Path
):
    # Four whole episodes are kept first, so this is the second continuation.
    run = killed(tmp_path, part="rollouts/iteration_2.spool.jsonl", number=6)
    # The engine from now on loads its weights from folders, and samples the same.
    job, reporter = exact_job(**FORKED, weight_transfer__backend="folder"), KillsTheTaskApp()
    with pytest.raises(TaskAppError, match="no task app answers"):
        asyncio.run(run_job(job, run, reporter, resume=True))
    assert f"resumed from {run.checkpoints}/iteration_1" in reporter.lines
    state = read_state(run.path)
    assert state is not None
    assert (state.state, state.code, state.iteration) == ("failed", "task_app_lost", 2)
    assert "no task app answers" in state.detail
    ((_, done, _),) = reporter.stages
    resumed, _, progress = train_job(job, run.path, resume=run)
    assert sorted(path.name for path in run.weights.iterdir()) == ["version_2", "version_3"]
    assert progress.iteration == 3
    rows = rows_of(resumed, "iteration")
    assert [row["iteration"] for row in rows] == [1, 2, 3]
    assert [row["recovery/resumes"] for row in rows] == [0.0, 1.0, 2.0]
    none, some, rest = (row["recovery/rollouts_reused"] for row in rows)
    assert none == 0.0 and some >= 5.0 and rest >= done
    assert_equal_runs(resumed, unbroken, "adapter/adapter_model.safetensors")
    names = [name for line in read_ledger(resumed.path) for name in line.rollout_ids]
    assert len(names) == len(set(names)) > 12
    kept = [path.name for path in sorted(resumed.checkpoints.glob("iteration_*"))]
    assert kept == ["iteration_0", "iteration_3"]  # 1 and 2 were the newest, once


def test_a_second_trainer_on_a_run_directory_is_refused_and_changes_nothing_in_it(tmp_path: Path):
    run, reporter = create_run(tiny_job(), tmp_path / "run"), ListReporter()

    def files() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}

    with run_lock(run.path):
        before = files()
        with pytest.raises(RunDirectoryError, match=f"being trained by process {os.getpid()} on "):
            asyncio.run(run_job(tiny_job(), run, reporter, resume=True))
        assert files() == before
    assert reporter.lines == []


def test_a_run_directory_that_cannot_be_written_is_told_before_anything_is_started(tmp_path: Path):
    with mounted(tmp_path / "disk", kilobytes=500) as disk:
        run, reporter = create_run(tiny_job(), disk / "run"), ListReporter()
        make_read_only(disk)
        with pytest.raises(RunNotWritten, match=r"run/lock cannot be written: .*Read-only file system"):
            asyncio.run(run_job(tiny_job(), run, reporter, resume=False))
    assert reporter.lines == []


@pytest.mark.timeout(120)
def test_a_run_of_a_version_without_lock_state_log_and_ledger_goes_on(unbroken: RunDirectory, tmp_path: Path):
    shutil.copytree(unbroken.path, tmp_path / "run")
    run = open_run(tmp_path / "run")
    for name in ("lock", STATE_FILE, "run.log", LEDGER_FILE):
        (run.path / name).unlink()
    resumed, _, progress = train_job(exact_job(**FORKED, training__iterations=4), run.path, resume=run)
    assert progress.iteration == 4
    assert [line.iteration for line in read_ledger(resumed.path)] == [4]
    assert [row["iteration"] for row in rows_of(resumed, "iteration")] == [1, 2, 3, 4]
    state = read_state(run.path)
    assert state is not None and (state.state, state.starts) == ("ended", 1)
