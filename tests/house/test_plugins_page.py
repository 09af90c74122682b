"""The files of docs/plugins.md and examples/plugins load, keep the contract, and play."""

import re
import sys
from dataclasses import replace

import pytest

from task_app.interactions.config_file import load_interactions
from task_app.operator_plugins import with_plugins
from task_app.plugins import default_plug_boards
from task_app.settings import Settings
from task_app.testing import EnvironmentContract
from tests.house.sources import ROOT
from tests.task_app.counting import PlannedPolicy, boards, rollout, running_app
from tests.task_app.playing import post
from tests.task_app.rollout_client import accept, wait_for_all

PAGE = (ROOT / "docs/plugins.md").read_text(encoding="utf-8")
EXAMPLES = sorted((ROOT / "examples/plugins").glob("*.py"))
BLOCKS = [
    *re.findall(r"```python\n(.*?)```", PAGE, re.S),
    *(path.read_text(encoding="utf-8") for path in EXAMPLES),
]
CHECKS = [name for name in dir(EnvironmentContract) if name.startswith("test_")]


NAMES = [
    "guess.py",
    "halver.py",
    "lexicon.py",
    "medians.py",
    "pulses.py",
    "riddles.py",
    "roots.py",
    "safe.py",
    "thrifty.py",
    "words.py",
]
# An interaction has a file of its own; estimators, aggregations and schedules are the trainer's.
OTHERS = {"medians.py", "pulses.py", "riddles.py", "roots.py"}
# What an environment of the page needs beyond its defaults.
CONFIGS = {"lexicon": {"prompt": "How many is a gross?"}}


@pytest.fixture
def files(tmp_path):
    """The blocks that begin with their file's name, saved under it."""
    named = [re.match(r'"""(\w+\.py):', block) for block in BLOCKS]
    for block, name in zip(BLOCKS, named, strict=True):
        if name:
            (tmp_path / name.group(1)).write_text(block, encoding="utf-8")
    found = sorted(tmp_path.glob("*.py"))
    assert [path.name for path in found] == NAMES
    return [path for path in found if path.name not in OTHERS]


def test_a_plug_in_fits_on_40_lines():
    for block in BLOCKS:
        code = [line for line in block.splitlines() if line.strip()]
        assert len(code) <= 40, f"{code[0]}: {len(code)} lines"


@pytest.mark.parametrize("name", ["guess", "safe", "lexicon"])
@pytest.mark.parametrize("check", CHECKS)
def test_an_environment_of_the_page_keeps_the_contract(check, name, files):
    module = with_plugins(default_plug_boards(), files).environments[name]

    class OfThePage(EnvironmentContract):
        def make(self):
            return module.build(module.config(**CONFIGS.get(name, {})))

    getattr(OfThePage(), check)()


async def test_the_policy_of_the_page_finds_every_number_of_100_within_7_guesses(files):
    # 2 ** 7 = 128 > 100
    # A job sends the seed, as to every teacher; a config without that field does not get it.
    policy = {"policy_name": "halver", "seed": 7}
    spec = {"env": {"env_name": "guess"}, "policy": policy, "limits": {"max_decisions": 7}}
    async with running_app(with_plugins(default_plug_boards(), files)) as client:
        await accept(client, *(rollout(str(seed), start={"seed": seed}, **spec) for seed in range(30)))
        ended = await wait_for_all(client, 30)
    assert {one.trajectory.outcome_reward for one in ended.values()} == {1.0}


async def test_both_tools_of_the_page_open_the_safe(files):
    # the number of seed 3 is 4: random.Random(3).randint(1, 9)
    decisions = [("pull", {}), ("turn", {}), ("turn", {"by": 4}), ("pull", {})]
    async with running_app(with_plugins(default_plug_boards(), files)) as client:
        env_id = (await post(client, "/env/create", env_name="safe", seed=3))["env_id"]
        answers = [
            await post(client, "/env/step", env_id=env_id, tool_calls=[{"tool": tool, "args": args}])
            for tool, args in decisions
        ]
    done = [answer["info"]["executed_actions"] for answer in answers]
    assert done == [["pull"], ["noop"], ["turn"], ["pull"]]
    assert [(answer["reward"], answer["terminated"]) for answer in answers] == [(0.0, False)] * 3 + [
        (1.0, True)
    ]


async def test_the_tool_of_the_page_is_called_first_and_then_the_interaction_is_asked(files):
    moves = [
        {"type": "tool_call", "name": "look_up", "arguments": {"word": "gross"}},
        {"type": "text", "content": "#### 144"},
    ]
    plugs = with_plugins(boards(planned=lambda: PlannedPolicy(*moves)), files)
    users = load_interactions(ROOT / "configs/interactions/gsm8k.yaml", Settings())
    spec = {"env": {"env_name": "lexicon", "config": CONFIGS["lexicon"]}, "interaction": {"name": "gsm8k"}}
    async with running_app(replace(plugs, interactions=users)) as client:
        await accept(client, rollout("a", policy={"policy_name": "planned"}, ground_truth="144", **spec))
        (ended,) = (await wait_for_all(client, 1)).values()
    looked, answered = ended.trajectory.steps
    assert (looked.step_info.tool_result, looked.reward_parts) == ("144", ())
    assert [part.value for part in answered.reward_parts] == [1.0]
    assert ended.trajectory.stop_reason == "interaction_done"


async def test_the_reward_function_of_the_page_judges_what_the_policy_of_the_page_plays(files):
    spec = {
        "env": {"env_name": "guess"},
        "policy": {"policy_name": "halver"},
        "limits": {"max_decisions": 7},
        "reward_function": "thrifty",
    }
    async with running_app(with_plugins(default_plug_boards(), files)) as client:
        await accept(client, *(rollout(str(seed), start={"seed": seed}, **spec) for seed in range(4)))
        ended = await wait_for_all(client, 4)
    for one in ended.values():
        found = one.trajectory
        assert found.outcome_reward == 1.0 / len(found.steps), "halver finds every number"
        assert found.user_reward.result.reason == f"{len(found.steps)} guesses"
        assert [step.base_reward for step in found.steps] == [0.0] * len(found.steps)
        assert found.warnings == ()


async def test_the_interaction_of_the_page_gives_hints_until_they_are_used_up(files, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (named,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
    (tmp_path / "interactions.yaml").write_text(named, encoding="utf-8")
    found = load_interactions(tmp_path / "interactions.yaml", Settings())
    assert list(found) == ["riddle", "gsm8k"]
    row = {"name": "riddle", "kwargs": {"ground_truth": "egg", "hints": ["It is white."]}}
    said = ["a box", "a stone", "an Egg"]
    messages = [{"role": "user", "content": "A box without hinges, key or lid?"}]
    answers = []
    async with running_app(replace(default_plug_boards(), interactions=found)) as client:
        one = {"interaction_id": (await post(client, "/interaction/start", **row))["interaction_id"]}
        for text in said:
            messages.append({"role": "assistant", "content": text})
            answers.append(await post(client, "/interaction/respond", **one, messages=messages))
            messages.append({"role": "user", "content": answers[-1]["response"]})
        await post(client, "/interaction/finalize", **one)
    assert [(answer["response"], answer["score"]) for answer in answers] == [
        ("No. It is white.", 0.0),
        ("No. Think again.", 0.0),
        ("That is it!", 1.0 / 3.0),
    ]
    assert [answer["should_terminate"] for answer in answers] == [False, False, True]
