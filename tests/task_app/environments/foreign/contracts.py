"""The contract of environments, promise by promise, for environments of many names."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from task_app.plugins import default_plug_boards
from task_app.protocols import Environment
from task_app.settings import Reach
from task_app.testing import EnvironmentContract

PROMISES = [name for name in dir(EnvironmentContract) if name.startswith("test_")]


def environment(env_name: str, config: Mapping[str, Any] | None = None, **reach: Any) -> Environment:
    """The environment of the name, within reach of tests' servers."""
    boards = replace(default_plug_boards(), reach=Reach(**{"environment_deadline_s": 20.0, **reach}))
    return boards.environment(env_name, config or {})


def keeps(
    promise: str, env_name: str, config: Mapping[str, Any] | None = None, words: str = "words", **reach: Any
) -> None:
    """Check one promise of the contract, as `task_app.testing` has it."""
    contract = EnvironmentContract()
    contract.words = words
    contract.decisions = 40
    contract.make = lambda: environment(env_name, config, **reach)  # type: ignore[method-assign]
    getattr(contract, promise)()
