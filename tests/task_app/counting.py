"""Test doubles: an environment that counts what it is told, policies that do what a test says."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import httpx
from pydantic import Field

from shared_schemas.base import Body
from shared_schemas.messages import FunctionSpec, Message, ToolSpec
from task_app.app import create_app
from task_app.errors import EpisodeOver
from task_app.plugins import POLICIES, EnvironmentPlugin, PlugBoards, PolicyPlugin
from task_app.protocols import DecisionOutcome, Observation, PastDecision, PolicyObservation, ToolRequest
from task_app.settings import Settings
from tests.openapi import Document

KEY = "the-primary-key-of-the-tests"


class Clock:
    """Seconds that a test sets."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def tick(self) -> None:
        self.now_s += 1.0


class CountingConfig(Body):
    length: int = Field(default=1_000, ge=1)


class CountingEnvironment:
    """Tool `add(names)`: an env step per name, which raises the counter of that name.

    The first rise pays 1. `end` terminates; `boom` raises, as a broken environment would.
    """

    name = "counting"
    outcome_definition = "number of different names counted"

    def __init__(self, config: CountingConfig | None = None) -> None:
        self._length = (config or CountingConfig()).length
        self._counts: dict[str, int] = {}
        self._steps = 0
        self._over = True

    def reset(self, seed: int) -> Observation:
        self._counts, self._steps, self._over = {"a": 0, "b": 0}, 0, False
        return self._observe(0.0)

    def step(self, calls: Sequence[ToolRequest], *, invalid_reason: str | None = None) -> DecisionOutcome:
        if self._over:
            raise EpisodeOver()
        names, reason = self._names(calls, invalid_reason)
        rewards, ended = [], False
        for name in names:
            if name == "boom":
                raise KeyError("boom")
            rewards.append(self._count(name))
            ended = name == "end"
            if ended or self._steps >= self._length:
                break
        self._over = ended or self._steps >= self._length
        return DecisionOutcome(
            observation=self._observe(rewards[-1]),
            env_rewards=tuple(rewards),
            terminated=ended,
            truncated=self._over and not ended,
            executed_actions=tuple(names[: len(rewards)]),
            invalid_reason=reason,
            result=reason or f"did {len(rewards)}",
        )

    def tools(self) -> tuple[ToolSpec, ...]:
        return (ToolSpec(function=FunctionSpec(name="add", parameters={"type": "object"})),)

    def messages(self, observation: Observation, past: Sequence[PastDecision]) -> tuple[Message, ...]:
        shown = f"{observation.text} past={len(past)}"
        return (Message(role="system", content="count"), Message(role="user", content=shown))

    def outcome_reward(self) -> float:
        return float(sum(count > 0 for count in self._counts.values()))

    def _names(
        self, calls: Sequence[ToolRequest], invalid_reason: str | None
    ) -> tuple[list[str], str | None]:
        if invalid_reason is None and not calls:
            invalid_reason = "no call"
        names: list[str] = []
        for call in calls:
            if call.name != "add" or call.arguments is None:
                return ["noop"], f"cannot carry out {call.name!r}"
            names += call.arguments.get("names", [])
        return (["noop"], invalid_reason) if invalid_reason else (names, None)

    def _count(self, name: str) -> float:
        self._steps += 1
        if name not in self._counts:
            return 0.0
        self._counts[name] += 1
        return float(self._counts[name] == 1)

    def _observe(self, reward: float) -> Observation:
        text = f"step {self._steps}"
        return Observation(text, {"step": self._steps}, dict(self._counts), reward)


def add(*names: str) -> dict[str, Any]:
    """The action that calls `add` with these names."""
    call = {"id": "c", "name": "add", "arguments": json.dumps({"names": list(names)})}
    return {"type": "tool_call", "tool_calls": [call]}


Move = dict[str, Any] | BaseException


class PlannedPolicy:
    """Plays a list of actions, the last one for ever; an exception in it is raised."""

    name = "planned"

    def __init__(self, *moves: Move, on_ask: Callable[[], None] = lambda: None) -> None:
        self._moves = list(moves)
        self._on_ask = on_ask
        self.seen: list[PolicyObservation] = []

    async def get_action(
        self, observation: Any, available_tools_specs: list[dict[str, Any]] | None = None
    ) -> tuple[dict[str, Any], str | None, dict[str, Any] | None, float | None]:
        self._on_ask()
        self.seen.append(observation)
        move = self._moves[min(len(self.seen), len(self._moves)) - 1]
        if isinstance(move, BaseException):
            raise move
        return move, move.get("content"), None, None


class WaitingPolicy:
    """Waits for the test: `asked` says that it was asked, `go` lets it answer."""

    name = "waiting"

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.go = asyncio.Event()

    async def get_action(
        self, observation: Any, available_tools_specs: list[dict[str, Any]] | None = None
    ) -> tuple[dict[str, Any], str | None, dict[str, Any] | None, float | None]:
        self.asked.set()
        await self.go.wait()
        return add("a"), None, None, None


class NoConfig(Body):
    pass


class PlanConfig(Body):
    names: tuple[str, ...] = ("a",)


def boards(**policies: Callable[[], Any]) -> PlugBoards:
    """The counting environment, policy `planned`, the real `openai`, and those of the test."""
    named = {
        name: PolicyPlugin(NoConfig, lambda config, context, make=make: make())
        for name, make in policies.items()
    }
    planned = PolicyPlugin(PlanConfig, lambda config, context: PlannedPolicy(add(*config.names)))
    return PlugBoards(
        {"counting": EnvironmentPlugin(CountingConfig, CountingEnvironment)},
        {"planned": planned, "openai": POLICIES["openai"], **named},
    )


def rollout(rollout_id: str, **changes: Any) -> dict[str, Any]:
    """The JSON of a rollout request of run `r`: two decisions of the planned policy."""
    return {
        "rollout_id": rollout_id,
        "run_id": "r",
        "start": {"seed": 1},
        "env": {"env_name": "counting"},
        "policy": {"policy_name": "planned"},
        "limits": {"max_decisions": 2},
        **changes,
    }


@cache
def openapi() -> Document:
    """What the task app declares; plug-ins are no part of it."""
    return Document(create_app(Settings(api_keys=(KEY,))).openapi())


@asynccontextmanager
async def running_app(
    plug_boards: PlugBoards | None = None, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a started app, without a socket; it sends the key.

    Every answer is held against /openapi.json, which FastAPI does for none that is made as a Response.
    """
    app = create_app(Settings(api_keys=(KEY,), **settings), boards=plug_boards or boards())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    headers, hooks = {"X-API-Key": KEY}, {"response": [openapi().check]}
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(
            transport=transport, base_url="http://task-app", headers=headers, event_hooks=hooks
        ) as client,
    ):
        yield client
