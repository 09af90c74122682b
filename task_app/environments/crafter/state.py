"""Converts a game to plain values and back, for snapshots.

The values are the ground, the things in order of creation, the order of the chunks, the random generator (624
words and a position), and the player with its hidden counters. They suffice: the counts of materials and
things per chunk follow from the ground and the things, and the daylight follows from the number of steps.
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
    """The state of a game at one moment."""

    ground: bytes
    """[64 * 64] material numbers, row by row (y before x), one byte each."""
    things: tuple[tuple[int, ...], ...]
    """(kind, x, y, health, *extra) of everything but the player, in order of creation."""
    chunks: tuple[int, ...]
    """Numbers of the chunks that have ever contained a thing, in the order of their first thing."""
    words: npt.NDArray[np.uint32]
    """[624] state words of the Mersenne Twister; `word_position` is the current index into them."""
    word_position: int
    place: tuple[int, int]
    """(x, y) of the player."""
    facing: tuple[int, int]
    """(dx, dy) of the player's direction."""
    inventory: dict[str, int]
    achievements: dict[str, int]
    sleeping: bool
    hidden: tuple[float, ...]
    """The player's last_health, hunger, thirst, fatigue and recover."""


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
    """Make the world and the player of a captured game; the caller must set the world's daylight."""
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
    """A seed of zeros, for a generator whose state is replaced right after it is made.

    Mixing a real seed would take a third of the time of `bits_at`.
    """

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:  # numpy reads it word by word
        return [0] * n_words


def bits_at(words: npt.NDArray[np.uint32], position: int) -> np.random.MT19937:
    """Make a Mersenne Twister with these 624 words and this position."""
    bits = np.random.MT19937(_ZeroSeed())  # type: ignore[arg-type]  # numpy's stub lacks ISeedSequence
    # numpy reads the key word by word, which takes half as long with a list as with an array.
    bits.state = {"bit_generator": "MT19937", "state": {"key": words.tolist(), "pos": position}}
    return bits
