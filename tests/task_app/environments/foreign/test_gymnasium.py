"""Environments of gymnasium as env_name."""

import subprocess
import sys

import gymnasium
import numpy as np
import pytest

from task_app.environments.foreign.configs import GymnasiumConfig
from task_app.environments.foreign.gymnasium_peer import gymnasium_environment
from task_app.environments.foreign.peer import LOCAL, ForeignFailed
from task_app.errors import EpisodeOver, InvalidRequest
from task_app.protocols import RestorableEnvironment, ToolRequest
from tests.task_app.environments.foreign.contracts import PROMISES, environment, keeps

NAMES = [
    "FrozenLake-v1",
    "CliffWalking-v1",
    "Taxi-v4",
    "Blackjack-v1",
    "CartPole-v1",
    "MountainCar-v0",
    "MountainCarContinuous-v0",
    "Acrobot-v1",
    "Pendulum-v1",
    "MiniGrid-Empty-5x5-v0",
    "BabyAI-GoToRedBall-v0",
]


@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.parametrize("env_id", NAMES)
def test_environments_of_others_keep_the_contract(env_id, promise):
    modules = ()
    if env_id.startswith(("MiniGrid", "BabyAI")):
        pytest.importorskip("minigrid", reason="the package `minigrid` is not installed")
        modules = ("minigrid",)
    keeps(promise, f"gymnasium:{env_id}", gymnasium_modules=modules)


class Rooms(gymnasium.Env):
    """A corridor of five rooms: each step forward pays 1, and the wall pays -1; it can tell its state."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  # gymnasium's own form

    def __init__(self, render_mode=None, observation_space=None, pays=1.0):
        self.render_mode, self._pays = render_mode, pays
        self.action_space = gymnasium.spaces.Discrete(2)
        self.observation_space = observation_space or gymnasium.spaces.Discrete(5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.room = 0
        return self.room, {"achievements": {"door": 0}}

    def step(self, action):
        forward = action == 1
        self.room = min(4, self.room + 1) if forward else max(0, self.room - 1)
        door = {"achievements": {"door": int(self.room > 2)}}
        return self.room, self._pays if forward else -1.0, self.room == 4, False, door

    def render(self):
        return np.full((2, 5, 3), self.room, np.uint8)

    def get_state(self):
        return {"room": self.room}

    def set_state(self, state):
        self.room = int(state["room"])


@pytest.fixture(autouse=True)
def register():
    """Registers an environment until the end of the test."""
    names = []

    def register(name, kind, **options):
        gymnasium.register(name, entry_point=kind, **options)
        names.append(name)

    register("Rooms-v0", Rooms, max_episode_steps=6)
    yield register
    for name in names:
        del gymnasium.registry[name]


def started(name="Rooms-v0"):
    rooms = environment(f"gymnasium:{name}")
    rooms.reset(0)
    return rooms


def act(*actions):
    return tuple(ToolRequest("act", {"action": action}) for action in actions)


@pytest.mark.parametrize("promise", PROMISES)
def test_one_that_tells_its_state_keeps_the_contract_of_snapshots_too(promise):
    assert isinstance(environment("gymnasium:Rooms-v0"), RestorableEnvironment)
    assert not isinstance(environment("gymnasium:FrozenLake-v1"), RestorableEnvironment)
    keeps(promise, "gymnasium:Rooms-v0")


def test_each_call_of_a_decision_has_its_own_reward_up_to_the_end():
    rooms = started()
    first = rooms.step(act(1, 0, 1))
    assert (first.env_rewards, first.executed_actions) == ((1.0, -1.0, 1.0), ("act", "act", "act"))
    assert first.observation.achievements_counts == {"door": 0}
    second = rooms.step(act(1, 1, 1, 1))
    assert (second.env_rewards, second.terminated) == ((1.0, 1.0, 1.0), True)
    assert second.observation.achievements_counts == {"door": 1}
    assert rooms.outcome_reward() == 4.0
    with pytest.raises(EpisodeOver):
        rooms.step(act(1))


def test_the_registered_limit_truncates_also_after_a_restored_moment():
    rooms, other = started(), environment("gymnasium:Rooms-v0")
    rooms.step(act(0, 0, 0))
    other.restore(rooms.snapshot())
    assert not other.step(act(0, 0)).truncated
    assert other.step(act(0)).truncated


def test_names_of_actions_replace_their_numbers():
    config = {"action_names": ["back", "forward"], "instructions": "Go forward."}
    rooms = environment("gymnasium:Rooms-v0", config)
    (tool,) = rooms.tools()
    assert tool.function.parameters["properties"]["action"]["enum"] == ["back", "forward"]
    observation = rooms.reset(0)
    assert [message.content for message in rooms.messages(observation, ())] == ["Go forward.", "0"]
    assert rooms.step(act("forward")).observation.text == "1"
    assert "'sideways' is not one of" in rooms.step(act("sideways")).invalid_reason


def test_its_picture_has_the_size_that_was_asked_for():
    rooms = started()
    rooms.step(act(1))
    picture = rooms.frame(10, 4)
    assert (picture.shape, picture.dtype, picture.max()) == ((4, 10, 3), np.uint8, 1)


def test_a_reward_that_is_no_finite_number_fails_the_episode_and_nothing_is_left_to_ask(register):
    class Nan(Rooms):
        def __init__(self, **options):
            super().__init__(pays=float("nan"), **options)

    register("Nan-v0", Nan)
    rooms = started("Nan-v0")
    with pytest.raises(ForeignFailed, match="pays a reward of nan"):
        rooms.step(act(1))
    for ask in (lambda: rooms.step(act(1)), rooms.snapshot, lambda: rooms.frame(4, 4)):
        with pytest.raises(EpisodeOver):
            ask()


def test_a_space_that_cannot_be_told_as_text_is_refused_with_the_way_out(register):
    graph = gymnasium.spaces.Graph(gymnasium.spaces.Discrete(2), None)
    register("Graph-v0", lambda **kwargs: Rooms(observation_space=graph, **kwargs))
    with pytest.raises(InvalidRequest) as refused:
        environment("gymnasium:Graph-v0").reset(0)
    assert "observations of Graph cannot be told as text" in refused.value.detail
    assert "wrapper" in refused.value.hint


@pytest.mark.parametrize("first", [{}, {"door": 0}])
def test_the_first_counters_name_all_achievements(first, register):
    class Late(Rooms):
        def reset(self, **options):
            observation, _ = super().reset(**options)
            return observation, {"achievements": first}

        def step(self, action):
            *rest, _ = super().step(action)
            return *rest, {"achievements": {"window": 1}}

    register("Late-v0", Late)
    rooms = started("Late-v0")
    with pytest.raises(ForeignFailed, match=r"did not name before: \['window'\]"):
        rooms.step(act(1))


def test_counters_may_begin_with_the_first_step_and_never_fall(register):
    class Steps(Rooms):
        def reset(self, **options):
            return super().reset(**options)[0], {}

        def step(self, action):
            return *super().step(action)[:-1], {"achievements": {"forward": int(action)}}

    register("Steps-v0", Steps)
    rooms = environment("gymnasium:Steps-v0")
    assert rooms.reset(0).achievements_counts == {}
    counts = [rooms.step(act(one)).observation.achievements_counts for one in (1, 0)]
    assert counts == [{"forward": 1}, {"forward": 1}]


def test_one_bad_call_refuses_a_decision_with_fresh_prompts_and_earns_0():
    rooms = started()
    outcome = rooms.step(act(1, 7))
    assert (outcome.env_rewards, outcome.executed_actions) == ((0.0,), ("noop",))
    assert outcome.observation.text == "0" and "7 is greater than the maximum" in outcome.invalid_reason


def test_close_names_are_looked_up_among_all_that_are_registered(register):
    for number in range(300):
        register(f"Maze{number}-v0", Rooms)
    with pytest.raises(InvalidRequest, match=r"which has \d+ ids\. Did you mean .*'Maze299-v0'"):
        environment("gymnasium:Maze299-v1")


def test_an_operators_wrapper_makes_it_tellable():
    class Words(gymnasium.ObservationWrapper):
        def __init__(self, env):
            super().__init__(env)
            self.observation_space = gymnasium.spaces.Text(20)

        def observation(self, observation):
            return f"room {observation}"

    rooms = gymnasium_environment("Rooms-v0", GymnasiumConfig(), LOCAL, wrapper=Words)
    assert rooms.reset(0).text == "room 0"


@pytest.mark.parametrize(
    ("env_name", "config", "sentence"),
    [
        ("gymnasium:FrozenLake-v2", {}, "'FrozenLake-v2' is not registered"),
        ("gymnasium:os:FrozenLake-v1", {}, "module 'os' is not on this task app's list; allowed: none"),
        ("gymnasium:GymV26Environment-v0", {}, "is not registered"),
        ("gymnasium:FrozenLake-v1", {"kwargs": {"desc": "../secret"}}, "String should match pattern"),
        ("gymnasium:FrozenLake-v1", {"text": "nonsense"}, "Input should be 'numbers' or 'ansi'"),
        ("gymnasium:CartPole-v1", {"text": "ansi"}, "has no render mode 'ansi'"),
        ("gymnasium:CartPole-v1", {"kwargs": {"render_mode": "human"}}, "may not set render_mode"),
        ("gymnasiums:FrozenLake-v1", {}, "unknown environment"),
        # The rest only the environment itself can tell, when it is made.
        ("gymnasium:FrozenLake-v1", {"kwargs": {"no_such": 1}}, "cannot be made of these: TypeError"),
        ("gymnasium:FrozenLake-v1", {"kwargs": {"map_name": "9x9"}}, "cannot be made of these: KeyError"),
        ("gymnasium:FrozenLake-v1", {"kwargs": {"desc": ["SF", "F"]}}, "made of these: ValueError"),
        ("gymnasium:FrozenLake-v1", {"action_names": ["a", "b"]}, "2 names for Discrete(4)"),
        ("gymnasium:FrozenLake-v1", {"action_names": ["a", "b", "a", "c"]}, "'a' names two actions"),
    ],
)
def test_a_name_reaches_nothing_but_what_is_registered_and_can_be_made(env_name, config, sentence):
    with pytest.raises(InvalidRequest) as refused:
        environment(env_name, config).reset(0)
    assert sentence in refused.value.detail


def test_without_the_package_all_else_is_loaded_and_it_is_named_with_its_extra():
    # In a process of its own: here all modules are loaded with it.
    code = """
import sys
sys.modules["gymnasium"] = None
from task_app.errors import InvalidRequest
from task_app.plugins import default_plug_boards
try:
    default_plug_boards().environment("gymnasium:FrozenLake-v1", {})
except InvalidRequest as exc:
    print(exc.where, "|", exc.detail, "|", exc.hint)
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told == (
        "env_name | this task app has no gymnasium, which such an environment needs | "
        'the operator installs it: pip install "turnwise[gym]"\n'
    )
