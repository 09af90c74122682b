"""The teachers for the environments orders, Sokoban and BabyAI; they read only the observation's data."""

import asyncio
from collections.abc import Mapping
from typing import Any

from task_app.environments.babyai.level import NOOP, Level
from task_app.environments.sokoban.board import Board, cells, read_xsb
from task_app.environments.sokoban.environment import MAX_MOVES
from task_app.environments.sokoban.solver import Key, best_push, pushes_left
from task_app.policies.random_calls import DetourConfig, DetourTeacher, Tools, call_answer, random_call
from task_app.protocols import PolicyAnswer

Call = tuple[str, dict[str, Any]]


class OrdersTeacher(DetourTeacher[DetourConfig]):
    """Looks up a shop's customers one by one and grants their requests; keeps no state between decisions."""

    name = "orders_teacher"
    config_type = DetourConfig

    async def choose(self, observation: Any, tools: Tools) -> PolicyAnswer:
        detour = self.makes_detour()
        if detour and tools:
            name, arguments = random_call(tools, self._random, longest=1)
        else:
            name, arguments = next_call(observation.data)
        return call_answer(name, arguments, exploratory=detour)


def next_call(data: Mapping[str, Any]) -> Call:
    """Return the call for the first request that is not granted yet, or `done`."""
    calls = (_find_call(request, data) for request in data["requests"])
    return next(filter(None, calls), ("done", {}))


def _find_call(request: Mapping[str, Any], data: Mapping[str, Any]) -> Call | None:
    customer = request["customer"]
    if customer not in data["cities"]:
        return "find", {"customer": customer}
    if request["city"] is not None:
        moved = data["cities"][customer] == request["city"]
        return None if moved else ("move", {"customer": customer, "city": request["city"]})
    order = next(
        row for row in data["orders"] if (row["customer"], row["product"]) == (customer, request["product"])
    )
    if request["count"] is not None:
        # An order that was ended by mistake keeps its count.
        if order["count"] == request["count"] or order["status"] != "open":
            return None
        return "count", {"order": order["id"], "count": request["count"]}
    tool = {"open": "cancel", "sent": "refund"}.get(order["status"])
    return (tool, {"order": order["id"]}) if tool else None


class SokobanTeacher(DetourTeacher[DetourConfig]):
    """Pushes boxes along a shortest solution, one push per decision; searches once for each board."""

    name = "sokoban_teacher"
    config_type = DetourConfig

    def __init__(self, config: DetourConfig | None = None) -> None:
        self._board: Board | None = None
        self._left: Mapping[Key, int] = {}  # pushes_left(board)
        super().__init__(config)

    async def choose(self, observation: Any, tools: Tools) -> PolicyAnswer:
        board, state = read_xsb(observation.data["rows"])
        if board != self._board:  # a new board needs a search, of up to a tenth of a second
            self._board, self._left = board, await asyncio.to_thread(pushes_left, board)
        detour = self.makes_detour()
        possible = list(board.pushes(state))
        push = self._random.choice(possible) if detour and possible else best_push(board, state, self._left)
        if "push" not in {tool["function"]["name"] for tool in tools}:
            # Walk to the box and push it. If no push leads to a solution, move up.
            moves = ("up",) if push is None else (*push.way, push.direction)
            return call_answer("move", {"moves": list(moves)[:MAX_MOVES]}, exploratory=detour)
        word = "1-up"  # if no push leads to a solution, push the first box
        if push is not None:
            word = f"{list(cells(state.boxes)).index(push.box) + 1}-{push.direction}"
        return call_answer("push", {"pushes": [word]}, exploratory=detour)


_DETOURS = ("left", "right", "forward")


class BabyAITeacher(DetourTeacher[DetourConfig]):
    """Plays the actions that Minigrid's own bot advises, one action per decision.

    The bot needs a `Level`, so the teacher replays the actions of the episode in a copy of the level. If the
    bot has no advice, the teacher makes a random detour.
    """

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
        self._follow_episode(observation.data["episode"], observation.data["max_steps"])
        detour = self.makes_detour() or self._advice is None
        action = self._random.choice(_DETOURS) if detour else self._advice
        return call_answer("act", {"actions": [action]}, exploratory=detour)

    def _follow_episode(self, episode: Mapping[str, Any], max_steps: int) -> None:
        """Replay the episode's new actions in the copy of the level, and ask the bot after each action."""
        world, actions = (episode["level"], episode["seed"]), list(episode["actions"])
        if self._level is None or world != self._world or actions[: len(self._done)] != self._done:
            self._level, self._bot = Level(world[0], max_steps=max_steps), None
            self._world, self._done = world, []
            self._level.reset(world[1])
            self._ask_bot(self._level, None)
        for action in actions[len(self._done) :]:
            self._level.act(action)
            self._done.append(action)
            self._ask_bot(self._level, action)

    def _ask_bot(self, level: Level, action: str | None) -> None:
        """Store the bot's advice after an action; if the bot has no plan any more, ask a new bot.

        The advice is None if the new bot has no plan either, for instance after a box with a key was opened.
        """
        self._advice = None
        if self._bot is not None and action is not None:
            self._advice = _replan(self._bot, level.env.actions[action])
        if self._advice is None:
            from minigrid.utils.baby_ai_bot import BabyAIBot

            make: Any = BabyAIBot  # without types
            self._bot = make(level.env)
            self._advice = _replan(self._bot, None)


def _replan(bot: Any, action: Any) -> str | None:
    """Return the bot's next action; None if the bot fails, or suggests only an action without effect."""
    # A detour may break the bot's plan; the bot then raises an AssertionError or another error.
    try:
        name = str(bot.replan(action).name)
    except Exception:
        return None
    return None if name == NOOP else name
