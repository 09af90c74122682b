"""Converts a game to bytes and back, so that it can be stored, sent, or continued by several rollouts.

A snapshot is a line of JSON, then the ground (one byte per cell), then the 624 words of the random generator
(32 bits each, little-endian). A snapshot may come from outside. So it is not a pickle, and `unpack` checks
all of it before it builds a game.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from pydantic_core import to_json

from shared_schemas.base import Body
from shared_schemas.plain_text import encodable
from task_app.complaints import state_in
from task_app.environments.crafter.engine import CrafterEngine
from task_app.environments.crafter.grid import AREA, CHUNK_COUNT, DIRECTIONS, MATERIAL_COUNT
from task_app.environments.crafter.map_memory import SeenCells
from task_app.environments.crafter.objects import BEINGS
from task_app.environments.crafter.rules import ACHIEVEMENTS, RULES
from task_app.environments.crafter.state import HIDDEN, MT_WORDS, GameState
from task_app.environments.crafter.world import ARROW

FORMAT = 1
GROUND_BYTES = AREA * AREA
WORDS_BYTES = 4 * MT_WORDS
Coordinate = Annotated[int, Field(ge=0, lt=AREA)]
Small = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Counter = Annotated[float, Field(ge=-(2**31), lt=2**31)]
Steps = Annotated[int, Field(ge=0, lt=2**31)]
_MATERIALS = bytes(range(1, MATERIAL_COUNT))
# Length of a thing's list: kind, x, y, health and the numbers of `Being.extra`.
THING_LENGTHS = {kind: 4 + len(being(0, 0).extra()) for kind, being in BEINGS.items()}


class News(Body, allow_inf_nan=False):
    """The effects of the last decision, which the next prompt describes."""

    unlocked: list[Literal[ACHIEVEMENTS]]  # type: ignore[valid-type]  # names of the installed game
    health_change: Small
    no_effect: bool
    invalid: str | None = Field(max_length=100_000)


# Fields that the line of JSON copies from `GameState`.
_STATE_FIELDS = (
    "things", "chunks", "word_position", "place", "facing", "inventory", "achievements", "sleeping", "hidden",
)  # fmt: skip


class Head(Body, allow_inf_nan=False):
    """The line of JSON in a snapshot.

    It contains fields of `GameState` and of the engine, the reward and news of the last observation, and the
    map memory.
    """

    format: Literal[1]
    seed: int
    length: Steps
    step: Steps
    last_health: Small
    things: tuple[tuple[Small, ...], ...] = Field(max_length=GROUND_BYTES)
    chunks: tuple[Annotated[int, Field(ge=0, lt=CHUNK_COUNT)], ...] = Field(max_length=CHUNK_COUNT)
    word_position: int = Field(ge=0, le=MT_WORDS)
    place: tuple[Coordinate, Coordinate]
    facing: tuple[int, int]
    inventory: dict[str, Annotated[int, Field(ge=0, le=99)]]
    achievements: dict[str, Steps]
    sleeping: bool
    hidden: tuple[Counter, ...] = Field(min_length=len(HIDDEN), max_length=len(HIDDEN))
    reward: Counter
    news: News
    memory: SeenCells | None = None


def pack(
    engine: CrafterEngine, *, reward: float, news: Mapping[str, Any], memory: Mapping[str, Any] | None = None
) -> bytes:
    """Convert the game of `engine` to bytes. Raises NotReset before the engine's first reset.

    `reward` and `news` belong to the game's last observation. `memory` is the result of `MapMemory.snapshot`.
    """
    state = engine.capture()
    head = {
        "format": FORMAT,
        "seed": engine.seed,
        "length": engine.length,
        "step": engine.step_count,
        "last_health": engine.last_health,
        **{name: getattr(state, name) for name in _STATE_FIELDS},
        # Ints are written as floats too, so that equal games give equal bytes.
        "hidden": list(map(float, state.hidden)),
        "reward": reward,
        # A lone surrogate in a refused call becomes "?".
        "news": {**news, "invalid": encodable(news["invalid"]) if news["invalid"] else None},
        **({} if memory is None else {"memory": memory}),
    }
    return to_json(head) + b"\n" + state.ground + state.words.astype("<u4").tobytes()


def unpack(data: bytes) -> tuple[CrafterEngine, float, dict[str, Any], SeenCells | None]:
    """Return the packed game as an engine, with its last reward, its last news and its map memory.

    The memory is None if the snapshot contains none.

    Raises:
        ValueError: the data is not a snapshot, or its game is impossible.
    """
    line, _, rest = data.partition(b"\n")
    head = state_in(Head, line)
    if len(rest) != GROUND_BYTES + WORDS_BYTES:
        parts = f"{GROUND_BYTES} bytes of ground and {WORDS_BYTES} of generator"
        raise ValueError(f"snapshot holds {len(rest)} bytes after its first line; expected {parts}")
    _check_names("inventory", head.inventory, tuple(RULES.item_max))
    _check_names("achievements", head.achievements, ACHIEVEMENTS)
    if head.facing not in DIRECTIONS:
        raise ValueError(f"snapshot.facing is {head.facing}; known: {DIRECTIONS}")
    ground = rest[:GROUND_BYTES]
    if ground.translate(None, _MATERIALS):
        raise ValueError(f"snapshot's ground must hold materials 1 .. {MATERIAL_COUNT - 1}")
    _check_things(head)
    fields = {name: getattr(head, name) for name in _STATE_FIELDS}
    # In the order of the rules, because the picture shows items in the order of this dict.
    fields["inventory"] = {name: head.inventory[name] for name in RULES.item_max}
    fields["achievements"] = {name: head.achievements[name] for name in ACHIEVEMENTS}
    words = np.frombuffer(rest[GROUND_BYTES:], "<u4").astype(np.uint32)
    state = GameState(ground=ground, words=words, **fields)
    engine = CrafterEngine(head.seed, length=head.length).with_state(state, head.step, head.last_health)
    return engine, head.reward, head.news.model_dump(), head.memory


def _check_names(field: str, counts: dict[str, int], known: tuple[str, ...]) -> None:
    if set(counts) != set(known):
        differing = sorted(set(counts) ^ set(known))
        raise ValueError(f"snapshot.{field} has missing or unknown names: {', '.join(differing)[:200]}")


def _check_things(head: Head) -> None:
    occupied = {head.place}
    for number, thing in enumerate(head.things):
        where = f"snapshot.things[{number}]"
        if len(thing) < 4 or THING_LENGTHS.get(thing[0]) != len(thing):
            raise ValueError(f"{where} is {thing[:8]}; known kinds and their lengths: {THING_LENGTHS}")
        kind, x, y, health, *extra = thing
        if not (0 <= x < AREA and 0 <= y < AREA) or health < 0 or (x, y) in occupied:
            raise ValueError(f"{where} is {thing}: outside the world, on a taken cell, or of negative health")
        if kind == ARROW and tuple(extra) not in DIRECTIONS:
            raise ValueError(f"{where} is an arrow flying {extra}; known: {DIRECTIONS}")
        occupied.add((x, y))
