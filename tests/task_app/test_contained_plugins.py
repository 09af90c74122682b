"""Whatever a plug-in raises fails one rollout at once, and names the exception, file and line."""

import asyncio
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shared_schemas.base import Body
from task_app.plugins import EnvironmentPlugin, PlugBoards, PolicyPlugin
from task_app.protocols import DecisionOutcome, Observation
from tests.task_app.counting import (
    CountingEnvironment,
    NoConfig,
    PlannedPolicy,
    add,
    boards,
    rollout,
    running_app,
)
from tests.task_app.playing import new_policy, post, refused
from tests.task_app.rollout_client import play

KINDS: dict[str, type[BaseException]] = {
    kind.__name__: kind
    for kind in (StopIteration, SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit)
}


class FaultyConfig(Body):
    place: str = ""
    kind: str = "StopIteration"
    quick: bool = False


class Faulty(CountingEnvironment):
    """Raises in the method `place`."""

    def __init__(self, config: FaultyConfig) -> None:
        super().__init__()
        self._config = config
        self.quick_step = config.quick
        if config.place == "__init__":
            raise KINDS[config.kind]


def _raise_in(place: str) -> Any:
    def method(self: Faulty, *arguments: Any, **options: Any) -> Any:
        if self._config.place == place:
            raise KINDS[self._config.kind]
        return getattr(super(Faulty, self), place)(*arguments, **options)

    return method


for _place in ("reset", "step", "tools", "messages", "outcome_reward"):
    setattr(Faulty, _place, _raise_in(_place))


class FaultyPolicy(PlannedPolicy):
    """Raises before it is asked, or when it is."""

    def __init__(self, config: FaultyConfig) -> None:
        if config.place == "policy":
            raise KINDS[config.kind]
        super().__init__(KINDS[config.kind]() if config.place == "get_action" else add("a"))


BOARDS = PlugBoards(
    {"faulty": EnvironmentPlugin(FaultyConfig, Faulty)},
    {"faulty": PolicyPlugin(FaultyConfig, lambda config, context: FaultyPolicy(config))},
)
CALLS = [{"tool": "add", "args": {"names": ["a"]}}]
PLACES = ("__init__", "reset", "step", "tools", "messages", "outcome_reward", "get_action")


async def test_every_error_at_every_place_fails_its_rollout_alone_and_is_named():
    requests = {
        f"{place}-{kind}-{quick}": {"config": {"place": place, "kind": kind, "quick": quick}}
        for place in PLACES for kind in KINDS for quick in (False, True)
    }  # fmt: skip
    async with running_app(BOARDS, max_plugin_threads=2) as client:
        found = await play(
            client,
            *(
                rollout(
                    name, env={"env_name": "faulty", **config}, policy={"policy_name": "faulty", **config}
                )
                for name, config in {**requests, "good": {}}.items()
            ),
        )
    assert found.pop("good").status == "finished"
    for name, one in found.items():
        place, kind, _ = name.split("-")
        other = {"get_action": "policy planned", "__init__": "environment 'faulty'"}
        what = other.get(place, f"environment.{place}")
        assert one.failure.code == "critical_error"
        detail = one.failure.detail
        assert re.fullmatch(rf"{re.escape(what)} raised {kind} \(\w+\.py:\d+\)", detail), detail


@pytest.mark.parametrize("kind", KINDS)
async def test_a_constructor_that_raises_refuses_its_request_alone(kind):
    config = {"place": "__init__", "kind": kind}
    async with running_app(BOARDS) as client:
        created = await refused(client, "/env/create", env_name="faulty", config=config)
        config["place"] = "policy"
        policy = await refused(client, "/policy/create", policy_name="faulty", config=config)
    assert created[0] == policy[0] == 424
    assert f"environment 'faulty' raised {kind} (test_contained_plugins.py:" in created[3]
    assert f"policy 'faulty' raised {kind} (test_contained_plugins.py:" in policy[3]


class Numpy(CountingEnvironment):
    """Shows and pays values of numpy wherever it may."""

    def _observe(self, reward: float) -> Observation:
        seen = super()._observe(reward)
        counts = {name: np.int64(count) for name, count in seen.achievements_counts.items()}
        data = {
            "step": np.int64(3),
            "view": np.arange(4).reshape(2, 2),
            "near": [np.float32(0.5)],
            "up": np.bool_(True),
        }
        return Observation(seen.text, data, counts, np.float32(reward))

    def step(self, calls: Any, *, invalid_reason: str | None = None) -> DecisionOutcome:
        outcome = super().step(calls, invalid_reason=invalid_reason)
        return replace(outcome, env_rewards=np.array([0.5]), terminated=np.bool_(False))

    def outcome_reward(self) -> Any:
        return np.float32(0.5)

    def snapshot(self) -> bytes:
        return b"{}"

    def restore(self, state: bytes) -> Observation:
        return self.reset(0)


class NumpyPolicy(PlannedPolicy):
    async def get_action(self, observation: Any, available_tools_specs: Any = None) -> Any:
        await super().get_action(observation)
        return add("a"), None, {"margins": np.array([0.5, 1.0])}, np.float32(0.25)


class ExactPolicy(PlannedPolicy):
    async def get_action(self, observation: Any, available_tools_specs: Any = None) -> Any:
        await super().get_action(observation)
        exact = {"prompt_token_ids": [1], "token_ids": [2], "logprobs": [-0.5], "versions": [[0, 0]]}
        return add("a"), None, exact | {"finish_reason": "stop"}, None


async def test_exact_tokens_of_a_plugin_need_no_field_that_has_a_default():
    async with running_app(boards(planned=lambda: ExactPolicy(add("a")))) as client:
        played = (await play(client, rollout("a")))["a"]
    tokens = played.trajectory.steps[0].policy_logprobs
    assert (tokens.prompt_ids_reused, tokens.prompt_token_ids, tokens.token_ids) == (0, (1,), (2,))


async def test_values_of_numpy_become_numbers_and_lists_on_every_route():
    counting = {"counting": EnvironmentPlugin(NoConfig, lambda config: Numpy())}
    plug_boards = replace(boards(planned=lambda: NumpyPolicy(add("a"))), environments=counting)
    data = {"step": 3, "view": [[0, 1], [2, 3]], "near": [0.5], "up": True}
    async with running_app(plug_boards) as client:
        made = await post(client, "/env/create", env_name="counting")
        step = await post(client, "/env/step", env_id=made["env_id"], tool_calls=CALLS)
        await post(client, "/env/snapshot", env_id=made["env_id"])
        policy_id = await new_policy(client, "planned", bound_env_id=made["env_id"])
        asked = await post(client, "/policy/step", policy_id=policy_id)
        played = (await play(client, rollout("a")))["a"]
    assert made["observation"]["data"] == data
    assert made["observation"]["achievements_counts"] == {"a": 0, "b": 0}
    assert (step["env_rewards"], step["reward"], step["observation"]["data"]) == ([0.5], 0.5, data)
    assert asked["meta"]["margins"] == [0.5, 1.0]
    assert played.trajectory.outcome_reward == 0.5
    assert played.trajectory.steps[0].policy_value_estimate == 0.25
    assert played.trajectory.steps[0].policy_logprobs == {"margins": [0.5, 1.0]}


def spoilt(**changes: Any) -> Any:
    """A `step` whose outcome has these values in it."""

    def step(self: Any, calls: Any, **options: Any) -> DecisionOutcome:
        return replace(CountingEnvironment.step(self, calls, **options), **changes)

    return step


def returning(value: Any) -> Any:
    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        return value

    return method


@pytest.mark.parametrize(
    ("method", "code", "told"),
    [
        ("step", spoilt(env_rewards=(float("nan"),)), "env_rewards is (nan,) (tuple); finite numbers are"),
        ("step", spoilt(env_rewards=0.5), "env_rewards is 0.5 (float); a tuple"),
        ("step", spoilt(env_rewards=("1",)), "env_rewards[0] is '1' (str); a number is"),
        ("step", spoilt(terminated="no"), "terminated is 'no' (str); a bool is"),
        ("step", spoilt(observation=None), "observation is None (NoneType); an Observation is"),
        ("step", spoilt(result=5), "result is 5 (int); a text is"),
        ("step", returning(None), "DecisionOutcome is"),
        ("reset", returning(None), "Observation is"),
        ("tools", returning(None), "tuple is"),
        ("tools", returning([{"type": "function"}]), "ToolSpec is"),
    ],
)
async def test_a_value_of_another_kind_is_an_error_of_the_plug_in_with_its_line(method, code, told):
    kind: Any = type("Odd", (CountingEnvironment,), {method: code})
    plug_boards = PlugBoards({"counting": EnvironmentPlugin(NoConfig, lambda config: kind())}, {})
    async with running_app(plug_boards) as client:
        answer = await client.post("/env/create", json={"env_name": "counting"})
        if answer.status_code == 200:
            body = {"env_id": answer.json()["env_id"], "tool_calls": CALLS}
            answer = await client.post("/env/step", json=body)
    assert (answer.status_code, answer.json()["code"]) == (424, "critical_error"), answer.text
    detail, line = answer.json()["detail"], code.__code__.co_firstlineno
    assert told in detail
    assert any(f"(test_contained_plugins.py:{at})" in detail for at in (line, line + 1)), detail


class Unsound(CountingEnvironment):
    def outcome_reward(self) -> float:
        return float("nan")


class Mute(PlannedPolicy):
    async def get_action(self, *arguments: Any) -> Any:
        return None


async def test_a_wrong_result_that_our_own_code_meets_has_the_line_of_the_plug_in():
    found = boards(mute=Mute)
    unsound = EnvironmentPlugin(NoConfig, lambda config: Unsound())
    plug_boards = replace(found, environments={**found.environments, "unsound": unsound})
    async with running_app(plug_boards) as client:
        env, policy = {"env_name": "unsound"}, {"policy_name": "mute"}
        found = await play(client, rollout("env", env=env), rollout("policy", policy=policy))
    for name, method in (("env", Unsound.outcome_reward), ("policy", Mute.get_action)):
        line = method.__code__.co_firstlineno
        assert found[name].failure.detail.endswith(f"(test_contained_plugins.py:{line})"), found[name].failure
