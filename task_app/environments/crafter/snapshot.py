"""A game as JSON-able data, and back: to store it, send it, or start siblings from the same moment.

Never pickle: a snapshot may come from outside, so everything in it is checked before a game is built. About
5 KB, most of it the generator's 624 words, which do not compress.
"""

import base64
import binascii
import zlib
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from task_app.environments.crafter.engine import CrafterEngine
from task_app.environments.crafter.grid import AREA, CHUNK_COUNT, DIRECTIONS, MATERIAL_COUNT
from task_app.environments.crafter.objects import BEINGS
from task_app.environments.crafter.rules import ACHIEVEMENTS, RULES
from task_app.environments.crafter.state import HIDDEN, MT_WORDS, GameState
from task_app.environments.crafter.world import ARROW

Coordinate = Annotated[int, Field(ge=0, lt=AREA)]
Small = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Counter = Annotated[float, Field(ge=-(2**31), lt=2**31)]
# kind, x, y, health and what `Being.extra` adds
THING_LENGTHS = {kind: 4 + len(being(0, 0).extra()) for kind, being in BEINGS.items()}


class Snapshot(BaseModel):
    """The wire form of a game; fields as in `GameState` unless said otherwise.

    `ground` is base64 of zlib of one byte a cell, `words` base64 of 624 little-endian 32-bit words.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    format: Literal[1] = 1
    seed: int
    length: int
    step: int = Field(ge=0)
    last_health: Small
    ground: str = Field(max_length=16_384)
    things: list[list[Small]] = Field(max_length=AREA * AREA)
    chunks: list[Annotated[int, Field(ge=0, lt=CHUNK_COUNT)]] = Field(max_length=CHUNK_COUNT)
    words: str = Field(max_length=4096)
    word_position: int = Field(ge=0, le=MT_WORDS)
    place: tuple[Coordinate, Coordinate]
    facing: tuple[int, int]
    inventory: dict[str, Annotated[int, Field(ge=0, le=99)]]
    achievements: dict[str, Annotated[int, Field(ge=0)]]
    sleeping: bool
    hidden: list[Counter] = Field(min_length=len(HIDDEN), max_length=len(HIDDEN))


def to_state(engine: CrafterEngine) -> dict[str, Any]:
    """The game of `engine` as plain JSON-able data.

    Raises:
        NotReset: there is no game yet.
    """
    state = engine.capture()
    return {
        "format": 1,
        "seed": engine.seed_value,
        "length": engine.length,
        "step": engine.step_count,
        "last_health": engine.last_health,
        "ground": base64.b64encode(zlib.compress(state.ground, 1)).decode(),
        "things": [list(thing) for thing in state.things],
        "chunks": list(state.chunks),
        "words": base64.b64encode(state.words.astype("<u4").tobytes()).decode(),
        "word_position": state.word_position,
        "place": list(state.place),
        "facing": list(state.facing),
        "inventory": state.inventory,
        "achievements": state.achievements,
        "sleeping": state.sleeping,
        "hidden": list(state.hidden),
    }


def from_state(data: dict[str, Any]) -> CrafterEngine:
    """An engine that goes on exactly like the one that `to_state` was given.

    Raises:
        ValueError: the data is no snapshot, or one of an impossible game; the message says where.
    """
    snapshot = Snapshot.model_validate(data)
    _check_names("inventory", snapshot.inventory, tuple(RULES.item_max))
    _check_names("achievements", snapshot.achievements, ACHIEVEMENTS)
    if snapshot.facing not in DIRECTIONS:
        raise ValueError(f"snapshot.facing is {snapshot.facing}; known: {DIRECTIONS}")
    state = GameState(
        ground=_ground(snapshot.ground),
        things=_things(snapshot),
        chunks=tuple(snapshot.chunks),
        words=_words(snapshot.words),
        word_position=snapshot.word_position,
        place=snapshot.place,
        facing=snapshot.facing,
        # In the order of the rules: the picture shows items in the order of this dict.
        inventory={name: snapshot.inventory[name] for name in RULES.item_max},
        achievements={name: snapshot.achievements[name] for name in ACHIEVEMENTS},
        sleeping=snapshot.sleeping,
        hidden=tuple(snapshot.hidden),
    )
    fresh = CrafterEngine(snapshot.seed, length=snapshot.length)
    return fresh.restored(state, snapshot.step, snapshot.last_health)


def _check_names(field: str, found: dict[str, int], known: tuple[str, ...]) -> None:
    if set(found) != set(known):
        odd = sorted(set(found) ^ set(known))
        raise ValueError(f"snapshot.{field} has missing or unknown names: {', '.join(odd)[:200]}")


def _decoded(field: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"snapshot.{field} is not base64: {error}") from error


def _ground(text: str) -> bytes:
    """Decompress no more than a world holds: a small string must not become gigabytes."""
    packed = zlib.decompressobj()
    try:
        ground = packed.decompress(_decoded("ground", text), AREA * AREA + 1)
    except zlib.error as error:
        raise ValueError(f"snapshot.ground does not decompress: {error}") from error
    if len(ground) != AREA * AREA or not 1 <= min(ground) <= max(ground) < MATERIAL_COUNT:
        raise ValueError(f"snapshot.ground must hold {AREA * AREA} materials 1 .. {MATERIAL_COUNT - 1}")
    return ground


def _words(text: str) -> np.ndarray[Any, np.dtype[np.uint32]]:
    raw = _decoded("words", text)
    if len(raw) != 4 * MT_WORDS:
        raise ValueError(f"snapshot.words must hold {MT_WORDS} words of 4 bytes, got {len(raw)} bytes")
    return np.frombuffer(raw, "<u4").astype(np.uint32)


def _things(snapshot: Snapshot) -> tuple[tuple[int, ...], ...]:
    taken = {snapshot.place}
    for number, thing in enumerate(snapshot.things):
        where = f"snapshot.things[{number}]"
        if len(thing) < 4 or THING_LENGTHS.get(thing[0]) != len(thing):
            raise ValueError(f"{where} is {thing[:8]}; known kinds and their lengths: {THING_LENGTHS}")
        kind, x, y, health, *extra = thing
        if not (0 <= x < AREA and 0 <= y < AREA) or health < 0 or (x, y) in taken:
            raise ValueError(f"{where} is {thing}: outside the world, on a taken cell, or of negative health")
        if kind == ARROW and tuple(extra) not in DIRECTIONS:
            raise ValueError(f"{where} is an arrow flying {extra}; known: {DIRECTIONS}")
        taken.add((x, y))
    return tuple(tuple(thing) for thing in snapshot.things)
