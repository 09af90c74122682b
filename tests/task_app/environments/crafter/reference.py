"""Stock crafter with the one ordering fix: what the engine must equal, draw for draw."""

from collections.abc import Callable
from typing import Any

import crafter
import numpy as np

from task_app.environments.crafter.grid import chunk_bounds
from task_app.environments.crafter.state import GameState
from task_app.environments.crafter.world import KINDS

HIDDEN = ("_last_health", "_hunger", "_thirst", "_fatigue", "_recover")
EXTRA: dict[str, Callable[[Any], tuple[int, ...]]] = {
    "cow": lambda thing: (),
    "zombie": lambda thing: (thing.cooldown,),
    "skeleton": lambda thing: (thing.reload,),
    "arrow": lambda thing: (int(thing.facing[0]), int(thing.facing[1])),
    "plant": lambda thing: (thing.grown,),
}
CHUNK_NUMBERS: dict[tuple[int, ...], int] = {chunk_bounds(number): number for number in range(36)}


class ReferenceEnv(crafter.Env):  # type: ignore[misc]
    """Stock, but a chunk's creatures are listed in order of creation and not by memory address."""

    def _balance_object(self, chunk: Any, objs: Any, *rule: Any) -> None:
        index = self._world._obj_map
        ordered = sorted(objs, key=lambda thing: int(index[tuple(thing.pos)]))
        super()._balance_object(chunk, ordered, *rule)


def numbers(values: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


def reference_state(env: crafter.Env) -> GameState:
    """The reference's state in the engine's terms."""
    world, player = env._world, env._player
    _, words, position, _, _ = world.random.get_state()
    things = []
    for thing in world.objects:
        name = type(thing).__name__.lower()
        if name != "player":
            things.append((KINDS.index(name), *numbers(thing.pos), int(thing.health), *EXTRA[name](thing)))
    return GameState(
        ground=np.ascontiguousarray(world._mat_map.T).tobytes(),
        things=tuple(things),
        chunks=tuple(CHUNK_NUMBERS[numbers(bounds)] for bounds in world._chunks),
        words=words,
        word_position=position,
        place=(int(player.pos[0]), int(player.pos[1])),
        facing=(int(player.facing[0]), int(player.facing[1])),
        inventory={name: int(count) for name, count in player.inventory.items()},
        achievements=dict(player.achievements),
        sleeping=player.sleeping,
        hidden=tuple(getattr(player, name) for name in HIDDEN),
    )


def differences(ours: GameState, theirs: GameState) -> list[str]:
    """Names of the parts in which two states differ."""
    return [name for name in GameState.__slots__ if not _same(getattr(ours, name), getattr(theirs, name))]


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, np.ndarray):
        return bool((ours == theirs).all())
    return bool(ours == theirs)
