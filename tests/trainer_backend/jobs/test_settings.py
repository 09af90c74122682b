"""What the operator says at the start."""

from pathlib import Path

import pytest
from typer.main import get_command

from service_kit.errors import SettingsError
from shared_schemas.urls import is_loopback
from trainer_backend.__main__ import app
from trainer_backend.jobs.settings import Flags, settings_from


def test_without_a_key_only_this_machine_is_listened_to():
    with pytest.raises(SettingsError, match="which others can reach, and there is no key"):
        settings_from(Flags(host="0.0.0.0"), {})
    assert settings_from(Flags(host="0.0.0.0"), {"TRAINER_API_KEY": "k"}).api_key is not None
    assert settings_from(Flags(), {}).api_key is None


def test_a_key_may_stand_in_a_file_and_a_file_that_was_named_must_hold_one(tmp_path: Path):
    file = tmp_path / "key"
    environ = {"TRAINER_API_KEY_FILE": str(file)}
    with pytest.raises(SettingsError, match="cannot be read"):
        settings_from(Flags(), environ)
    file.write_text("\n")
    with pytest.raises(SettingsError, match="which is empty"):
        settings_from(Flags(), environ)
    file.write_text("a-key\n")
    key = settings_from(Flags(), environ).api_key
    assert key is not None and key.get_secret_value() == "a-key"


@pytest.mark.parametrize("key", ["two\nlines", "caf\u00e9", "x" * 501])
def test_a_key_that_no_header_can_carry_is_refused_and_not_repeated(key):
    with pytest.raises(SettingsError, match="holds no key") as error:
        settings_from(Flags(), {"TRAINER_API_KEY": key})
    assert key not in str(error.value)


def typed(*words: str) -> Flags:
    """The options of a command line, as the command is given them."""
    command = get_command(app).commands["trainer"]
    return Flags(**command.make_context("trainer", list(words)).params)


def test_an_option_is_declared_once_for_the_command_line_and_the_environment(monkeypatch: pytest.MonkeyPatch):
    for name in ("GATEWAY_HOST", "TURNWISE_DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    bare, default = settings_from(typed(), {}), settings_from(Flags(), {})
    assert (bare.bounds, bare.rules, bare.database_url) == (
        default.bounds,
        default.rules,
        default.database_url,
    )
    flags = typed("--allow-model", "Qwen/*", "--allow-model", "a/b", "--no-jobs", "--max-jobs", "4")
    settings = settings_from(flags, {})
    assert (settings.bounds.models, settings.rules.max_jobs) == (("Qwen/*", "a/b"), 0)
    monkeypatch.setenv("GATEWAY_HOST", "trainer")
    assert typed().gateway_host == "trainer"
    assert typed("--gateway-host", "other").gateway_host == "other", "the command line goes over it"


def test_no_key_is_shown():
    settings = settings_from(Flags(), {"TRAINER_API_KEY": "s3cret"})
    assert "s3cret" not in repr(settings)


@pytest.mark.parametrize(
    ("flags", "environ"),
    [
        (Flags(task_urls=("task-app",)), {}),
        (Flags(), {"TASK_URL": "http://user:hunter2@task-app"}),
        (Flags(key_variables=("sk-abc",)), {}),
        (Flags(gateway_host="0.0.0.0"), {}),
    ],
)
def test_what_is_no_address_or_variable_is_refused(flags, environ):
    with pytest.raises(SettingsError) as error:
        settings_from(flags, environ)
    assert "hunter2" not in str(error.value) and "sk-abc" not in str(error.value)


def test_the_store_is_a_file_in_the_data_directory_unless_it_is_named(tmp_path: Path):
    assert settings_from(Flags(data_dir=tmp_path), {}).database_url == f"sqlite:///{tmp_path}/turnwise.db"
    assert settings_from(Flags(database_url="postgresql://h/d"), {}).database_url == "postgresql://h/d"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST", "::1", "[::1]", "127.1.2.3"])
def test_the_names_of_this_machine(host):
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.0.0.1", "localhost.example.com", "127.0.0.1.nip.io", ""]
)
def test_all_other_names(host):
    assert not is_loopback(host)
