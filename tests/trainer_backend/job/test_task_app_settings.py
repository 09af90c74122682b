"""Keys of [services] that are settings of the task app that the job starts."""

from service_kit.settings import read_settings
from task_app.settings import Settings
from trainer_backend.job.tables import TASK_APP_SETTINGS, ServicesTable

GIVEN = {
    "gymnasium_modules": ["minigrid", "my_envs"], "verifiers_modules": ["gsm8k_v1"],
    "verifiers_python": "/opt/verifiers/bin/python", "textarena_python": "/opt/games/bin/python",
    "allowed_environment_hosts": ["far:80"],
}  # fmt: skip


def test_the_task_app_reads_what_the_job_says_and_its_environment_says_the_rest():
    variables = {"TURNWISE_GYMNASIUM_MODULES": "other", "TURNWISE_REASONING_GYM_PYTHON": "/usr/bin/python3"}
    settings = read_settings(Settings, variables | ServicesTable.model_validate(GIVEN).task_app_variables)
    assert (settings.gymnasium_modules, settings.verifiers_modules) == (
        ("minigrid", "my_envs"),
        ("gsm8k_v1",),
    )
    assert settings.allowed_environment_hosts == ("far:80",)
    assert [settings.python_with(library) for library in ("verifiers", "textarena", "reasoning_gym")] == [
        "/opt/verifiers/bin/python", "/opt/games/bin/python", "/usr/bin/python3",
    ]  # fmt: skip
    assert ServicesTable().task_app_variables == {}


def test_every_such_key_has_the_name_of_the_setting():
    assert set(TASK_APP_SETTINGS) <= type(read_settings(Settings, {})).model_fields.keys()
