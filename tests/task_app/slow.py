"""Test doubles that take their time: an environment whose steps wait for the test, in a thread."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from task_app.plugins import EnvironmentPlugin, PlugBoards
from task_app.protocols import DecisionOutcome, Observation, ToolRequest
from tests.task_app.counting import CountingConfig, CountingEnvironment, boards


class Gates:
    """`reset` and `step` wait until they are open; `entered` says that a call is inside."""

    def __init__(self) -> None:
        self.reset, self.step, self.entered = threading.Event(), threading.Event(), threading.Event()
        self.reset.set()
        self.calls = 0

    def wait(self, gate: threading.Event) -> None:
        self.entered.set()
        assert gate.wait(20.0), "the test never opened the gate"


class SlowEnvironment(CountingEnvironment):
    """The counting environment behind gates."""

    name = "slow"

    def __init__(self, config: CountingConfig, gates: Gates) -> None:
        super().__init__(config)
        self._gates = gates

    def reset(self, seed: int) -> Observation:
        self._gates.wait(self._gates.reset)
        return super().reset(seed)

    def step(self, calls: Sequence[ToolRequest], *, invalid_reason: str | None = None) -> DecisionOutcome:
        self._gates.calls += 1
        self._gates.wait(self._gates.step)
        return super().step(calls, invalid_reason=invalid_reason)


def slow_boards(gates: Gates, **policies: Callable[[], Any]) -> PlugBoards:
    """The boards of `counting`, with the environment `slow` too."""
    plugged = boards(**policies)
    slow = EnvironmentPlugin(CountingConfig, lambda config: SlowEnvironment(config, gates))
    return PlugBoards({**plugged.environments, "slow": slow}, plugged.policies)
