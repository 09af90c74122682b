"""`turnwise import` stores saved captures as a run that can be read and credited, but not trained."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from shared_schemas.json_text import read_json
from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import Trajectory
from trainer_backend import job_parts
from trainer_backend.core.presets import PRESETS
from trainer_backend.credit.recredit import with_records
from trainer_backend.errors import RunDirectoryError
from trainer_backend.job.load import LoadedJob, parse_job
from trainer_backend.rundir.files import now
from trainer_backend.rundir.layout import RunDirectory, create_run
from trainer_backend.rundir.rollout_files import write_rollouts
from trainer_backend.rundir.state import RunState, write_state

ENV_NAME = "capture"
# The iteration of imported rollouts.
FIRST = 1


def job_of_captures(name: str, overrides: Sequence[str]) -> LoadedJob:
    """Return the default job of imported captures, with rewards by decision. Its model is never loaded."""
    values = {
        "job": {"name": name},
        "model": {"preset": next(iter(PRESETS))},
        "rollout": {"env_name": ENV_NAME},
        "training": {"step_rewards_enabled": True, "step_rewards_mode": "decision_stepwise"},
    }
    return parse_job(values, where="turnwise import", overrides=overrides)


def import_captures(files: Sequence[Path], job: LoadedJob, path: Path) -> RunDirectory:
    """Create a run of saved captures. A file is the JSON of GET /captures/{capture_id} or its `trajectory`.

    Captures with the same seed and the same first prompt become siblings of one group.

    Raises:
        RunDirectoryError: a file has no ended capture, or two have the same capture; nothing was written.
        CreditError: the job's rewards or estimator refuse a capture; nothing was written.
    """
    captures = [_read(file) for file in files]
    for number, file in enumerate(files):
        if (first := captures.index(captures[number])) < number:
            raise RunDirectoryError(f"{file} and {files[first]} hold the same capture")
    # Credit is computed before the run is created, since it may refuse captures. It ignores rollout ids.
    credits = job_parts.credit(job.config).credits(_rollouts(job.config.job.name, captures))
    run = create_run(job.config, path)
    run.mark_as_imported()
    write_rollouts(run.rollouts_file(f"iteration_{FIRST}"), _rollouts(run.run_id, captures), credits)
    write_state(run.path, RunState("ended", os.getpid(), FIRST, since=now()))
    return run


def _read(file: Path) -> Trajectory:
    try:
        value = read_json(file.read_bytes(), keeps_nul=True)
    except OSError as error:
        raise RunDirectoryError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RunDirectoryError(f"{file} holds no JSON: {error}") from error
    if isinstance(value, dict) and "trajectory" in value:
        if value["trajectory"] is None:
            raise RunDirectoryError(
                f"{file} holds a capture that is {value.get('status')!r} and has no trajectory; "
                "an open one has one after its /end, one without a call never"
            )
        value = value["trajectory"]
    try:
        return Trajectory.model_validate(value)
    except ValidationError as error:
        finding = error.errors(include_url=False)[0]
        place = ".".join(map(str, finding["loc"])) or "the whole"
        raise RunDirectoryError(
            f"{file} holds no capture: {place}: {finding['msg']}; it is the JSON of GET /captures/{{id}}"
        ) from error


def _rollouts(run_id: str, captures: Sequence[Trajectory]) -> list[Rollout]:
    starts = [
        (capture.seed, str(capture.steps[0].observation_data.messages) if capture.steps else "")
        for capture in captures
    ]
    numbers = {start: number for number, start in enumerate(dict.fromkeys(starts))}
    siblings: Counter[tuple[int, str]] = Counter()
    rollouts = []
    for start, capture in zip(starts, captures, strict=True):
        group_id, sibling = f"train/{FIRST}/{numbers[start]}", siblings[start]
        siblings[start] += 1
        rollout = Rollout(
            rollout_id=f"{run_id}/{group_id}/{sibling}", run_id=run_id, iteration=FIRST, group_id=group_id,
            sibling=sibling, attempt=0, instance_id="imported", status="finished", trajectory=capture,
        )  # fmt: skip
        rollouts.append(with_records(rollout))
    return rollouts
