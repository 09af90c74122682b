"""The peer of bench/http_batch.py: Crafter, served by OpenEnv's own server in a Python that has OpenEnv.

    python bench/peers/openenv_crafter.py {stock|ours} PORT
    python bench/peers/openenv_crafter.py parts     # what it would be served by, if it has all that it needs

`stock` is the original crafter package (it always draws its picture; the reply has inventory and
achievements). `ours` is the task app's own environment with the whole observation that our routes send.
"""

import sys
from importlib.util import find_spec
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class CrafterAction(Action):
    actions: list[str]


class CrafterObservation(Observation):
    text: str = ""
    data: dict[str, Any] = Field(default_factory=dict)
    achievements_counts: dict[str, int] = Field(default_factory=dict)


class Stock(Environment):
    """One `crafter.Env`."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> CrafterObservation:
        import crafter

        self._env = crafter.Env(seed=seed)
        self._env.reset()
        self._ids = {name: index for index, name in enumerate(self._env.action_names)}
        return CrafterObservation(text="started")

    def step(self, action: CrafterAction, timeout_s: float | None = None, **_: Any) -> CrafterObservation:
        for name in action.actions:
            _, reward, done, info = self._env.step(self._ids[name])
        return CrafterObservation(
            done=done,
            reward=float(reward),
            data={"inventory": info["inventory"]},
            achievements_counts=info["achievements"],
        )

    @property
    def state(self) -> State:
        return self._state


class Ours(Stock):
    """The task app's environment."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> CrafterObservation:
        from task_app.environments.crafter.environment import CrafterEnvironment

        self._env = CrafterEnvironment()
        return self._shown(self._env.reset(seed or 0), 0.0, False)

    def step(self, action: CrafterAction, timeout_s: float | None = None, **_: Any) -> CrafterObservation:
        from task_app.protocols import ToolRequest

        outcome = self._env.step((ToolRequest("interact_many", {"actions": action.actions}, ""),))
        return self._shown(
            outcome.observation, sum(outcome.env_rewards), outcome.terminated or outcome.truncated
        )

    def _shown(self, observation: Any, reward: float, done: bool) -> CrafterObservation:
        return CrafterObservation(
            text=observation.text,
            data=dict(observation.data),
            achievements_counts=dict(observation.achievements_counts),
            reward=reward,
            done=done,
        )


def part(fast: str, plain: str) -> str:
    return fast if find_spec(fast) else plain


if __name__ == "__main__":
    # openenv-core does not bring uvloop and httptools.
    loop, http = part("uvloop", "asyncio"), part("httptools", "h11")
    if sys.argv[1] == "parts":
        import crafter  # noqa: F401

        from task_app.environments.crafter.environment import CrafterEnvironment  # noqa: F401

        print(f"{loop} and {http}")
        sys.exit()
    kind = {"stock": Stock, "ours": Ours}[sys.argv[1]]
    app = create_fastapi_app(kind, CrafterAction, CrafterObservation, max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), loop=loop, http=http, log_level="error")
