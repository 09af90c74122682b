"""Stock crafter with the one ordering fix: what the engine must equal, draw for draw."""

from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import lru_cache
from typing import Any

import crafter
import numpy as np

from task_app.environments.crafter.engine import CrafterEngine
from task_app.environments.crafter.grid import chunk_bounds
from task_app.environments.crafter.rules import ACTIONS
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


@lru_cache(maxsize=2)
def _first_world(seed: int) -> ReferenceEnv:
    env = ReferenceEnv(seed=seed)
    env.reset()
    return env


def reset_reference(seed: int) -> ReferenceEnv:
    """The reference at the start of its first episode; a copy, since stock needs 2 s for a world."""
    return deepcopy(_first_world(seed))


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


class Duel:
    """The same game on the reference and on the engine, compared in everything after every step."""

    def __init__(self, seed: int) -> None:
        self.reference, self.engine = reset_reference(seed), CrafterEngine(seed)
        self.engine.reset()
        self.unequal = differences(self.engine.capture(), reference_state(self.reference))

    def refill(self, names: Iterable[str]) -> None:
        """Set these items to 9 on both sides."""
        for name in names:
            self.engine.inventory[name] = self.reference._player.inventory[name] = 9

    def step(self, action: int) -> bool:
        """Make one step on both sides; say whether the episode goes on."""
        _, reward, done, _ = self.reference.step(action)
        ours = self.engine.act(action)
        self.unequal = differences(self.engine.capture(), reference_state(self.reference))
        if ours != reward:
            self.unequal.append(f"reward {ours} for {reward}")
        if self.engine.over != bool(done):
            self.unequal.append("over")
        return not self.engine.over


def compare_episode(seed: int, most_steps: int, *, refill_every: int | None = None) -> tuple[Duel, int]:
    """Play at random until the end or the first difference.

    With `refill_every`, the whole inventory is set to 9 that often, so that all crafting and placing happens.
    Returns the duel (its `unequal` is empty when nothing differed) and the number of steps.
    """
    duel, rng = Duel(seed), np.random.default_rng(seed)
    for step in range(most_steps):
        if duel.unequal:
            return duel, step
        if refill_every and step % refill_every == 0:
            duel.refill(list(duel.engine.inventory))
        if not duel.step(int(rng.integers(len(ACTIONS)))):
            return duel, step + 1
    return duel, most_steps
