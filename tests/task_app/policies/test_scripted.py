"""The scripted policies: they play from the observation's data alone, and the teacher plays well."""

import json
from statistics import mean

import pytest

from task_app.environments.crafter.balrog import BalrogEnvironment
from task_app.environments.crafter.environment import CrafterConfig, CrafterEnvironment
from task_app.environments.crafter.map_memory import MapMemory
from task_app.environments.crafter.rules import ACTIONS
from task_app.policies.scripted import NO_TOOLS, CrafterTeacher, RandomConfig, RandomPolicy, TeacherConfig
from task_app.protocols import PolicyObservation, ToolRequest


async def play(
    policy, seed: int, *, decisions: int = 50, max_actions: int = 4
) -> tuple[float, list[list[str]]]:
    environment = CrafterEnvironment(CrafterConfig(max_actions=max_actions))
    data, made = environment.reset(seed).data, []
    tools = [tool.model_dump() for tool in environment.tools()]
    for _ in range(decisions):
        action, raw, logprobs, value = await policy.get_action(PolicyObservation((), data), tools)
        assert (raw, logprobs, value) == (None, None, None)
        arguments = json.loads(action["tool_calls"][0]["arguments"])
        made.append(arguments["actions"])
        outcome = environment.step([ToolRequest(action["tool_calls"][0]["name"], arguments)])
        assert outcome.invalid_reason is None
        data = outcome.observation.data
        if outcome.terminated:
            break
    return environment.outcome_reward(), made


@pytest.mark.parametrize("memory", [False, True])
async def test_the_teacher_unlocks_at_least_ten_achievements_in_200_steps(memory):
    scores = [(await play(CrafterTeacher(TeacherConfig(memory=memory)), seed))[0] for seed in range(8)]
    assert mean(scores) >= 10


@pytest.mark.parametrize("memory", [False, True])
async def test_the_teacher_is_deterministic_and_a_used_one_starts_afresh(memory):
    teacher = CrafterTeacher(TeacherConfig(memory=memory, max_actions=3))
    first = await play(teacher, 5, decisions=25, max_actions=3)
    await play(teacher, 6, decisions=5, max_actions=3)
    assert await play(teacher, 5, decisions=25, max_actions=3) == first
    assert all(1 <= len(actions) <= 3 for actions in first[1])


async def test_epsilon_mixes_in_random_decisions_that_follow_the_seed():
    def made(seed: int):
        return play(CrafterTeacher(TeacherConfig(epsilon=0.5, max_actions=4, seed=seed)), 5, decisions=25)

    assert await made(0) == await made(0)
    assert (await made(0))[1] != (await made(1))[1]


async def test_random_play_uses_every_action_and_the_full_length():
    _, made = await play(RandomPolicy(RandomConfig(max_actions=4, seed=1)), 2, decisions=50)
    assert {len(actions) for actions in made} == {4}
    assert {action for actions in made for action in actions} == set(ACTIONS)


def test_the_memory_of_another_episode_is_dropped_even_when_its_start_was_not_seen():
    def at_step(environment, noops):
        environment.step([ToolRequest("interact_many", {"actions": ["noop"] * noops})])
        return environment.step([ToolRequest("interact_many", {"actions": ["move_left"]})]).observation.data

    first, second = CrafterEnvironment(), CrafterEnvironment()
    first.reset(1)
    second.reset(2)
    seen, other = at_step(first, 5), at_step(second, 2)
    used = MapMemory()
    used.facts(seen)
    assert used.facts(other) == MapMemory().facts(other)


@pytest.mark.parametrize("policy", [CrafterTeacher(TeacherConfig(epsilon=0.3)), RandomPolicy()])
async def test_where_an_environment_takes_words_the_action_is_said_in_its_words(policy):
    environment = BalrogEnvironment(CrafterConfig(text="balrog"))
    observation = environment.reset(4)
    for _ in range(60):
        action, *_ = await policy.get_action(PolicyObservation((), observation.data), [])
        outcome = environment.answer(action["content"])
        assert (action["type"], outcome.invalid_reason) == ("text", None)
        observation = outcome.observation
    assert environment.outcome_reward() >= 1


@pytest.mark.parametrize("data", [{"answers": 1}, {"answer_names": 1}, {"answer_names": [1, 2]}])
async def test_data_of_another_kind_under_a_like_name_are_no_words_to_answer_with(data):
    action, *_ = await RandomPolicy().get_action(PolicyObservation((), data), [])
    assert action["content"] == NO_TOOLS


def test_a_memory_of_cells_outside_the_world_is_refused():
    memory = MapMemory()
    memory.restore({"step": 3, "cells": [[-4, 67, "void"]]})
    assert memory.snapshot() == {"step": 3, "cells": [[-4, 67, "void"]]}
    with pytest.raises(ValueError, match="no map of cells"):
        memory.restore({"step": 3, "cells": [[0, 200, "grass"]]})
