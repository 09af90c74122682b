"""Our environments as `gymnasium.Env`, in process: `pip install turnwise[gym]`.

    import gymnasium
    env = gymnasium.make("task_app.dialects.gymnasium_env:Turnwise/Crafter-v0", config={"text": "compact"})
    observation, info = env.reset(seed=17)
    observation, reward, terminated, truncated, info = env.step(["move_right", "do"])

A step is one decision: `reward` is the sum of its env rewards, `info["decision_rewards"]` what it achieved.
The seed is the world's, as everywhere: `reset(seed=17)` starts what POST /env/create starts with seed 17.
"""

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

from shared_schemas.rewards import decision_rewards
from task_app.decisions import achievements_added
from task_app.dialects.gymnasium_spaces import DecisionSpace, JsonSpace, TextSpace
from task_app.observing.pictures import Pictured
from task_app.plugins import default_plug_boards
from task_app.protocols import DecisionOutcome, Environment, Observation

SEEDS = 2**31 - 1
RENDER_SIDE = 288


class TurnwiseEnv(gymnasium.Env[dict[str, Any], Any]):
    """An `Environment` of ours behind gymnasium's API; one episode at a time, not thread-safe.

    Args:
        environment: a name of the plug board, or an environment of your own.
        config: of the named environment, as in POST /env/create.
        render_mode: `ansi` renders the text, `rgb_array` a picture where the environment draws one.

    Raises:
        UnknownName, InvalidRequest: there is no such environment, or its config is wrong.
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
        """Start the world of `seed`; without one, a world drawn from the generator that the last seed made.

        Raises:
            ValueError: the seed is outside [0, 2**31 - 1), or there are options: none is known.
        """
        if options:
            raise ValueError(f"unknown reset options {sorted(options)}; give the config to gymnasium.make")
        if seed is not None and not 0 <= seed < SEEDS:
            raise ValueError(f"seed is {seed}; a world's seed lies in [0, {SEEDS})")
        super().reset(seed=seed)
        world = int(self.np_random.integers(SEEDS)) if seed is None else seed
        self._observation, self._turn = self._environment.reset(world), 0
        return self._shown(), {"seed": world, **self._facts()}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Carry out one decision.

        Raises:
            ValueError: the action cannot be read.
            EpisodeOver: the episode has ended, or none was started.
        """
        before = self._observation
        outcome = self._environment.step(self._decisions.requests(action))
        self._observation = outcome.observation
        self._turn += 1
        reward = float(sum(outcome.env_rewards))
        return (
            self._shown(),
            reward,
            outcome.terminated,
            outcome.truncated,
            self._told(before, outcome),
        )

    def render(self) -> Any:
        if self.render_mode == "ansi":
            return self._observation.text
        if self.render_mode == "rgb_array" and isinstance(self._environment, Pictured):
            frame: npt.NDArray[np.uint8] = self._environment.frame(RENDER_SIDE, RENDER_SIDE)
            return frame
        return None

    def _shown(self) -> dict[str, Any]:
        return {"text": self._observation.text, "data": dict(self._observation.data)}

    def _facts(self) -> dict[str, Any]:
        return {
            "turn": self._turn,
            "achievements_counts": dict(self._observation.achievements_counts),
            "outcome_reward": self._environment.outcome_reward(),
        }

    def _told(self, before: Observation, outcome: DecisionOutcome) -> dict[str, Any]:
        was, now = before.achievements_counts, outcome.observation.achievements_counts
        told = self._facts() | {
            "env_rewards": list(outcome.env_rewards),
            "executed_actions": list(outcome.executed_actions),
            "achievements_added": achievements_added(was, now),
            "invalid_reason": outcome.invalid_reason,
            "tool_result": outcome.result,
        }
        if now:
            told["decision_rewards"] = decision_rewards(was, now, turn=self._turn).model_dump(mode="json")
        return told


gymnasium.register(
    id="Turnwise/Crafter-v0",
    entry_point="task_app.dialects.gymnasium_env:TurnwiseEnv",
    kwargs={"environment": "crafter"},
)
