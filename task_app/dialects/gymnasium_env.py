"""Our environments as `gymnasium.Env`, in process: `pip install turnwise[gym]`.

    import gymnasium
    env = gymnasium.make("task_app.dialects.gymnasium_env:Turnwise/Crafter-v0", config={"text": "compact"})
    observation, info = env.reset(seed=17)
    observation, reward, terminated, truncated, info = env.step(["move_right", "do"])

A step is one decision. `reward` is the sum of the decision's env rewards. `info["decision_rewards"]`
lists the achievements of the decision, if the environment has achievements.

`reset(seed=17)` starts the same world as POST /env/create with seed 17.
"""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

from shared_schemas.messages import ToolSpec
from shared_schemas.rewards import decision_rewards
from task_app.episode.actions import requests_from_wire
from task_app.episode.decisions import achievements_added
from task_app.episode.release import close
from task_app.observing.replaying import Pictured
from task_app.plugins import default_plug_boards
from task_app.policies.random_calls import random_call
from task_app.protocols import DecisionOutcome, Environment, Observation, ToolRequest

SEEDS = 2**31 - 1
RENDER_SIDE = 288


class TurnwiseEnv(gymnasium.Env[dict[str, Any], Any]):
    """Wraps an `Environment` in gymnasium's API. It plays one episode at a time and is not thread-safe.

    Args:
        environment: the name of an environment of the task app, or an environment of your own.
        config: the config of the named environment, as in POST /env/create.
        render_mode: `ansi` makes `render` return the observation's text. `rgb_array` makes `render` return a
            picture, which requires an environment that draws pictures.

    Raises:
        UnknownName, InvalidRequest: the environment is unknown, or its config is wrong.
        ValueError: render_mode is `rgb_array`, and the environment draws no pictures.
    """

    metadata = {"render_modes": ["ansi", "rgb_array"], "render_fps": 4}  # noqa: RUF012  # gymnasium's own form

    def __init__(
        self,
        environment: Environment | str = "crafter",
        *,
        config: Mapping[str, Any] | None = None,
        render_mode: str | None = None,
    ) -> None:
        if isinstance(environment, str):
            environment = default_plug_boards().environment(environment, config or {})
        if render_mode == "rgb_array" and not isinstance(environment, Pictured):
            raise ValueError(f"environment {environment.name!r} draws no pictures; render_mode may be 'ansi'")
        self.render_mode = render_mode
        self._environment = environment
        self._observation = Observation(text="", data={})
        self._turn = 0
        self.action_space = self._decisions = DecisionSpace(environment.tools())
        self.observation_space = gymnasium.spaces.Dict({"text": TextSpace(), "data": JsonSpace()})

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start the world of `seed`. Without a seed, draw one from gymnasium's generator `np_random`.

        Raises:
            ValueError: the seed is outside [0, 2**31 - 1), or `options` is not empty.
        """
        if options:
            raise ValueError(f"unknown reset options {sorted(options)}; give the config to gymnasium.make")
        if seed is not None and not 0 <= seed < SEEDS:
            raise ValueError(f"seed is {seed}; a world's seed lies in [0, {SEEDS})")
        super().reset(seed=seed)
        world = int(self.np_random.integers(SEEDS)) if seed is None else seed
        self._observation, self._turn = self._environment.reset(world), 0
        return self._dump_observation(), {"seed": world, **self._facts()}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Execute one decision.

        Raises:
            ValueError: the action cannot be read.
            EpisodeOver: the episode has ended, or none was started.
        """
        before = self._observation
        outcome = self._environment.step(self._decisions.requests(action))
        self._observation = outcome.observation
        self._turn += 1
        reward, info = float(sum(outcome.env_rewards)), self._info(before, outcome)
        return self._dump_observation(), reward, outcome.terminated, outcome.truncated, info

    def render(self) -> Any:
        if self.render_mode == "ansi":
            return self._observation.text
        if self.render_mode == "rgb_array" and isinstance(self._environment, Pictured):
            frame: npt.NDArray[np.uint8] = self._environment.frame(RENDER_SIDE, RENDER_SIDE)
            return frame
        return None

    def close(self) -> None:
        close(self._environment)

    def _dump_observation(self) -> dict[str, Any]:
        return {"text": self._observation.text, "data": dict(self._observation.data)}

    def _facts(self) -> dict[str, Any]:
        return {
            "turn": self._turn,
            "achievements_counts": dict(self._observation.achievements_counts),
            "outcome_reward": self._environment.outcome_reward(),
        }

    def _info(self, before: Observation, outcome: DecisionOutcome) -> dict[str, Any]:
        was, now = before.achievements_counts, outcome.observation.achievements_counts
        info = self._facts() | {
            "env_rewards": list(outcome.env_rewards),
            "executed_actions": list(outcome.executed_actions),
            "achievements_added": achievements_added(was, now),
            "invalid_reason": outcome.invalid_reason,
            "tool_result": outcome.result,
        }
        if now:
            info["decision_rewards"] = decision_rewards(was, now, turn=self._turn).model_dump(mode="json")
        return info


gymnasium.register(
    id="Turnwise/Crafter-v0",
    entry_point="task_app.dialects.gymnasium_env:TurnwiseEnv",
    kwargs={"environment": "crafter"},
)

_LONGEST_SAMPLE = 4


class _Loose(gymnasium.Space[Any]):
    """Base of spaces that have no shape and no array form.

    Two spaces are equal if their `_key` is equal. Vector environments check that spaces are equal.
    """

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash((type(self), self._key()))

    def _key(self) -> str:
        return ""


class TextSpace(_Loose):
    """The space of all texts; gymnasium's own Text limits length and alphabet."""

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> str:
        return "".join(self.np_random.choice(list("abc \n"), size=8))


class JsonSpace(_Loose):
    """The space of all objects of JSON values. The environment defines the keys."""

    def contains(self, x: Any) -> bool:
        try:
            return isinstance(x, dict) and json.loads(json.dumps(x)) == x
        except (TypeError, ValueError):
            return False

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> dict[str, Any]:
        return {}


class DecisionSpace(_Loose):
    """The space of decisions: one tool call `{"name", "arguments"}`, a list of calls, or a list of names.

    A list of names contains action names. The environment may refuse a decision although this space contains
    it; the environment then executes a no-op (DESIGN.md 4.4).
    """

    def __init__(self, tools: Sequence[ToolSpec]) -> None:
        super().__init__()
        self._specs = [tool.model_dump(mode="json") for tool in tools]
        # A list of names is allowed if there is only one tool and its only argument is an array.
        properties = tools[0].function.parameters.get("properties", {}) if len(tools) == 1 else {}
        lists = [name for name, part in properties.items() if part.get("type") == "array"]
        is_only = len(lists) == len(properties) == 1
        self._name: str | None = tools[0].function.name if is_only else None
        self._list: str = lists[0] if is_only else ""

    def _key(self) -> str:
        return json.dumps(self._specs, sort_keys=True)

    def contains(self, x: Any) -> bool:
        try:
            self.requests(x)
        except (TypeError, ValueError):
            return False
        return True

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> dict[str, Any]:
        """Return a random call that a tool accepts; `mask` and `probability` are ignored."""
        source = random.Random(int(self.np_random.integers(2**63)))
        name, arguments = random_call(self._specs, source, longest=_LONGEST_SAMPLE)
        return {"name": name, "arguments": arguments}

    def requests(self, action: Any) -> tuple[ToolRequest, ...]:
        """Return the tool calls of an action.

        Raises:
            ValueError: the action is neither calls nor names. Names are allowed only if the environment has
                exactly one tool, whose only argument is a list.
        """
        if isinstance(action, Mapping):
            return requests_from_wire([action])
        if not isinstance(action, list | tuple):
            raise ValueError(f"an action is a tool call or a list of names, not {type(action).__name__}")
        if action and all(isinstance(name, str) for name in action):
            if self._name is None:
                raise ValueError("names alone fit an environment whose only tool takes one list; give a call")
            return requests_from_wire([{"name": self._name, "arguments": {self._list: list(action)}}])
        if not all(isinstance(call, Mapping) for call in action):
            raise ValueError("an action that is a list holds tool calls, or names, and not both")
        return requests_from_wire(action)
