"""Which runs `turnwise train` is to make or to continue: one, or with `--seeds 0,1,2` one a seed, in turn."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from trainer_backend.errors import JobError
from trainer_backend.job import LoadedJob, dump_job, load_new_job
from trainer_backend.rundir.layout import RunDirectory, create_run, open_run
from trainer_backend.sinks.sink import refuse_missing

Paths = Sequence[Path]


class Planned(NamedTuple):
    """A run that is to begin, or to go on."""

    loaded: LoadedJob
    directory: RunDirectory
    resume: bool

    @property
    def folder(self) -> Path:
        """Where it lies among others: the job's runs_dir, or else what it lies in."""
        path, runs = self.directory.path.resolve(), self.loaded.config.job.runs_dir.resolve()
        return runs if path.is_relative_to(runs) else path.parent


def single_run(job: Paths | None, run: Path | None, resume: Path | None, overrides: Sequence[str]) -> Planned:
    """A new run of a job, or one that exists; `start.run_job` writes down what that one goes on with.

    Raises:
        JobError: not one of the two; or what `load_new_job` and `changed_job` raise.
        RunDirectoryError: the directory cannot be made, or holds no run.
    """
    if bool(job) == (resume is not None):
        raise JobError("give either a job TOML, or --resume with a run directory")
    if job:
        loaded = load_new_job(job, overrides)
        return Planned(loaded, create_run(loaded.config, run), resume=False)
    assert resume is not None, "one of the two is given"
    if run is not None:
        raise JobError(f"--run {run} makes a new run, but --resume {resume} continues one: leave --run out")
    directory = open_run(resume)
    loaded = directory.changed_job(overrides)
    refuse_missing(loaded.config.sinks)
    return Planned(loaded, directory, resume=True)


def run_of_each_seed(
    job: Paths | None, run: Path | None, resume: Path | None, overrides: Sequence[str], *, seeds: str
) -> Iterator[Planned]:
    """The job under every seed, in FOLDER/seed_N; those that are not finished yet, each when it is its turn.

    FOLDER is `run`, or runs_dir/NAME-seeds: the same every time, so that the same command goes on.

    Raises:
        JobError: no job, or no seeds; a folder holds a run of another job; what `load_new_job` raises.
    """
    if not job or resume is not None:
        raise JobError("--seeds needs a job TOML and no --resume: the same command again goes on by itself")
    for seed in _seeds_of(seeds):
        loaded = load_new_job(job, [*overrides, f"job.seed={seed}"])
        table = loaded.config.job
        path = (run or table.runs_dir / f"{table.name}-seeds") / f"seed_{seed}"
        if not (path / "run.json").exists():
            yield Planned(loaded, create_run(loaded.config, path), resume=False)
            continue
        directory = open_run(path)
        if dump_job(directory.job()) != dump_job(loaded.config):
            raise JobError(
                f"{path} holds a run of another job (compare its job.toml): choose another folder with "
                f"--run, or continue it with turnwise train --resume {path}"
            )
        if not _finished(directory):
            yield Planned(loaded, directory, resume=True)


def _seeds_of(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise JobError(f"--seeds {text!r}: expected whole numbers from 0, such as 0,1,2")
    seeds = [int(word) for word in words]
    if len(set(seeds)) < len(seeds):
        raise JobError(f"--seeds {text!r}: a seed comes twice")
    return seeds


def _finished(directory: RunDirectory) -> bool:
    """The evaluation after the last iteration is the last thing that a run does."""
    last = directory.job().training.iterations
    return any(row["kind"] == "evaluation" and row["iteration"] == last for row in directory.metrics())
