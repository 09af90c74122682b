"""BabyAI: what is told of the view, which states are equal, and a teacher that finds its way back."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

pytest.importorskip("minigrid", reason="minigrid is not installed: pip install 'turnwise[babyai]'")

from task_app.environments.babyai.environment import BABYAI_STATE_KEYS, BabyAIConfig, BabyAIEnvironment
from task_app.environments.babyai.level import level_id
from task_app.environments.babyai.text import compact_text, full_text
from task_app.policies.random_calls import DetourConfig
from task_app.policies.teachers import BabyAITeacher
from task_app.protocols import DecisionOutcome, Observation, ToolRequest


def started(level: str, seed: int = 0, **config: Any) -> tuple[BabyAIEnvironment, Observation]:
    environment = BabyAIEnvironment(BabyAIConfig(level=level, **config))
    return environment, environment.reset(seed)


def act(environment: BabyAIEnvironment, *actions: str) -> DecisionOutcome:
    return environment.step([ToolRequest(name="act", arguments={"actions": list(actions)})])


def key(observation: Observation, name: str = "grid") -> Any:
    return BABYAI_STATE_KEYS[name].of(observation)


async def advice(teacher: BabyAITeacher, observation: Observation) -> tuple[list[str], bool]:
    answer, _, _, _ = await teacher.get_action(observation)
    call = answer["tool_calls"][0]
    return json.loads(call["arguments"])["actions"], answer.get("exploratory", False)


DATA = {
    "mission": "go to the red ball", "carrying": None, "last": ["left", "forward"],
    "step": 2, "max_steps": 64,
    "objects": [
        {"words": "red ball", "ahead": 3, "right": -2, "role": "goal"},
        {"words": "grey key", "ahead": 0, "right": 1, "role": None},
    ],
    "room": {"ahead": 2, "left": 0, "right": 3}, "no_effect": False, "invalid": False,
}  # fmt: skip


def test_the_view_is_told_from_the_agent():
    assert compact_text(DATA) == (
        "go to the red ball goal red ball F3 L2 see grey key R1 free F2 L0 R3 did left forward"
    )
    assert full_text(DATA | {"carrying": "blue box", "invalid": True}).splitlines() == [
        "Mission: go to the red ball. Step 2 of 64.",
        "You see a red ball: 3 ahead, 2 to the left.",
        "You see a grey key: 1 to the right.",
        "Free cells: 2 ahead, 0 to the left, 3 to the right.",
        "You carry a blue box.",
        "Your last actions: left, forward.",
        "The last call was not carried out; it cost one step.",
    ]


def test_what_is_seen_stands_where_the_grid_has_it():
    seen = 0
    for seed in range(5):
        environment, observation = started("GoToLocal", seed)
        env = environment._level.env
        seen += len(observation.data["objects"])
        for item in observation.data["objects"]:
            place = env.agent_pos + item["ahead"] * env.dir_vec + item["right"] * env.right_vec
            found = env.grid.get(*place)
            assert f"{found.color} {found.type}" == item["words"]
            assert (item["role"] == "goal") == (env.mission.endswith(item["words"]))
        free = observation.data["room"]["ahead"]
        cells = [env.grid.get(*(env.agent_pos + (k + 1) * env.dir_vec)) for k in range(free + 1)]
        assert cells[:free] == [None] * free and cells[free] is not None
    assert seen > 5


def test_a_state_is_the_same_whatever_way_led_to_it():
    environment, start = started("PutNextLocal")
    turned = act(environment, "left").observation
    back = act(environment, "right").observation
    assert key(back) == key(start) != key(turned)
    assert key(back, "view") == key(start, "view") != key(turned, "view")
    assert back.text != start.text  # it tells the last actions


async def test_a_state_tells_what_is_carried_and_which_part_of_the_mission_is_done():
    environment, observation = started("PutNextLocal", 3)
    teacher, keys = BabyAITeacher(), []
    while "pickup" not in observation.data["last"]:
        keys.append(key(observation))
        observation = act(environment, *(await advice(teacher, observation))[0]).observation
    assert observation.data["carrying"] is not None
    assert key(observation) not in keys

    environment, observation = started("GoToSeqS5R2", 1)
    progress = [key(observation)[4][0]]
    while not environment.outcome_reward():
        outcome = act(environment, *(await advice(teacher, observation))[0])
        observation = outcome.observation
        progress.append(key(observation)[4][0])
    assert progress[0] == "False" and "success" in progress


@pytest.mark.parametrize("level", ["GoToLocal", "PutNextLocalS5N3", "UnlockLocal", "GoToSeqS5R2"])
async def test_the_teacher_accomplishes_missions_also_after_detours(level: str):
    teacher, detours = BabyAITeacher(DetourConfig(epsilon=0.3)), 0
    environment = BabyAIEnvironment(BabyAIConfig(level=level, length=200))
    for seed in range(6):
        observation, outcome = environment.reset(seed), None
        while outcome is None or not (outcome.terminated or outcome.truncated):
            actions, exploratory = await advice(teacher, observation)
            detours += exploratory
            outcome = act(environment, *actions)
            observation = outcome.observation
        assert environment.outcome_reward() == 1.0 and outcome.terminated
        # minigrid's reward: 1 - 0.9 * steps / max_steps
        assert outcome.env_rewards[-1] == pytest.approx(1 - 0.9 * observation.data["step"] / 200)
        assert observation.achievements_counts == {"success": 1}
    assert detours > 0


async def test_a_teacher_that_comes_in_later_advises_as_one_that_was_there():
    environment, observation = started("PutNextLocal", 5)
    present = BabyAITeacher()
    for _ in range(6):
        actions, _ = await advice(present, observation)
        assert (await advice(BabyAITeacher(), observation))[0] == actions
        observation = act(environment, *actions).observation


def test_after_the_end_of_a_mission_no_further_action_of_the_call_runs():
    environment, _ = started("GoToRedBallNoDists", 0, length=3)
    outcome = act(environment, "left", "left", "left", "left")
    assert outcome.executed_actions == ("left", "left", "left") and outcome.truncated


def test_a_snapshot_of_another_level_is_refused():
    environment, _ = started("GoToLocal")
    other, _ = started("PutNextLocal")
    with pytest.raises(ValueError, match="level GoToLocal after 0 steps"):
        other.restore(environment.snapshot())


def test_an_unknown_level_and_a_missing_minigrid_are_told():
    with pytest.raises(ValidationError, match=r"'GotoLocal'.*Did you mean 'GoToLocal'"):
        BabyAIConfig(level="GotoLocal")
    with pytest.raises(ValueError, match=r"not installed: pip install 'turnwise\[babyai\]'"):
        level_id("GoToLocal", spec_of=lambda name: None)


def test_the_picture_has_the_size_that_was_asked_for():
    environment, _ = started("GoToLocal")
    assert environment.frame(120, 90).shape == (90, 120, 3)
