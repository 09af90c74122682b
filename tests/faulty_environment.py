"""An operator's file with an environment that goes wrong in the way that `kind` names."""

import asyncio
import sys
from typing import Any

import numpy as np

from shared_schemas.base import Body
from shared_schemas.messages import FunctionSpec, Message, ToolSpec
from task_app.plugins import EnvironmentPlugin
from task_app.protocols import DecisionOutcome, Observation

# The trial of a job plays a world below it.
FIRST_ODD_SEED = 1000


class Config(Body):
    kind: str = "fine"


class WithoutText(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Faulty:
    name, outcome_definition = "faulty", "success: the number of calls"

    def __init__(self, config: Config) -> None:
        self._kind, self._calls = config.kind, 0

    def reset(self, seed: int) -> Observation:
        self._calls = 0
        if self._kind == "no_reset":
            raise RuntimeError("no level of this number")
        if self._kind == "odd_worlds" and seed > FIRST_ODD_SEED and seed % 3 == 2:
            raise RuntimeError(f"no level of the number {seed}")
        if self._kind == "rare_worlds" and seed > FIRST_ODD_SEED and seed % 17 == 2:
            raise RuntimeError(f"no level of the number {seed}")
        return self._observe()

    def step(self, calls: Any, *, invalid_reason: str | None = None) -> DecisionOutcome:
        self._calls += 1
        if self._kind == "stop_iteration":
            next(iter([]))
        if self._kind == "exit":
            sys.exit(3)
        if self._kind == "cancel":
            raise asyncio.CancelledError
        if self._kind == "bad_text":
            raise WithoutText
        reward = np.float32(0.5) if self._kind == "numpy_values" else 0.5
        return DecisionOutcome(
            self._observe(), (reward,), self._calls >= 3, executed_actions=("go",), result="went"
        )

    def _observe(self) -> Observation:
        return Observation(f"turn {self._calls}", {"turn": self._calls}, {"moves": self._calls}, 0.0)

    def tools(self) -> tuple[ToolSpec, ...]:
        parameters = {"type": "object", "properties": {}}
        return (ToolSpec(function=FunctionSpec(name="go", description="go", parameters=parameters)),)

    def messages(self, observation: Observation, past: object) -> tuple[Message, ...]:
        return (Message(role="user", content=observation.text),)

    def outcome_reward(self) -> float:
        return float(self._calls)


ENVIRONMENTS = {"faulty": EnvironmentPlugin(Config, Faulty)}
