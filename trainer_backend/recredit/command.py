"""`turnwise recredit`: from a run directory to tables and files."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group

from trainer_backend.credit import CreditAssignment
from trainer_backend.plugins import ESTIMATORS, estimator
from trainer_backend.recredit.estimators import (
    recredited,
    stored_iterations,
    stored_measured,
)
from trainer_backend.recredit.table import recredit_tables
from trainer_backend.recredit.write import write_recredit
from trainer_backend.rundir.layout import open_run


def recredit_run(
    path: Path,
    names: Sequence[str],
    iterations: Sequence[int],
    checkpoint: Path | None,
    out: Path | None,
    overrides: Sequence[str],
) -> tuple[Group, Path]:
    """Tables, and the folder that was written.

    Raises:
        JobError: an unknown estimator, or an override that does not fit.
        RunDirectoryError: no run, nothing stored, or a disk that refuses.
        RewardError: r_t cannot be built from what is stored.
    """
    run = open_run(path)
    job = run.changed_job(overrides).config
    for name in names:
        estimator(name)
    stored = stored_iterations(run, iterations)
    found = recredited(
        CreditAssignment.of(job), stored, names or list(ESTIMATORS), stored_measured(run, iterations)
    )
    cosines = None
    if checkpoint is not None:
        from trainer_backend.learner.gradients import gradient_cosines  # torch

        cosines = gradient_cosines(job, found.rollouts, found.credits, checkpoint)
    folder = out or run.path / "recredit"
    write_recredit(found, folder, cosines)
    return recredit_tables(found, cosines), folder
