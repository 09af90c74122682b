"""A run that is killed between any two writes, or whose disk is full at any of them, goes on as if not."""

import json
import multiprocessing
import random
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.trainer_backend.run.killed_run import ITERATIONS, locate, start
from tests.trainer_backend.rundir.disk import grow, mounted
from trainer_backend.rundir.checkpoint_paths import latest_checkpoint
from trainer_backend.rundir.layout import open_run
from trainer_backend.rundir.rollout_files import read_rollouts
from trainer_backend.rundir.spool import read_ledger
from trainer_backend.rundir.state import read_status

# A fork of a process that has imported everything and runs nothing: a start of the run takes milliseconds.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.trainer_backend.run.killed_run"])

PLANNED = [f"train/{{}}/{group}/{sibling}" for group in range(2) for sibling in range(2)]


def started(folder: Path, **arguments: Any) -> int | None:
    """A start of the run in a process of its own; its exit code."""
    process = PROCESSES.Process(target=start, args=(folder,), kwargs=arguments)
    process.start()
    process.join()
    return process.exitcode


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    assert started(folder) == 0
    return folder


def read_weights(folder: Path) -> str:
    latest = latest_checkpoint(folder / "run" / "checkpoints")
    assert latest is not None and latest.name == f"iteration_{ITERATIONS}"
    found: str = json.loads((latest / "weights.json").read_text())
    return found


def looks_unbroken(folder: Path, whole: Path) -> None:
    run, other = open_run(folder / "run"), open_run(whole / "run")
    assert read_weights(folder) == read_weights(whole)
    rows = [(row["kind"], row["iteration"]) for row in run.metrics()]
    assert rows == [(row["kind"], row["iteration"]) for row in other.metrics()]
    every_id = Counter(locate(name) for line in read_ledger(run.path) for name in line.rollout_ids)
    assert set(every_id.values()) == {1}
    assert [line.iteration for line in read_ledger(run.path)] == list(range(1, ITERATIONS + 1))
    for line in read_ledger(run.path):
        planned = [path.format(line.iteration) for path in PLANNED]
        assert sorted(map(locate, line.rollout_ids)) == planned
        stored = read_rollouts(run.rollouts_file(f"iteration_{line.iteration}"))
        assert sorted(item.rollout_id for item in stored) == sorted(line.rollout_ids)
    told = Counter((folder / "told.txt").read_text().splitlines())
    again = [line for line, times in told.items() if line.startswith("kept") and times > 1]
    assert not again, "what was kept is not collected again"
    assert not list(run.rollouts.glob("iteration_*.jsonl")), "no spool is left behind, none was set aside"
    assert read_status(run.path).state.state == "ended"


def test_killed_just_before_any_write_and_started_again_it_ends_with_the_same_weights(unbroken, tmp_path):
    writes = int((unbroken / "writes.txt").read_text())
    assert writes > 50
    for number in range(0, writes, 5):  # all of them were tried once; a fifth finds what breaks the order
        folder = tmp_path / str(number)
        folder.mkdir()
        assert started(folder, kill_at=number) == -signal.SIGKILL
        seen = read_status(folder / "run")
        assert seen.holder is None and (seen.state is None or seen.interrupted)
        assert started(folder) == 0
        looks_unbroken(folder, unbroken)
        shutil.rmtree(folder)


def test_killed_again_and_again_it_ends_with_the_same_weights(unbroken: Path, tmp_path: Path):
    draws = random.Random(0)
    while started(tmp_path, kill_at=draws.randrange(5, 40)) != 0:
        assert read_status(tmp_path / "run").interrupted
    looks_unbroken(tmp_path, unbroken)


def test_on_a_disk_that_is_full_at_any_moment_it_ends_and_goes_on_when_there_is_room(unbroken, tmp_path):
    filled = 0
    for kilobytes in range(20, 200, 20):
        with mounted(tmp_path / "disk", kilobytes=kilobytes) as disk:
            if started(disk) == 0:
                looks_unbroken(disk, unbroken)
                break
            filled += 1
            grow(disk, kilobytes=10_000)
            assert started(disk) == 0
            looks_unbroken(disk, unbroken)
    assert filled > 3
