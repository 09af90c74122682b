"""Policies without a model: the Crafter teacher and uniform random play.

The teacher sees only `PolicyObservation.data`, which contains what a model may also read: the 9x7 view and
the status bar.
"""

import random
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from shared_schemas.base import Body
from task_app.environments.crafter.landmarks import read_facts
from task_app.environments.crafter.map_memory import MapMemory
from task_app.environments.crafter.rules import ACTIONS
from task_app.policies.crafter_teacher import decide, decide_with_memory
from task_app.policies.random_calls import (
    ByChance,
    DetourConfig,
    DetourTeacher,
    Tools,
    call_answer,
    random_call,
)
from task_app.protocols import PolicyAnswer

NO_TOOLS = "no tools were offered, and random play has no words of its own"


class RandomConfig(Body):
    """Settings of random play."""

    max_actions: int = Field(
        default=8, ge=1, le=8, description="length of every list in a call, as far as its tool allows"
    )
    seed: int = Field(default=0, ge=0, strict=True)


class TeacherConfig(DetourConfig):
    """Settings of the Crafter teacher."""

    memory: bool = Field(default=False, description="remember seen cells; otherwise play from the view alone")
    max_actions: int = Field(default=8, ge=1, le=8, description="limit of actions in a decision")


class RandomPolicy(ByChance[RandomConfig]):
    """Calls a random tool with random arguments; in Crafter, these are `max_actions` random actions.

    If the environment lists texts that it accepts as answers, returns a random one of these texts. If there
    are neither such texts nor tools, returns the text `NO_TOOLS`.
    """

    name = "random"
    config_type = RandomConfig

    async def choose(self, observation: Any, tools: Tools) -> PolicyAnswer:
        if answers := _list_answers(observation):
            return _make_text_answer(self._random.choice(answers))
        if not tools:
            return _make_text_answer(NO_TOOLS)
        name, arguments = random_call(tools, self._random, longest=self.config.max_actions)
        return call_answer(name, arguments)


class CrafterTeacher(DetourTeacher[TeacherConfig]):
    """Plays Crafter by rules; without memory, a decision depends only on the compact text observation."""

    name = "crafter_teacher"
    config_type = TeacherConfig

    def __init__(self, config: TeacherConfig | None = None) -> None:
        super().__init__(config)
        self._memory = MapMemory() if self.config.memory else None

    async def choose(self, observation: Any, tools: Tools) -> PolicyAnswer:
        answers = _list_answers(observation)
        limit = 1 if answers else _limit_actions(self.config.max_actions, tools)
        actions = self.actions(observation.data, max_actions=limit)
        if detour := self.makes_detour():
            actions = random_actions(self._random, limit)
        if answers:
            return _make_text_answer(answers[ACTIONS.index(actions[0])], exploratory=detour)
        return call_answer("interact_many", {"actions": actions}, exploratory=detour)

    def actions(self, data: Mapping[str, Any], *, max_actions: int | None = None) -> list[str]:
        """Return the actions that the rules choose: at most `max_actions` (None: `config.max_actions`)."""
        limit = self.config.max_actions if max_actions is None else max_actions
        if self._memory is None:
            return decide(read_facts(data), max_actions=limit)
        return decide_with_memory(self._memory.facts(data), max_actions=limit)

    def snapshot(self) -> dict[str, Any]:
        memory = self._memory.snapshot() if self._memory else None
        return {**super().snapshot(), "memory": memory}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        if self._memory is not None:
            self._memory.restore(state.get("memory"))


def random_actions(source: random.Random, count: int) -> list[str]:
    return [source.choice(ACTIONS) for _ in range(count)]


def _list_answers(observation: Any) -> list[str]:
    """Return the texts that the environment accepts as answers, in the order of ACTIONS.

    The list is empty if the environment expects tool calls.
    """
    names = getattr(observation, "data", {}).get("answer_names")
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else []


def _make_text_answer(text: str, *, exploratory: bool = False) -> PolicyAnswer:
    action: dict[str, Any] = {"type": "text", "content": text}
    return (action | {"exploratory": True} if exploratory else action), None, None, None


def _limit_actions(limit: int, tools: Tools) -> int:
    """Return `limit`, or the offered tool's own limit of actions per call if that is lower."""
    for tool in tools:
        actions = tool["function"]["parameters"].get("properties", {}).get("actions", {})
        limit = min(limit, actions.get("maxItems", limit))
    return limit
