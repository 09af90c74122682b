"""What is on the disk when a file gets its name: a power cut must find it whole, or not at all."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import tiny_job
from tests.trainer_backend.pages.hand_made import FIRST
from tests.trainer_backend.rundir.disk import full_disk
from trainer_backend.errors import RunNotWritten
from trainer_backend.rundir.checkpoint_paths import BestMark, mark_best
from trainer_backend.rundir.files import append_line, replace_lines
from trainer_backend.rundir.fixed_record import RemoteModel, begin_record
from trainer_backend.rundir.layout import RunDirectory, create_run
from trainer_backend.rundir.rollout_files import write_rollouts
from trainer_backend.rundir.spool import LedgerEntry, append_to_ledger


class Disk:
    """What was told to be on the disk, in order: `flush NAME`, `rename NAME to NAME`; `.` is the folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.heard = folder, list[str]()
        fsync, replace = os.fsync, os.replace

        def flushed(descriptor: int) -> None:
            fsync(descriptor)
            self.heard.append(f"flush {self._name(os.readlink(f'/proc/self/fd/{descriptor}'))}")

        def renamed(old: Path, new: Path) -> None:
            self.heard.append(f"rename {self._name(old)} to {self._name(new)}")
            replace(old, new)

        monkeypatch.setattr(os, "fsync", flushed)  # the disk itself has no seam
        monkeypatch.setattr(os, "replace", renamed)

    def _name(self, path: str | Path) -> str:
        return os.path.relpath(path, self.folder)


def whole(name: str) -> list[str]:
    """A file that is on the disk before it has its name, and its name afterwards."""
    folder, _, last = name.rpartition("/")
    aside = f"{folder}/.{last}.tmp" if folder else f".{last}.tmp"
    return [f"flush {aside}", f"rename {aside} to {name}", f"flush {folder or '.'}"]


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (lambda run, n: run.replace_job(tiny_job(training__iterations=n)), "job.toml"),
        (lambda run, n: run.forget_after(2 - n), "metrics.jsonl"),
        (lambda run, n: write_rollouts(run.rollouts_file("warmup"), FIRST[:n]), "rollouts/warmup.parquet"),
        (lambda run, n: mark_best(BestMark(run.checkpoints / "iteration_1", n)), "checkpoints/best.json"),
        (lambda run, n: begin_record(run, {"a": RemoteModel(str(n), "http://x")}), "fixed_policies.json"),
    ],
)
def test_a_file_is_whole_on_the_disk_before_it_has_its_name_and_a_full_disk_leaves_the_one_before(
    run: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[RunDirectory, int], None],
    name: str,
):
    for iteration in range(3):
        run.append_metrics({"kind": "iteration", "iteration": iteration})
    write(run, 1)
    before = (run.path / name).read_bytes()
    with full_disk(), pytest.raises(RunNotWritten, match=f"{name} cannot be written"):
        write(run, 2)
    assert (run.path / name).read_bytes() == before
    disk = Disk(run.path, monkeypatch)
    write(run, 2)
    assert disk.heard == whole(name)
    assert (run.path / name).read_bytes() != before


def test_a_run_that_is_made_is_on_the_disk_with_all_that_makes_it_one(tmp_path, monkeypatch):
    disk = Disk(tmp_path / "run", monkeypatch)
    create_run(tiny_job(), tmp_path / "run")
    assert disk.heard == [*whole("job.toml"), *whole("run.json"), "flush .."]


def test_a_resume_with_nothing_to_forget_writes_no_file_again(run, monkeypatch):
    run.append_metrics({"kind": "iteration", "iteration": 1})
    append_to_ledger(run.path, LedgerEntry(1, 1, ("a",)))
    disk = Disk(run.path, monkeypatch)
    run.go_back_to(1, print)
    assert disk.heard == []


def test_the_first_line_of_a_file_is_on_the_disk_with_its_name(tmp_path, monkeypatch):
    disk = Disk(tmp_path, monkeypatch)
    for number in range(2):
        append_line(tmp_path / "a.jsonl", {"n": number}, durable=True)
    append_line(tmp_path / "b.jsonl", {"n": 0}, durable=False)
    replace_lines(tmp_path / "b.jsonl", [], durable=False)
    assert disk.heard == ["flush a.jsonl", "flush .", "flush a.jsonl", "rename .b.jsonl.tmp to b.jsonl"]
