"""What the operator says at the start, and what keeps the service from starting."""

import os
import pickle

import httpx
import pytest
from pydantic import SecretStr
from typer.main import get_command

from service_kit.errors import ServiceError, SettingsError
from service_kit.settings import find_variables, options_given, read_settings
from tests.processes import service
from trainer_backend.jobs.server import serve_trainer
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


def test_the_store_is_a_file_in_the_data_directory_unless_it_is_named(tmp_path):
    assert read_settings(Settings, {}, data_dir=tmp_path).database_url == f"sqlite:///{tmp_path}/turnwise.db"
    assert read_settings(Settings, {}, database_url="postgresql://h/d").database_url == "postgresql://h/d"


def test_what_keeps_it_from_starting_is_told_and_it_ends_when_its_standard_input_closes(tmp_path):
    """Its folder, where another one runs jobs, its port, and its store, without the password."""
    words = ("trainer", "--port", "0", "--data-dir", "runs", "--exit-with-parent")
    keyless = {"environ": {"TRAINER_API_KEY": ""}, "cwd": tmp_path}
    with service("trainer_backend", *words, **keyless) as (first, url):
        port = httpx.URL(url).port
        store = "postgresql://turnwise:hunter2@127.0.0.1:1/turnwise"
        for folder, given, told in (
            ("runs", {"port": 0}, f"another trainer service runs jobs in {tmp_path}/runs"),
            ("other", {"port": port}, f"cannot listen on 127.0.0.1:{port}"),
            (
                "own",
                {"port": 0, "database_url": store},
                r"turnwise:\*\*\*@127.0.0.1:1/turnwise cannot be used",
            ),
        ):
            with pytest.raises(ServiceError, match=told) as refused:
                serve_trainer(read_settings(Settings, {}, data_dir=tmp_path / folder, **given), pytest.fail)
            assert "hunter2" not in str(refused.value)
        assert not (tmp_path / "other").exists(), "the port comes before the store"
        first.stdin.close()
        assert first.wait(60) == 0
