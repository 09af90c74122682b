"""Crafter as a gymnasium.Env: gymnasium's own checker, and the same game as over HTTP."""

import warnings

import pytest

gymnasium = pytest.importorskip("gymnasium", reason="the extra `gym` is not installed")

from gymnasium.utils.env_checker import check_env  # noqa: E402

from task_app.dialects.gymnasium_env import TurnwiseEnv  # noqa: E402
from task_app.errors import EpisodeOver, UnknownName  # noqa: E402
from tests.task_app.counting import CountingEnvironment  # noqa: E402

CRAFTER = "task_app.dialects.gymnasium_env:Turnwise/Crafter-v0"
WOOD = ["move_right", "move_right", "move_right", "do"]


def test_gymnasiums_checker_finds_nothing_to_complain_about():
    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        check_env(gymnasium.make(CRAFTER).unwrapped)
        check_env(gymnasium.make(CRAFTER, config={"text": "compact"}, render_mode="rgb_array").unwrapped)
    assert complaints == []


def test_a_decision_earns_what_the_service_says_it_earns_also_in_vectors():
    # seed 17: a tree stands four cells to the right (docs/http.md)
    env = gymnasium.make(CRAFTER)
    _, start = env.reset(seed=17)
    observation, reward, terminated, truncated, info = env.step(WOOD)
    assert (start["seed"], reward, terminated, truncated) == (17, 1.0, False, False)
    assert info["decision_rewards"] == {
        "turn": 1, "ach_delta": 1, "unique_delta": 1, "all": ["collect_wood"], "unique": ["collect_wood"],
    }  # fmt: skip
    assert info["executed_actions"] == WOOD
    assert (info["outcome_reward"], info["achievements_counts"]["collect_wood"]) == (1.0, 1)
    assert "wood:1" in observation["text"]
    envs = gymnasium.make_vec(CRAFTER, num_envs=2, vectorization_mode="sync")
    envs.reset(seed=[17, 17])
    _, rewards, *_ = envs.step((WOOD, ["noop"]))
    assert rewards.tolist() == [1.0, 0.0]


def test_every_form_of_an_action_is_the_same_decision_and_what_is_none_is_refused_before_anything_runs():
    env = TurnwiseEnv("crafter")
    call = {"name": "interact_many", "arguments": {"actions": WOOD}}
    env.reset(seed=17)
    for action in (3, "noop", [1], ["noop", {"name": "interact_many"}], {"arguments": {}}):
        assert not env.action_space.contains(action)
        with pytest.raises(ValueError):
            env.step(action)
    forms = (call, {"tool": "interact_many", "args": call["arguments"]}, [call], tuple(WOOD))
    for turn, action in enumerate(forms, start=1):
        assert env.action_space.contains(action)
        info = env.step(action)[4]
        assert (info["turn"], info["executed_actions"]) == (turn, WOOD)


def test_a_reset_takes_the_seed_of_a_world_and_no_options_and_later_resets_draw_from_it():
    env = TurnwiseEnv("crafter")
    options = {"options": {"text": "compact"}}
    for given, word in (({"seed": -1}, "seed"), ({"seed": 2**31 - 1}, "seed"), (options, "text")):
        with pytest.raises(ValueError, match=word):
            env.reset(**given)
    worlds = [env.reset(seed=5)[1]["seed"], env.reset()[1]["seed"], env.reset()[1]["seed"]]
    again = [env.reset(seed=5)[1]["seed"], env.reset()[1]["seed"], env.reset()[1]["seed"]]
    assert worlds == again
    assert worlds[0] == 5
    assert len(set(worlds)) == 3


def test_an_environment_of_ones_own_needs_no_plug_board():
    env = TurnwiseEnv(CountingEnvironment(), render_mode="ansi")
    env.reset(seed=1)
    call = {"name": "add", "arguments": {"names": ["a", "a", "end"]}}
    _, reward, terminated, _, info = env.step(call)
    assert (reward, terminated) == (1.0, True)
    assert info["decision_rewards"]["unique_delta"] == 1
    assert env.render() == "step 3"
    with pytest.raises(EpisodeOver):
        env.step(call)
    with pytest.raises(ValueError, match="give a call"):
        env.step(["a"])


def test_pictures_are_drawn_where_there_are_any():
    env = TurnwiseEnv("crafter", render_mode="rgb_array")
    env.reset(seed=1)
    assert env.render().shape == (288, 288, 3)
    with pytest.raises(ValueError, match="draws no pictures"):
        TurnwiseEnv(CountingEnvironment(), render_mode="rgb_array")
    with pytest.raises(UnknownName):
        TurnwiseEnv("craftr")
