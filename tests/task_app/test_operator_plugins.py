"""`--plugins FILE`: an operator's environments join the plug boards, or the start is refused."""

from pathlib import Path

import pytest

from service_kit.errors import SettingsError
from task_app.__main__ import main
from task_app.operator_plugins import with_plugins
from task_app.plugins import ENVIRONMENTS, default_plug_boards
from tests.task_app.counting import rollout, running_app
from tests.task_app.rollout_client import accept, all_of

PLUGINS = """
from helper_of_{name} import Config
from task_app.environments.crafter.environment import CrafterConfig, CrafterEnvironment
from task_app.plugins import EnvironmentPlugin, PolicyPlugin
from task_app.policies.scripted import RandomPolicy

ENVIRONMENTS = {{"{name}": EnvironmentPlugin(CrafterConfig, CrafterEnvironment)}}
POLICIES = {{"{name}_player": PolicyPlugin(Config, lambda config, context: RandomPolicy())}}
"""
HELPER = "from shared_schemas.base import Body\n\n\nclass Config(Body):\n    level: int = 1\n"


def plugins(folder: Path, name: str) -> Path:
    (folder / f"helper_of_{name}.py").write_text(HELPER)
    file = folder / f"{name}.py"
    file.write_text(PLUGINS.format(name=name))
    return file


def test_the_entries_of_all_files_join_ours(tmp_path: Path):
    boards = with_plugins(default_plug_boards(), [plugins(tmp_path, "cave"), plugins(tmp_path, "sea")])
    assert list(boards.environments) == [*ENVIRONMENTS, "cave", "sea"]
    assert {"openai", "random", "cave_player", "sea_player"} <= set(boards.policies)
    assert boards.environments.keys() - ENVIRONMENTS.keys() == {"cave", "sea"}, "nothing of ours was changed"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = 1", "defines none of ENVIRONMENTS, POLICIES, REWARD_FUNCTIONS"),
        ("ENVIRONMENTS = []", "ENVIRONMENTS is no dict but list"),
        ("ENVIRONMENTS = {3: None}", "ENVIRONMENTS has the key 3; a name is needed"),
        (
            "ENVIRONMENTS = {'cave': object()}",
            "ENVIRONMENTS['cave'] is object; write EnvironmentPlugin(ConfigClass, build)",
        ),
        ("POLICIES = {'p': 1}", "POLICIES['p'] is int; write PolicyPlugin(ConfigClass, build)"),
        (
            "def judge(messages, **kwargs): ...\nREWARD_FUNCTIONS = {'judge': judge}",
            "REWARD_FUNCTIONS['judge'] is function; decorate it with @reward_function",
        ),
        (
            "from task_app.reward_functions import reward_function as r\n@r\ndef judge(messages): ...",
            "raised ValueError: Function 'judge' must accept **kwargs parameter",
        ),
        ("import no_such_module", "raised ModuleNotFoundError: No module named 'no_such_module'"),
        ("def (", "raised SyntaxError"),
        (
            "from task_app.plugins import ENVIRONMENTS as E\nENVIRONMENTS = dict(E)",
            "environment 'crafter' is there already; choose another name",
        ),
        (
            "from task_app.plugins import POLICIES as P\nPOLICIES = {'random': P['random']}",
            "policy 'random' is there already; choose another name",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_its_name(tmp_path: Path, text: str, told: str):
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(SettingsError) as caught:
        with_plugins(default_plug_boards(), [file])
    assert str(caught.value).startswith(f"--plugins {file}")
    assert told in str(caught.value)


@pytest.mark.parametrize(("name", "told"), [("none.py", "no such file"), ("mine.txt", "is no Python file")])
def test_what_is_no_python_file_is_refused(tmp_path: Path, name: str, told: str):
    (tmp_path / "mine.txt").write_text("ENVIRONMENTS = {}")
    with pytest.raises(SettingsError, match=told):
        with_plugins(default_plug_boards(), [tmp_path / name])


async def test_a_service_plays_what_its_operator_gave_it_and_no_other_file(tmp_path: Path):
    boards = with_plugins(default_plug_boards(), [plugins(tmp_path, "cave")])
    async with running_app(boards) as client:
        told = (await client.get("/task_info", params={"env_name": "crafter"})).json()["environments"]
        assert told == sorted(["cave", *ENVIRONMENTS])
        spec = {"env": {"env_name": "cave"}, "policy": {"policy_name": "cave_player", "config": {"level": 2}}}
        assert (await accept(client, rollout("a", **spec))).status_code == 202
        assert (await all_of(client, 1))["a"].status == "finished"
        refused = await accept(client, rollout("b", env={"env_name": str(tmp_path / "cave.py")}))
    assert refused.json()["code"] == "unknown_name"


def test_a_start_with_a_broken_file_ends_with_a_sentence_and_exit_code_2(tmp_path: Path, capsys):
    (tmp_path / "mine.py").write_text("1 / 0")
    assert main(["--port", "0", "--plugins", str(tmp_path / "mine.py")]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith("mine.py raised ZeroDivisionError: division by zero")
