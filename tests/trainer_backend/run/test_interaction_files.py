"""[multi_turn].interaction_config_path: handed on to the job's own task app, which reads it at its start."""

from pathlib import Path

import httpx
import pytest

from tests.conftest import tiny_job
from trainer_backend import job_parts
from trainer_backend.errors import JobError
from trainer_backend.job.load import dump_job, load_job
from trainer_backend.rundir.new_job import load_new_job

GSM8K = Path(__file__).parents[3] / "configs/interactions/gsm8k.yaml"


async def test_the_jobs_own_task_app_has_the_interactions_of_the_file(tmp_path):
    job = tiny_job(multi_turn__enable=True, multi_turn__interaction_config_path=str(GSM8K))
    async with job_parts.task_apps(job, tmp_path / "log") as apps, httpx.AsyncClient() as http:
        (client,) = apps.serving
        key = client.api_key.get_secret_value()
        answer = await http.get(f"{client.url}/info", headers={"X-API-Key": key})
    assert answer.json()["capabilities"]["interactions"] == ["gsm8k"]


async def test_a_file_that_is_wrong_is_told_in_the_task_apps_words(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("interaction: [{class_name: unknown_module.It}]")
    job = tiny_job(multi_turn__enable=True, multi_turn__interaction_config_path=str(file))
    with pytest.raises(JobError, match=r"did not start: .*No module named 'unknown_module'"):
        async with job_parts.task_apps(job, tmp_path / "log"):
            raise AssertionError("it started")


def test_the_path_is_one_from_the_folder_of_the_job_and_survives_being_written(tmp_path):
    (tmp_path / "mine.yaml").touch()
    job = tmp_path / "job.toml"
    job.write_text(
        '[model]\npreset = "tiny-0.3m"\n[multi_turn]\nenable = true\ninteraction_config_path = "mine.yaml"\n'
    )
    loaded = load_job(job).config
    assert loaded.multi_turn.interaction_config_path == tmp_path / "mine.yaml"
    job.write_text(dump_job(loaded))
    assert load_job(job).config == loaded


@pytest.mark.parametrize(
    ("key", "tables"),
    [
        ("multi_turn.interaction_config_path", '[multi_turn]\nenable = true\ninteraction_config_path = "{}"'),
        ("services.task_plugins", '[services]\ntask_plugins = ["{}"]'),
        ("services.mcp_servers", '[services]\nmcp_servers = "{}"'),
        ("services.textarena_python", '[services]\ntextarena_python = "{}"'),
    ],
)
def test_a_file_that_is_not_there_is_told_before_a_run_begins(key, tables, tmp_path):
    meant = tmp_path / "users.yaml"
    meant.touch()
    job = tmp_path / "job.toml"
    job.write_text(f'[model]\npreset = "tiny-0.3m"\n{tables.format(tmp_path / "user.yaml")}\n')
    with pytest.raises(JobError) as found:
        load_new_job(job)
    told = f"{key} is '{tmp_path / 'user.yaml'}', which is no file. Did you mean '{meant}'?"
    assert str(found.value) == f"{job}: {told}"
    job.write_text(job.read_text().replace("user.yaml", "users.yaml"))
    load_new_job(job)
