"""`--plugins FILE`: an operator's environments join the plug boards, or the start is refused."""

import asyncio
import os
import shutil
import sys
from collections import ChainMap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import AliasChoices, ConfigDict, Field

from service_kit.errors import SettingsError
from shared_schemas.base import Body
from task_app.__main__ import main
from task_app.app import create_app
from task_app.errors import InvalidRequest
from task_app.interactions.config_file import package_interactions
from task_app.operator_plugins import with_packages, with_plugins
from task_app.plugins import ENVIRONMENTS, Board, PolicyContext, PolicyPlugin, default_plug_boards
from task_app.policies.scripted import RandomPolicy
from task_app.settings import Settings
from tests.task_app.counting import KEY, boards, rollout, running_app
from tests.task_app.rollout_client import accept, play

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


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, ": no such file"),
        ("x = 1", "defines none of ENVIRONMENTS, POLICIES, REWARD_FUNCTIONS"),
        ("ENVIRONMENTS = []", "ENVIRONMENTS is no dict but list"),
        ("ENVIRONMENTS = {3: None}", "ENVIRONMENTS has the key 3; a name is needed"),
        ("ENVIRONMENTS = {'cave': object()}", "ENVIRONMENTS['cave'] is object; write EnvironmentPlugin("),
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
            "environment 'crafter' is there already (built in); choose another name",
        ),
        (
            "from task_app.plugins import POLICIES as P\nPOLICIES = {'random': P['random']}",
            "policy 'random' is there already (built in); choose another name",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_its_name(tmp_path: Path, text: str, told: str):
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SettingsError) as caught:
        with_plugins(default_plug_boards(), [file])
    assert str(caught.value).startswith(f"--plugins {file}")
    assert told in str(caught.value)


def test_a_name_that_another_file_has_and_a_file_of_another_kind_are_refused_with_the_file(tmp_path: Path):
    files = [tmp_path / "a.py", tmp_path / "b.py"]
    for file in files:
        file.write_text("from task_app.captures.agents import Agent\nAGENTS = {'mine': Agent(['true'])}")
    with pytest.raises(SettingsError) as caught:
        with_plugins(default_plug_boards(), files)
    assert str(caught.value) == (
        f"--plugins {files[1]}: agent 'mine' is there already (of --plugins {files[0]}); choose another name"
    )
    text = files[0].rename(tmp_path / "a.txt")
    with pytest.raises(SettingsError, match=r"a\.txt is no Python file"):
        with_plugins(default_plug_boards(), [text])


BY_NAME = {"model_config": ConfigDict(validate_by_name=True, validate_by_alias=True)}
DRAW = {"__annotations__": {"draw": int}}


@pytest.mark.parametrize(
    ("fields", "taken", "own"),
    [
        ({"__annotations__": {"level": int}, "level": 1}, None, None),
        ({"__annotations__": {"seed": int}, "seed": 1}, 7, "seed"),
        ({**DRAW, "draw": Field(1, alias="seed")}, 7, "seed"),
        ({**DRAW, **BY_NAME, "draw": Field(1, alias="seed")}, 7, "draw"),
        ({**DRAW, "draw": Field(1, validation_alias=AliasChoices("seed", "of"))}, 7, "of"),
        ({"__annotations__": {"seed": int}, "seed": Field(1, alias="own")}, None, "own"),
    ],
)
def test_the_seed_of_a_job_reaches_every_config_that_takes_it(fields, taken, own):
    config = type("Config", (Body,), {"__module__": __name__, **fields})
    given = []
    plug = PolicyPlugin(config, lambda config, context: given.append(config) or RandomPolicy())
    context = PolicyContext(Settings(), open_session=None, seed=7)
    board = replace(default_plug_boards(), policies={"p": plug})
    board.policy("p", {}, context)
    assert next(value for _, value in given[0]) == (1 if taken is None else taken)
    if taken is None:
        with pytest.raises(InvalidRequest, match="unknown key 'seed'"):
            board.policy("p", {"seed": 7}, context)
    if own is not None:
        board.policy("p", {own: 8}, context)
        assert next(value for _, value in given[1]) == 8


async def test_a_service_plays_what_its_operator_gave_it_and_no_other_file(tmp_path: Path):
    boards = with_plugins(default_plug_boards(), [plugins(tmp_path, "cave"), plugins(tmp_path, "reef")])
    assert list(boards.environments) == [*ENVIRONMENTS, "cave", "reef"]
    assert {"openai", "random", "cave_player", "reef_player"} <= set(boards.policies)
    async with running_app(boards) as client:
        told = (await client.get("/task_info", params={"env_name": "crafter"})).json()["environments"]
        assert told == sorted(["cave", "reef", *ENVIRONMENTS])
        spec = {"env": {"env_name": "reef"}, "policy": {"policy_name": "reef_player", "config": {"level": 2}}}
        assert (await play(client, rollout("a", **spec)))["a"].status == "finished"
        refused = await accept(client, rollout("b", env={"env_name": str(tmp_path / "reef.py")}))
    assert refused.json()["code"] == "unknown_name"


def test_a_start_with_a_broken_file_ends_with_a_sentence_and_exit_code_2(tmp_path: Path, capsys):
    (tmp_path / "mine.py").write_text("1 / 0")
    with pytest.raises(SystemExit, match="2"):
        main(["--port", "0", "--plugins", str(tmp_path / "mine.py")])
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith("mine.py raised ZeroDivisionError: division by zero (mine.py:1)")


PACKAGE = """
from shared_schemas.base import Body
from task_app.environments.crafter.environment import CrafterConfig, CrafterEnvironment
from task_app.plugins import EnvironmentPlugin, PolicyPlugin
from task_app.policies.scripted import RandomPolicy
from task_app.protocols import BaseInteraction
from task_app.reward_functions import EvaluateResult, reward_function

cave = EnvironmentPlugin(CrafterConfig, CrafterEnvironment)
digger = PolicyPlugin(Body, lambda config, context: RandomPolicy())


@reward_function
def depth(messages, **kwargs):
    return EvaluateResult(score=0.75)


class Guide(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        return True, "down", 1.0, {}
"""
POINTS = """
[turnwise.environments]
cave = caves:cave
[turnwise.policies]
digger = caves:digger
[turnwise.reward_functions]
depth = caves:depth
[turnwise.interactions]
guide = caves:Guide
"""


METADATA = "Metadata-Version: 2.1\nName: caves\nVersion: 1.0\n"


def install(folder: Path, points: str, code: str = PACKAGE) -> None:
    """As pip would: the module and its metadata in one folder."""
    (folder / "caves.py").write_text(code)
    metadata = folder / "caves-1.0.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(METADATA)
    (metadata / "entry_points.txt").write_text(points)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that stands for site-packages, for child processes too."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    yield tmp_path
    sys.modules.pop("caves", None)


def test_two_packages_with_an_interaction_of_one_name_are_refused(packages: Path):
    code = PACKAGE.replace("from task_app.protocols", "from verl.interactions.base")
    install(packages, "[turnwise.interactions]\nguide = caves:Guide\n", code)
    assert set(package_interactions(Settings())) == {"guide"}
    shutil.copytree(packages / "caves-1.0.dist-info", packages / "holes-1.0.dist-info")
    (packages / "holes-1.0.dist-info/METADATA").write_text(METADATA.replace("caves", "holes"))
    with pytest.raises(SettingsError, match="interaction 'guide'"):
        package_interactions(Settings())


async def test_what_an_installed_package_offers_is_known_and_judges_in_its_own_process(packages: Path):
    install(packages, POINTS)
    boards = with_packages(default_plug_boards())
    assert {"cave", *ENVIRONMENTS} == set(boards.environments)
    assert package_interactions(Settings())["guide"].kind.__name__ == "Guide"
    wish = rollout(
        "a", env={"env_name": "cave"}, policy={"policy_name": "digger"},
        limits={"max_decisions": 2}, reward_function="depth",
    )  # fmt: skip
    async with running_app(boards, reward_variables=("PYTHONPATH",)) as client:
        ended = await play(client, wish)
    assert ended["a"].trajectory.outcome_reward == 0.75


@pytest.mark.parametrize(
    ("points", "told"),
    [
        ("[turnwise.environments]\ncrafter = caves:cave", "environment 'crafter' is there already"),
        ("[turnwise.policies]\ncave = caves:cave", "is EnvironmentPlugin; write PolicyPlugin"),
        ("[turnwise.environments]\ncave = caves:gone", "raised AttributeError"),
    ],
)
def test_a_package_that_cannot_be_taken_is_named(packages: Path, points: str, told: str):
    install(packages, points)
    with pytest.raises(SettingsError) as error:
        with_packages(default_plug_boards())
    assert told in error.value.detail and error.value.detail.startswith("caves, entry point ")


def test_an_entry_is_loaded_when_it_is_first_looked_up_and_its_names_load_nothing():
    loads = []
    board = Board({"a": lambda: loads.append("a") or "A", "b": lambda: loads.append("b") or "B"})
    more = ChainMap({"c": "C"}, board)
    assert (list(more), "b" in more, len(board)) == (["a", "b", "c"], True, 2) and loads == []
    assert (board["b"], more["b"], more["c"]) == ("B", "B", "C") and loads == ["b"]


async def test_the_session_of_plug_ins_is_opened_once_on_whatever_thread_asks_and_closed_in_the_end():
    app = create_app(Settings(api_keys=(KEY,)), boards=boards())
    async with app.router.lifespan_context(app):
        context = app.state.services.policy_context(inference_key=None)
        asked = [asyncio.to_thread(lambda: context.session) for _ in range(8)]
        (session,) = set(await asyncio.gather(*asked))
        assert session is context.session and not session.closed
        assert session.connector.limit == 2 * Settings().max_concurrent_rollouts
    assert session.closed
