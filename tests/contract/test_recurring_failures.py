"""A job that fails by itself, in the process of the real job runner: it is not restarted in vain."""

from pathlib import Path

import pytest

from tests.conftest import tiny_job
from tests.trainer_backend.jobs.test_supervisor import house, settings
from trainer_backend.job.load import dump_job
from trainer_backend.jobs.processes import job_command


@pytest.mark.timeout(300)
async def test_prompts_that_are_too_long_are_no_outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    short = {"warmup__episodes": 2, "warmup__epochs": 1, "evaluation__instances": 1}
    job = tiny_job(inference__max_model_len=40, **short)
    async with house(tmp_path, settings(restarts=3), job_command) as there:
        job_id = there.job("long", config=dump_job(job))
        await there.until(lambda: there.row(job_id).ended)
        row = there.row(job_id)
    assert (row.state, row.code, row.attempt) == ("failed", "job_teaches_nothing", 1)
    assert "1 of 1 rollouts lost: the first prompt does not fit the model" in str(row.detail)
    assert "('crafter', seed " in str(row.detail) and "inference.max_model_len" in str(row.detail)
