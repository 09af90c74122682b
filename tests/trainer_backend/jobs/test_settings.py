"""What the operator says at the start, and what keeps the service from starting."""

import os
import pickle
import socket
from pathlib import Path

import pytest
from pydantic import SecretStr
from typer.main import get_command

from service_kit.errors import SettingsError
from service_kit.settings import find_variables, options_given, read_settings
from tests.processes import service
from tests.trainer_backend.test_command_line import turnwise
from trainer_backend.jobs.settings import Settings
from trainer_backend.terminal.trainer_commands import commands


def test_without_a_key_only_this_machine_is_listened_to():
    with pytest.raises(SettingsError, match="which others can reach, and there is no key"):
        read_settings(Settings, {}, host="0.0.0.0")
    assert read_settings(Settings, {"TRAINER_API_KEY": "k"}, host="0.0.0.0").api_key is not None
    assert read_settings(Settings, {}).api_key is None


@pytest.mark.parametrize("key", ["two\nlines", "caf\u00e9", "x" * 501])
def test_a_key_that_no_header_can_carry_is_refused_and_not_repeated(key):
    with pytest.raises(SettingsError, match="holds no key") as error:
        read_settings(Settings, {"TRAINER_API_KEY": key})
    assert key not in str(error.value)


def typed(*words: str) -> Settings:
    """The settings by a command line and the environment."""
    context = get_command(commands).commands["trainer"].make_context("trainer", list(words))
    return read_settings(Settings, os.environ, **options_given(context))


def test_an_option_is_declared_once_for_the_command_line_and_the_environment(monkeypatch: pytest.MonkeyPatch):
    for name in find_variables(Settings).values():
        monkeypatch.delenv(name.name, raising=False)
    assert typed() == read_settings(Settings, {}) == Settings()
    settings = typed("--allow-model", "Qwen/*", "--allow-model", "a/b", "--no-jobs", "--max-jobs", "4")
    assert (settings.models, settings.jobs, settings.max_jobs) == (("Qwen/*", "a/b"), False, 4)
    monkeypatch.setenv("GATEWAY_HOST", "trainer")
    assert typed().gateway_host == "trainer"
    assert typed("--gateway-host", "other").gateway_host == "other", "the command line goes over it"
    assert typed("--gateway-host", "127.0.0.1").gateway_host == "127.0.0.1", "with the default too"
    monkeypatch.setenv("GATEWAY_HOST", "")
    assert typed().gateway_host == "127.0.0.1"


def test_no_key_is_shown_nor_given_to_the_process_that_parses_posted_jobs():
    settings = Settings(api_key=SecretStr("s3cret"), database_url="postgresql://me:s3cret@host/d")
    assert "s3cret" not in repr(settings) and b"s3cret" not in pickle.dumps(settings.bounds)
    assert pickle.loads(pickle.dumps(settings.bounds)) == settings.bounds


@pytest.mark.parametrize(
    ("flags", "environ"),
    [
        ({"task_urls": ("task-app",)}, {}),
        ({}, {"TASK_URL": "http://user:hunter2@task-app"}),
        ({"key_variables": ("sk-abc",)}, {}),
        ({"gateway_host": "0.0.0.0"}, {}),
    ],
)
def test_what_is_no_address_or_variable_is_refused(flags, environ):
    with pytest.raises(SettingsError) as error:
        read_settings(Settings, environ, **flags)
    assert "hunter2" not in str(error.value) and "sk-abc" not in str(error.value)


def test_the_store_is_a_file_in_the_data_directory_unless_it_is_named(tmp_path: Path):
    assert read_settings(Settings, {}, data_dir=tmp_path).database_url == f"sqlite:///{tmp_path}/turnwise.db"
    assert read_settings(Settings, {}, database_url="postgresql://h/d").database_url == "postgresql://h/d"


def test_a_second_one_in_the_same_folder_is_refused(tmp_path):
    """One that only shows is not: `test_data_dir.py`."""
    words = ("trainer", "--port", "0", "--data-dir", "runs")
    keyless = {"environ": {"TRAINER_API_KEY": ""}, "cwd": tmp_path}
    with service("trainer_backend", *words, "--exit-with-parent", **keyless) as (first, _):
        second = turnwise(*words, cwd=tmp_path)
        assert second.returncode == 2
        assert second.stderr.startswith(
            f"error: another trainer service runs jobs in {tmp_path}/runs. Stop it, choose"
        )
        first.stdin.close()
        assert first.wait(60) == 0, "it ends when its standard input closes"


def test_a_store_that_cannot_be_used_keeps_it_from_starting_and_shows_no_password(tmp_path):
    words = ("--database-url", "postgresql://turnwise:hunter2@127.0.0.1:1/turnwise")
    done = turnwise("trainer", "--port", "0", "--data-dir", "runs", *words, cwd=tmp_path)
    assert (done.returncode, "listening" in done.stdout) == (1, False)
    told = "error: the store postgresql://turnwise:***@127.0.0.1:1/turnwise cannot be used: "
    assert done.stderr.startswith(told), done.stderr
    assert "hunter2" not in done.stderr + done.stdout


def test_a_port_that_is_taken_is_told_before_the_store_is_touched(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = turnwise("trainer", "--data-dir", "runs", "--port", str(port), cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.startswith(f"error: cannot listen on 127.0.0.1:{port}")
    assert list(tmp_path.iterdir()) == []
