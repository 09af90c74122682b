"""Converts a game to plain values and back, for snapshots.

The values are the ground, things in order of creation, order of the chunks, generator (624 words and
position), and the player with hidden counters. Material counts and chunk membership follow from them;
daylight follows from the number of steps.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from task_app.environments.crafter.grid import AREA, PAD, STRIDE
from task_app.environments.crafter.objects import BEINGS, Being, Plant
from task_app.environments.crafter.player import Player
from task_app.environments.crafter.world import World

HIDDEN = ("last_health", "hunger", "thirst", "fatigue", "recover")
MT_WORDS = 624


@dataclass(frozen=True, slots=True)
class GameState:
    """A game at one moment."""

    ground: bytes
    """[64 * 64] material numbers, row by row (y before x), one byte each."""
    things: tuple[tuple[int, ...], ...]
    """(kind, x, y, health, *extra) of everything but the player, in order of creation."""
    chunks: tuple[int, ...]
    """Numbers of the chunks that ever had a thing, in the order of their first thing."""
    words: npt.NDArray[np.uint32]
    """[624] uint32 of the Mersenne Twister; `word_position` is its current index."""
    word_position: int
    place: tuple[int, int]
    """(x, y) of the player."""
    facing: tuple[int, int]
    """(dx, dy) of the player's direction."""
    inventory: dict[str, int]
    achievements: dict[str, int]
    sleeping: bool
    hidden: tuple[float, ...]
    """last_health, hunger, thirst, fatigue, recover."""


def capture(world: World, player: Player) -> GameState:
    padded = np.frombuffer(world.materials, np.uint8).reshape(STRIDE, STRIDE)
    twister = world.bits.state["state"]
    return GameState(
        ground=padded[PAD : PAD + AREA, PAD : PAD + AREA].tobytes(),
        things=tuple(
            (thing.kind, thing.x, thing.y, thing.health, *thing.extra())
            for thing in world.things
            if isinstance(thing, Being)
        ),
        chunks=tuple(world.chunk_order),
        words=twister["key"],
        word_position=int(twister["pos"]),
        place=(player.x, player.y),
        facing=player.facing,
        inventory=dict(player.inventory),
        achievements=dict(player.achievements),
        sleeping=player.sleeping,
        hidden=tuple(getattr(player, name) for name in HIDDEN),
    )


def rebuild(state: GameState) -> tuple[World, Player]:
    """Rebuild a captured game; the caller must set its daylight."""
    padded = np.zeros((STRIDE, STRIDE), np.uint8)
    padded[PAD : PAD + AREA, PAD : PAD + AREA] = np.frombuffer(state.ground, np.uint8).reshape(AREA, AREA)
    world = World(bytearray(padded.tobytes()), bits_at(state.words, state.word_position))
    world.chunk_order = dict.fromkeys(state.chunks)
    player = Player(*state.place, Plant)
    player.facing, player.sleeping = state.facing, state.sleeping
    player.inventory, player.achievements = dict(state.inventory), dict(state.achievements)
    for name, value in zip(HIDDEN, state.hidden, strict=True):
        setattr(player, name, value)
    world.add(player)
    for kind, x, y, health, *extra in state.things:
        being = BEINGS[kind](x, y)
        being.restore(health, tuple(extra))
        world.add(being)
    return world, player


class _ZeroSeed(np.random.bit_generator.ISeedSequence):
    """A seed of zeros: the state is set later, and mixing a real seed takes a third of a copy's time."""

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:  # numpy reads it word by word
        return [0] * n_words


def bits_at(words: npt.NDArray[np.uint32], position: int) -> np.random.MT19937:
    """Make a Mersenne Twister with these 624 words and this position."""
    bits = np.random.MT19937(_ZeroSeed())  # type: ignore[arg-type]  # numpy's stub lacks ISeedSequence
    # numpy reads the key word by word, and a list in half the time of an array.
    bits.state = {"bit_generator": "MT19937", "state": {"key": words.tolist(), "pos": position}}
    return bits
