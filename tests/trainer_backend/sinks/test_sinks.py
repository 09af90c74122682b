"""Sinks of metrics: what they get, what TensorBoard reads back, and that none of them can end a run."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import ListReporter, tiny_job
from trainer_backend import plugins
from trainer_backend.errors import JobError
from trainer_backend.job.load import load_job
from trainer_backend.run.reporters import SinkReporter
from trainer_backend.rundir.layout import RunDirectory, create_run, open_run
from trainer_backend.rundir.new_job import load_new_job
from trainer_backend.sinks import SinksTable, refuse_missing_libraries, scalars

WARMUP = {"kind": "warmup", "iteration": 0, "warmup/loss": 1.5}
FIRST = {"kind": "iteration", "iteration": 1, "loss/entropy": 2.0, "decision/unique_by_turn": [0.5, 0.25]}
EVALUATION = {
    "kind": "evaluation",
    "iteration": 1,
    "eval/unique_achievements": 3.0,
    "eval/success_rates": {"collect_wood": 0.75},
    "eval/outcome_reward_low": None,
    "rollout/finished": 4.0,
}
SECOND = {"kind": "iteration", "iteration": 2, "loss/entropy": 1.0}


def test_a_row_becomes_the_numbers_that_a_curve_can_be_drawn_of():
    assert scalars(WARMUP) == {"warmup/loss": 1.5}
    assert scalars(FIRST) == {"loss/entropy": 2.0}
    assert scalars(EVALUATION) == {
        "eval/unique_achievements": 3.0,
        "eval/success_rates/collect_wood": 0.75,
        "eval/rollout/finished": 4.0,
    }
    assert scalars({**FIRST, "loss/entropy": float("nan")}) == {}
    assert scalars({**SECOND, "timeline/learn_end": 1.8e9}) == {"loss/entropy": 1.0}  # a time of day


def opened(job: Any, directory: RunDirectory, reporter: ListReporter, **boards: Any) -> SinkReporter:
    values = job.model_dump(mode="json", exclude={"services": {"task_api_key"}})
    return SinkReporter(job.sinks, directory, reporter, job=values, **boards)


def written(directory: RunDirectory, rows: list[dict[str, Any]], job: Any) -> ListReporter:
    """One start of a run: each row is written to metrics.jsonl and then told, as `train` does."""
    reporter = ListReporter()
    with opened(job, directory, reporter) as sinks:
        for row in rows:
            directory.append_metrics(row)
            if row["kind"] != "warmup":  # the start of a run writes it, and shows it nowhere
                sinks.metrics(row, "")
        sinks.say("done")
        sinks.stage("collect", 1, 2)
    assert (reporter.lines, reporter.stages) == (["done"], [("collect", 1, 2)])
    return reporter


def read_back(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def test_tensorboard_reads_back_what_was_written_by_iteration(tmp_path: Path):
    job = tiny_job(sinks__tensorboard=True)
    directory = create_run(job, tmp_path / "run")
    reporter = written(directory, [WARMUP, FIRST, EVALUATION, SECOND], job)
    assert reporter.rows == [FIRST, EVALUATION, SECOND]
    assert read_back(directory.path / "tensorboard") == {
        "warmup/loss": [(0, 1.5)],
        "loss/entropy": [(1, 2.0), (2, 1.0)],
        "eval/unique_achievements": [(1, 3.0)],
        "eval/success_rates/collect_wood": [(1, 0.75)],
        "eval/rollout/finished": [(1, 4.0)],
    }


def test_an_iteration_that_a_resumed_run_does_again_is_there_once(tmp_path: Path):
    job = tiny_job(sinks__tensorboard=True)
    directory = create_run(job, tmp_path / "run")
    written(directory, [FIRST, SECOND], job)
    directory.forget_after(1)
    written(directory, [{**SECOND, "loss/entropy": 0.5}], job)
    assert read_back(directory.path / "tensorboard") == {"loss/entropy": [(1, 2.0), (2, 0.5)]}


class Breaking:
    """Takes one row, then fails."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.rows: list[Mapping[str, Any]] = []
        self.closed = 0

    def write(self, row: Mapping[str, Any]) -> None:
        if self.rows:
            raise self.error
        self.rows.append(row)

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConnectionError("the network is gone\nand more"), "ConnectionError: the network is gone"),
        (SystemExit(3), "SystemExit: 3"),
    ],
)
def test_a_sink_that_fails_is_told_once_and_dropped_and_the_others_go_on(tmp_path: Path, error, told):
    breaking = Breaking(error)
    board = {**plugins.SINKS, "wandb": lambda keys, run: {"p": breaking}[keys.project]}
    job = tiny_job(sinks__tensorboard=True, sinks__wandb={"project": "p"})
    directory = create_run(job, tmp_path / "run")
    reporter = ListReporter()
    with opened(job, directory, reporter, board=board) as sinks:
        for row in (FIRST, SECOND, {**SECOND, "iteration": 3}):
            directory.append_metrics(row)
            sinks.metrics(row, "")
    (line,) = reporter.lines
    assert line.startswith(f"sinks.wandb raised {told} (test_sinks.py:")
    assert line.endswith("); it gets no further rows")
    assert (breaking.rows, breaking.closed) == ([FIRST], 0)
    assert len(read_back(directory.path / "tensorboard")["loss/entropy"]) == 3


def test_a_sink_that_cannot_be_opened_is_an_error_at_once(tmp_path: Path):
    job = tiny_job(sinks__tensorboard=True)
    directory = create_run(job, tmp_path / "run")
    (directory.path / "tensorboard").write_text("a file where the folder belongs")
    with (
        pytest.raises(JobError, match=r"^sinks\.tensorboard cannot be opened: it raised FileExistsError"),
        opened(job, directory, ListReporter()),
    ):
        raise AssertionError("entered")


def test_a_missing_library_is_told_with_what_to_install():
    def none(package: str) -> bool:
        return False

    refuse_missing_libraries(SinksTable(), installed=none)
    told = r"needs the package tensorboard, which is not installed: pip install 'turnwise\[tensorboard\]'"
    with pytest.raises(JobError, match=told):
        refuse_missing_libraries(SinksTable(tensorboard=True), installed=none)


@pytest.mark.skipif(find_spec("wandb"), reason="wandb is installed")
def test_a_new_job_is_not_begun_without_the_library_of_its_sink(tmp_path: Path):
    path = tmp_path / "job.toml"
    path.write_text('[model]\npreset = "tiny-0.3m"\n[sinks]\nwandb = { project = "p" }\n')
    assert load_job(path).config.sinks.wandb is not None  # a stored job is read without it
    with pytest.raises(JobError, match="needs the package wandb"):
        load_new_job(path)


def test_every_key_of_the_table_has_its_sink_and_its_extra():
    assert set(plugins.SINKS) == set(SinksTable.model_fields)
    extras = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert all(f'\n{name} = ["{name}>=' in extras for name in plugins.SINKS)


def printed_by(function: Callable[[str], None], path: Path, **environment: str) -> str:
    """What it prints in a process of its own: the libraries leave threads behind, which would outlive it."""
    code = f"from tests.trainer_backend.sinks.test_sinks import *; {function.__name__}({str(path)!r})"
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRACKIO_")}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**env, **environment}, cwd=Path(__file__).parents[3],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not find_spec("wandb"), reason="wandb is not installed")
def test_wandb_keeps_an_offline_run(tmp_path: Path):
    job = tiny_job(sinks__wandb={"project": "turnwise-test", "mode": "offline"})
    directory = create_run(job, tmp_path / "run")
    printed_by(to_wandb, directory.path)
    (stored,) = (directory.path / "wandb").glob("offline-run-*/*.wandb")
    held = stored.read_bytes()
    assert directory.run_id.encode() in held
    assert b"eval/success_rates/collect_wood" in held


def to_wandb(path: str) -> None:
    """The child process of the test above."""
    directory = open_run(Path(path))
    written(directory, [FIRST, EVALUATION, SECOND], directory.job())


@pytest.mark.skipif(not find_spec("trackio"), reason="trackio is not installed")
def test_trackio_holds_each_row_once_also_of_a_resumed_run(tmp_path: Path):
    job = tiny_job(sinks__trackio={"project": "turnwise-test"})
    path = create_run(job, tmp_path / "run").path
    told = printed_by(to_trackio, path, TRACKIO_DIR=str(tmp_path / "kept"))  # it is read at the import
    assert json.loads(told.splitlines()[0]) == [  # at its exit trackio prints a line of its own
        {"run": "run", "loss/entropy": [[1, 2.0], [2, 0.5]], "eval/success_rates/collect_wood": [[1, 0.75]]},
        {"run": "run", "loss/entropy": [[7, 1.0]], "eval/success_rates/collect_wood": []},
    ]


def to_trackio(path: str) -> None:
    """The child process of the test above: a run, another of the same name, and the first one resumed."""
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    directory = open_run(Path(path))
    other = create_run(directory.job(), directory.path.parent / "other/run")
    written(directory, [FIRST, EVALUATION, SECOND], directory.job())
    written(other, [{**SECOND, "iteration": 7}], directory.job())
    directory.forget_after(1)
    written(directory, [{**SECOND, "loss/entropy": 0.5}], directory.job())
    kept = [
        (run.name, SQLiteStorage.get_logs("turnwise-test", run.name, run_id=run.id))
        for run in trackio.Api().runs("turnwise-test")
    ]
    print(
        json.dumps([_curves(name, rows) for name, rows in sorted(kept, key=lambda item: len(item[1]))[::-1]])
    )


def _curves(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    tags = ("loss/entropy", "eval/success_rates/collect_wood")
    return {"run": name} | {tag: [[row["step"], row[tag]] for row in rows if tag in row] for tag in tags}
