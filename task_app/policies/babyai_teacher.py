"""A teacher of BabyAI: minigrid's own bot, an action a decision."""

from collections.abc import Mapping
from typing import Any

from task_app.environments.babyai.level import NOOP, Level
from task_app.policies.random_calls import DetourConfig, DetourTeacher, Tools, call_answer
from task_app.protocols import PolicyAnswer

_DETOURS = ("left", "right", "forward")


class BabyAITeacher(DetourTeacher[DetourConfig]):
    """Plays the episode along in a level of its own, in which the bot sees what the agent saw."""

    name = "babyai_teacher"
    config_type = DetourConfig

    def __init__(self, config: DetourConfig | None = None) -> None:
        super().__init__(config)
        self._world: tuple[str, int] | None = None
        self._level: Level | None = None
        self._bot: Any = None
        self._done: list[str] = []
        self._advice: str | None = None

    async def choose(self, observation: Any, tools: Tools) -> PolicyAnswer:
        self._follow(observation.data["episode"], observation.data["max_steps"])
        detour = self.makes_detour() or self._advice is None
        action = self._random.choice(_DETOURS) if detour else self._advice
        return call_answer("act", {"actions": [action]}, exploratory=detour)

    def _follow(self, episode: Mapping[str, Any], max_steps: int) -> None:
        """Bring the own level to the state of the episode, and ask the bot after each step."""
        world, actions = (episode["level"], episode["seed"]), list(episode["actions"])
        if self._level is None or world != self._world or actions[: len(self._done)] != self._done:
            self._level, self._bot = Level(world[0], max_steps=max_steps), None
            self._world, self._done = world, []
            self._level.reset(world[1])
            self._ask(self._level, None)
        for action in actions[len(self._done) :]:
            self._level.act(action)
            self._done.append(action)
            self._ask(self._level, action)

    def _ask(self, level: Level, action: str | None) -> None:
        """Let the bot plan on after an action; a new one from here where it has lost its way.

        The advice is None where that has no plan either: where a box with a key was opened, for instance.
        """
        self._advice = None
        if self._bot is not None and action is not None:
            self._advice = _plan(self._bot, level.env.actions[action])
        if self._advice is None:
            from minigrid.utils.baby_ai_bot import BabyAIBot

            make: Any = BabyAIBot  # without types
            self._bot = make(level.env)
            self._advice = _plan(self._bot, None)


def _plan(bot: Any, action: Any) -> str | None:
    """The action that the bot suggests; None if it has none but to be done."""
    # A detour may break its plans: it then ends in an assert, or in whatever error comes first.
    try:
        name = str(bot.replan(action).name)
    except Exception:
        return None
    return None if name == NOOP else name
