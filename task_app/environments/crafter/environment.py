"""Crafter as an `Environment`: the engine's state becomes text and data, and tool calls become env steps."""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from shared_schemas.base import Body
from shared_schemas.messages import Message, ToolSpec
from task_app.environments.crafter import prompt
from task_app.environments.crafter.engine import CrafterEngine
from task_app.environments.crafter.map_memory import MapMemory
from task_app.environments.crafter.prompt import InvalidCall, read_actions
from task_app.environments.crafter.rules import ACTIONS, RULES, VITALS
from task_app.environments.crafter.snapshot import pack, unpack
from task_app.environments.crafter.text import compact_text, full_text
from task_app.episode.decisions import achievements_added
from task_app.errors import EpisodeOver, started
from task_app.protocols import DecisionOutcome, Observation, PastDecision, ToolRequest

# Below this daylight the game's picture is dark and noisy, as in stock crafter.
DARK_BELOW = 0.5
_items = itemgetter(*(name for name in RULES.item_start if name not in VITALS))
_ACTION_IDS = {name: index for index, name in enumerate(ACTIONS)}


class CrafterConfig(Body):
    """Settings of one Crafter environment."""

    text: Literal["full", "compact", "balrog"] = Field(
        default="full",
        description="full: the usual layout; compact: 25 to 60 words for small models; balrog: the messages "
        "of that benchmark, answered by the name of one action",
    )
    memory: bool = Field(
        default=False, description="compact: walks lead to everything seen in the episode, not only in view"
    )
    max_actions: int = Field(default=8, ge=1, le=8, description="limit of actions in one call (maxItems)")
    length: int = Field(default=10_000, ge=1, le=1_000_000, description="env steps before truncation")
    history: int = Field(
        default=16, ge=1, le=100, description="balrog: observations in a prompt, the present one included"
    )

    @model_validator(mode="after")
    def _refuse_without_effect(self) -> Self:
        unused = "max_actions" if self.text == "balrog" else "history"
        if getattr(self, unused) != type(self).model_fields[unused].default:
            fact = "where a decision is one action" if self.text == "balrog" else "it is for 'balrog'"
            raise ValueError(f"{unused} has no effect with text {self.text!r}: {fact}")
        if self.memory and self.text != "compact":
            raise ValueError(f"memory has no effect with text {self.text!r}: it is for 'compact'")
        return self


class CrafterEnvironment:
    """Runs one episode of Crafter; the same seed and calls give the same episode in every process."""

    name = "crafter"
    quick_step = True
    outcome_definition = "unique achievements: how many different ones the episode unlocked (0 to 22)"

    def __init__(self, config: CrafterConfig | None = None) -> None:
        self.config = config or CrafterConfig()
        self._engine: CrafterEngine | None = None
        self._last: tuple[float, Mapping[str, Any]] = (0.0, prompt.NO_NEWS)
        self._memory = MapMemory() if self.config.memory else None

    def reset(self, seed: int) -> Observation:
        self._engine = CrafterEngine(seed, length=self.config.length)
        self._engine.reset()
        return self._observe(0.0, prompt.NO_NEWS)

    def snapshot(self) -> bytes:
        """Return the game (about 8 KB) and the map memory as bytes.

        Raises EpisodeOver before the first reset.
        """
        reward, news = self._last
        memory = self._memory.snapshot() if self._memory else None
        return pack(started(self._engine), reward=reward, news=news, memory=memory)

    def restore(self, state: bytes) -> Observation:
        engine, reward, news, memory = unpack(state)
        if engine.length != self.config.length:
            raise ValueError(
                f"the snapshot's episode is {engine.length} env steps long, this environment's "
                f"config.length is {self.config.length}"
            )
        if self._memory is not None:  # empty if the snapshot contains no memory
            self._memory = MapMemory()
            if memory is not None:
                self._memory.restore(memory)
        self._engine = engine
        return self._observe(reward, news)

    def reseed(self, seed: int) -> None:
        started(self._engine).reseed(seed)

    def step(self, calls: Sequence[ToolRequest], *, invalid_reason: str | None = None) -> DecisionOutcome:
        self._require_running()
        return self._carry_out(*self._plan(calls, invalid_reason, max_actions=self.config.max_actions))

    def _carry_out(self, actions: Sequence[str], reason: str | None) -> DecisionOutcome:
        engine = self._require_running()
        health, counts = engine.inventory["health"], dict(engine.achievements)
        rewards, has_effect = _run(engine, actions)
        news = {
            "unlocked": achievements_added(counts, engine.achievements),
            "health_change": int(engine.inventory["health"] - health),
            "no_effect": not has_effect,
            "invalid": reason,
        }
        action_names = tuple(actions[: len(rewards)])
        return DecisionOutcome(
            observation=self._observe(rewards[-1], news),
            env_rewards=tuple(rewards),
            terminated=engine.dead,
            truncated=engine.over and not engine.dead,
            executed_actions=action_names,
            invalid_reason=reason,
            result=prompt.result_text(action_names, news),
        )

    def tools(self) -> tuple[ToolSpec, ...]:
        return (prompt.tool_spec(self.config.max_actions),)

    def messages(self, observation: Observation, past: Sequence[PastDecision]) -> tuple[Message, ...]:
        if self.config.text == "compact":
            return (Message(role="user", content=observation.text),)
        return (
            Message(role="system", content=prompt.system_prompt(self.config.max_actions)),
            Message(role="user", content=prompt.user_text(observation.text, past)),
        )

    def frame(self, width: int, height: int) -> npt.NDArray[np.uint8]:
        """Draw the game as stock crafter does, as an RGB picture [height, width, 3].

        The picture is for people; it is not shown to models. Raises ValueError for a side shorter than 9
        pixels.
        """
        return started(self._engine).frame(width, height)

    def outcome_reward(self) -> float:
        """Return the number of different achievements unlocked so far; 0 before the first reset."""
        return float(sum(count > 0 for count in self._engine.achievements.values())) if self._engine else 0.0

    def _require_running(self) -> CrafterEngine:
        engine = started(self._engine)
        if engine.over:
            raise EpisodeOver()
        return engine

    def _plan(
        self, calls: Sequence[ToolRequest], invalid_reason: str | None, *, max_actions: int
    ) -> tuple[list[str], str | None]:
        if invalid_reason is not None:
            return ["noop"], invalid_reason
        try:
            return read_actions(calls, known=ACTIONS, max_actions=max_actions), None
        except InvalidCall as exc:
            return ["noop"], str(exc)

    def _observe(self, reward: float, news: Mapping[str, Any]) -> Observation:
        engine = started(self._engine)
        self._last, view, player = (reward, news), engine.view(), engine.player
        # A table or furnace in crafting range is "near". At the world's left and top edge, none is ever near
        # (a quirk of stock).
        above, middle, below = view.materials[2:5]
        around = () if 0 in engine.position else (*above[3:6], *middle[3:6], *below[3:6])
        # Plain JSON, with no more information than the 9x7 view and the status bar show.
        data = {
            "rows": [*map(list, view.rows)],
            "facing": [*player.facing],
            "target": view.target,
            "near": [name for name in ("table", "furnace") if name in around],
            "inventory": dict(player.inventory),
            "position": [*engine.position],
            "sleeping": player.sleeping,
            "daylight": round(engine.world.daylight, 3),
            "dark": engine.world.daylight < DARK_BELOW,
            "step": engine.step_count,
            "max_steps": self.config.length,
            "achievements": sorted([name for name, count in engine.achievements.items() if count]),
            "news": dict(news),
        }
        return Observation(self._text(data), data, dict(engine.achievements), reward)

    def _text(self, data: Mapping[str, Any]) -> str:
        if self.config.text == "full":
            return full_text(data)
        return compact_text(data, None if self._memory is None else self._memory.facts(data))


def _run(engine: CrafterEngine, actions: Sequence[str]) -> tuple[list[float], bool]:
    """Execute actions until the episode ends.

    Returns the reward of each env step, and whether the last executed action had an effect.
    """
    rewards: list[float] = []
    has_effect, state = False, _visible_state(engine)
    for action in actions:
        if engine.over:
            break
        rewards.append(float(engine.act(_ACTION_IDS[action])))
        before, state = state, _visible_state(engine)
        has_effect = state != before
    return rewards, has_effect


def _visible_state(engine: CrafterEngine) -> tuple[Any, ...]:
    """Return the values that are compared to decide whether an action had an effect.

    Health, food, drink and energy are left out, because they also change by themselves. Achievement counters
    are included, because some actions change no other value: drinking, and collecting a tenth stone, which
    does not fit into the inventory. The health of the faced creature shows whether a blow hit.
    """
    player = engine.player
    counts = tuple(player.achievements.values())
    return (
        player.cell, player.facing, player.sleeping, _items(player.inventory), counts, engine.faced_health
    )  # fmt: skip
