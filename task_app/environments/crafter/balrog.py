"""Crafter with the prompts of the benchmark BALROG: the model answers with the name of one action.

A prompt equals the messages of BALROG's `naive` agent (github.com/balrog-ai/BALROG, commit af7d1f1) letter
for letter, as tests check. The texts are BALROG's: MIT licence, Copyright (c) 2024 BALROG Team.

Two quirks of BALROG are kept. An episode begins with a noop. If the player is within four columns of the
world's left edge or three rows of its top edge, the text says that nothing is in sight.
"""

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import to_json

from shared_schemas.base import Body
from shared_schemas.messages import Message, ToolSpec
from task_app.complaints import state_in
from task_app.environments.crafter import prompt
from task_app.environments.crafter.environment import CrafterConfig, CrafterEnvironment
from task_app.environments.crafter.grid import VOID
from task_app.environments.crafter.rules import ACTIONS, VITALS
from task_app.environments.crafter.view import CENTRE, nearest_offsets
from task_app.errors import started
from task_app.protocols import DecisionOutcome, Observation, PastDecision, ToolRequest

# Names and descriptions of the actions, in the order of ACTIONS.
_DESCRIPTIONS = {
    "Noop": "do nothing",
    "Move West": "move west on flat ground",
    "Move East": "move east on flat ground",
    "Move North": "move north on flat ground",
    "Move South": "move south on flat ground",
    "Do": "Multiuse action to collect material, drink from lake and hit creature in front",
    "Sleep": "sleep when energy level is below maximum",
    "Place Stone": "place a stone in front",
    "Place Table": "place a table",
    "Place Furnace": "place a furnace",
    "Place Plant": "place a plant",
    "Make Wood Pickaxe": "craft a wood pickaxe with a nearby table and wood in inventory",
    "Make Stone Pickaxe": "craft a stone pickaxe with a nearby table, wood, and stone in inventory",
    "Make Iron Pickaxe": "craft an iron pickaxe with a nearby table and furnace, wood, coal, and iron in "
    "inventory",
    "Make Wood Sword": "craft a wood sword with a nearby table and wood in inventory",
    "Make Stone Sword": "craft a stone sword with a nearby table, wood, and stone in inventory",
    "Make Iron Sword": "craft an iron sword with a nearby table and furnace, wood, coal, and iron in "
    "inventory",
}
ANSWERS = tuple(_DESCRIPTIONS)
_GOALS = (
    "Collect Wood", "Place Table", "Eat Cow", "Collect Sapling", "Collect Drink", "Make Wood Pickaxe",
    "Make Wood Sword", "Place Plant", "Defeat Zombie", "Collect Stone", "Place Stone", "Eat Plant",
    "Defeat Skeleton", "Make Stone Pickaxe", "Make Stone Sword", "Wake Up", "Place Furnace", "Collect Coal",
    "Collect Iron", "Make Iron Pickaxe", "Make Iron Sword", "Collect Diamond",
)  # fmt: skip
INSTRUCTION = (
    "You are an agent playing Crafter. The following are the only valid actions you can take in the game, "
    "followed by a short description of each action:\n\n"
    + ",\n".join(f"{name}: {description}" for name, description in _DESCRIPTIONS.items())
    + ".\n\nThese are the game achievements you can get:\n"
    + "\n".join(f"{number}. {goal}" for number, goal in enumerate(_GOALS, start=1))
    + "\n\nIn a moment I will present a history of actions and observations from the game.\n"
    "Your goal is to get as far as possible by completing all the achievements.\n\nPLAY!"
)
REMINDER = (
    "You always have to output one of the above actions at a time and no other text. You always have to "
    "output an action until the episode terminates."
)
_COMPLAINT = (
    "\n\nYour previous output did not contain a valid action. Defaulted to action: Noop\n\nObservation:\n"
)
_SLEEPING = "You are sleeping, and will not be able take actions until energy is full.\n\n\n\n"
_DEAD = "You died.\n\n\n\n"
# Characters that BALROG removes from an answer; the rest must be the name of an action.
_UNREAD = re.compile(r"[^a-zA-Z\s:]")
_CLIP = 80

Turn = tuple[Literal["user", "assistant"], str]


class BalrogEnvironment(CrafterEnvironment):
    """Runs one episode of Crafter with BALROG's texts; each answer of the model executes one env step.

    The prompt contains the last `config.history` observations and the answers between them. An answer that is
    not the name of an action executes a noop, and the next observation says that the answer was not valid.
    """

    def __init__(self, config: CrafterConfig) -> None:
        super().__init__(config)
        # Observations and answers before the current observation; the oldest ones are dropped.
        self._history: deque[Turn] = deque(maxlen=2 * config.history - 1)
        self._data: Mapping[str, Any] = {}

    def reset(self, seed: int) -> Observation:
        super().reset(seed)
        started(self._engine).act(ACTIONS.index("noop"))
        self._history.clear()
        return self._observe(0.0, prompt.NO_NEWS)

    def snapshot(self) -> bytes:
        state = super().snapshot()
        return to_json({"history": list(self._history)}) + b"\n" + state

    def restore(self, state: bytes) -> Observation:
        line, _, game = state.partition(b"\n")
        history = state_in(_Head, line).history
        super().restore(game)
        self._history.clear()
        self._history.extend(history)
        return self._observe(*self._last)

    def answer(self, text: str) -> DecisionOutcome:
        """Execute the action that the text names, or a noop if the text is not the name of an action."""
        word = _UNREAD.sub("", text.strip())
        known = f"answer with one of the {len(ANSWERS)} names alone, such as {ANSWERS[1]!r}"
        return self._play(word, None if word in ANSWERS else f"{word[:_CLIP]!r} is no action; {known}")

    def step(self, calls: Sequence[ToolRequest], *, invalid_reason: str | None = None) -> DecisionOutcome:
        """Execute the one action in a call of the tool `interact_many`, or a noop if the call is refused.

        The prompt does not offer this tool to the model.
        """
        actions, reason = self._plan(calls, invalid_reason, max_actions=1)
        return self._play("" if reason else ANSWERS[ACTIONS.index(actions[0])], reason)

    def tools(self) -> tuple[ToolSpec, ...]:
        return ()

    def messages(self, observation: Observation, past: Sequence[PastDecision]) -> tuple[Message, ...]:
        turns = _clear_old_texts(observation.data["history"], texts=self.config.history - 1)
        current = f"Current Observation:\n{observation.text}\n\n{REMINDER}"
        return (
            Message(role="user", content=INSTRUCTION),
            *(Message(role=role, content=text) for role, text in turns),
            Message(role="user", content=current),
        )

    def _play(self, word: str, reason: str | None) -> DecisionOutcome:
        self._require_running()
        self._history.append(("user", situation_text(self._data)))
        if word:
            self._history.append(("assistant", word))
        action = "noop" if reason else ACTIONS[ANSWERS.index(word)]
        return self._carry_out([action], reason)

    def _observe(self, reward: float, news: Mapping[str, Any]) -> Observation:
        observation = super()._observe(reward, news)
        history = [list(turn) for turn in self._history]
        self._data = {**observation.data, "answer_names": list(ANSWERS), "history": history}
        return replace(observation, data=self._data)

    def _text(self, data: Mapping[str, Any]) -> str:
        # Only the current observation shows vitals and inventory; past ones show `situation_text` alone.
        inventory = data["inventory"]
        vitals = "\n".join(f"- {name}: {inventory[name]}/9" for name in VITALS)
        items = [f"- {name}: {count}" for name, count in inventory.items() if count and name not in VITALS]
        held = "\n".join(("Your inventory:", *items)) if items else "You have nothing in your inventory."
        return f"Your status:\n{vitals}\n\n{held}\n{situation_text(data)}"


class _Head(Body):
    """The first line of a snapshot, as JSON. The snapshot of the game follows it."""

    history: list[tuple[Literal["user", "assistant"], Annotated[str, Field(max_length=1_000_000)]]]


def situation_text(data: Mapping[str, Any]) -> str:
    """Describe the nearest cell of each visible kind and the cell in front of the player.

    The text begins with a complaint if the last answer was invalid, and then says if the player sleeps or is
    dead.
    """
    complaint = _COMPLAINT if data["news"]["invalid"] else ""
    state = _SLEEPING if data["sleeping"] else "" if data["inventory"]["health"] > 0 else _DEAD
    x, y = data["position"]
    # BALROG slices its view from an array; with a negative index the slice is empty.
    is_empty = x < CENTRE[0] or y < CENTRE[1]
    # Column by column: the order of the cells determines the order of the lines of text.
    columns = [] if is_empty else [list(map(_name_kind, names)) for names in zip(*data["rows"], strict=True)]
    places = nearest_offsets(columns, without=(VOID, "player"))
    lines = [f"- {name} {_describe_offset(dx, dy)}" for name, (dy, dx) in places.items()]
    seen = "\n".join(("You see:", *lines)) if lines else "You see nothing away from you."
    faced = "nothing" if data["target"] == VOID or not lines else _name_kind(data["target"])
    return f"{complaint}{state}{seen}\n\nYou face {faced} at your front."


def _name_kind(name: str) -> str:
    return "plant" if name == "ripe-plant" else name


def _describe_offset(dx: int, dy: int) -> str:
    """Return a text such as `3 steps to your north-west`."""
    along, across = ("", "south", "north")[(dy > 0) - (dy < 0)], ("", "east", "west")[(dx > 0) - (dx < 0)]
    steps = abs(dx) + abs(dy)
    return f"{steps} step{'s' if steps > 1 else ''} to your {'-'.join(filter(None, (along, across)))}"


def _clear_old_texts(turns: Sequence[Sequence[str]], *, texts: int) -> list[tuple[str, str]]:
    """Return the role and the text of each past turn.

    The last `texts` observations keep their text. Of an older observation, only the heading remains.
    """
    shown = []
    for role, text in reversed(turns):
        if role == "user":
            text, texts = f"Observation:\n{text}" if texts > 0 else "Observation:", texts - 1
        shown.append((role, text))
    return shown[::-1]
