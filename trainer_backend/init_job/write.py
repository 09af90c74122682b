"""`turnwise init [FILE]`: a job to begin with. It asks nothing and overwrites nothing."""

from pathlib import Path

import tomli

from trainer_backend.errors import JobError
from trainer_backend.init_job.choices import Choices
from trainer_backend.init_job.text import job_text
from trainer_backend.job import LoadedJob, parse_job
from trainer_backend.rundir.boundary import writing


def write_job(path: Path, choices: Choices) -> LoadedJob:
    """Write the job that was chosen, and give it back as it loads.

    Raises:
        JobError: the file is there already, or what was chosen makes no job; then nothing is written.
        RunDirectoryError: it cannot be written.
    """
    text = job_text(choices.values())
    loaded = parse_job(tomli.loads(text), where="turnwise init")
    with writing(path):
        try:
            file = path.open("x", encoding="utf-8")
        except FileExistsError as error:
            raise JobError(f"turnwise init: {path} is there already; nothing was written") from error
        with file:
            file.write(text)
    return loaded
