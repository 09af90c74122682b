"""Worlds made by hand for tests: an empty meadow, to which a test adds what it is about."""

import hashlib
import json
from dataclasses import replace

import numpy as np

from task_app.environments.crafter.engine import CrafterEngine
from task_app.environments.crafter.grid import AREA, MATERIAL_IDS, MATERIAL_NAMES, cell_at
from task_app.environments.crafter.picture import _textures  # noqa: F401  for the process of a test
from task_app.environments.crafter.rules import ACTIONS
from task_app.environments.crafter.world import Thing

NOON, MIDNIGHT = 60, 210  # steps at which it is bright, and dark


def meadow(place: tuple[int, int] = (32, 32), *, step: int = NOON, length: int = 10_000) -> CrafterEngine:
    """Grass everywhere, no creatures, the player at `place` facing down, `step` steps into the episode."""
    engine = CrafterEngine(0, length=length)
    engine.reset()
    grass = bytes([MATERIAL_IDS["grass"]]) * AREA**2
    state = replace(engine.capture(), ground=grass, things=(), chunks=(), place=place)
    return engine.with_state(state, step, engine.last_health)


def put(engine: CrafterEngine, what: str | Thing, x: int = 0, y: int = 0) -> None:
    """Change the ground at (x, y), or add a thing where it says it is."""
    if isinstance(what, Thing):
        engine.world.add(what)
    else:
        engine.world.set_material(cell_at(x, y), MATERIAL_IDS[what])


def ground(engine: CrafterEngine, x: int, y: int) -> str:
    return MATERIAL_NAMES[engine.world.materials[cell_at(x, y)]]


def act(engine: CrafterEngine, *names: str) -> float:
    """Do the named actions; the reward of the last one."""
    return [engine.act(ACTIONS.index(name)) for name in names][-1]


def fork(engine: CrafterEngine) -> CrafterEngine:
    return engine.with_state(engine.capture(), engine.step_count, engine.last_health)


def fingerprint(engine: CrafterEngine) -> str:
    """A digest of everything that the future depends on."""
    state = engine.capture()
    unlocked = sorted(name for name, count in engine.achievements.items() if count)
    rest = (
        (engine.seed, engine.length, engine.step_count, engine.last_health, unlocked),
        (state.things, state.chunks, state.word_position, state.place, state.facing),
        (state.inventory, state.achievements, state.sleeping, [float(value) for value in state.hidden]),
    )
    words = state.words.astype("<u4").tobytes()
    return hashlib.sha256(state.ground + words + json.dumps(rest).encode()).hexdigest()


def draws_between(before: CrafterEngine, after: CrafterEngine, most: int = 4000) -> int:
    """How many doubles (two words each) the generator of `after` is ahead of that of `before`."""
    probe = fork(before)
    goal = after.capture()
    for count in range(most):
        state = probe.capture()
        if state.word_position == goal.word_position and (state.words == goal.words).all():
            return count
        probe.world.uniform()
    raise AssertionError(f"no meeting within {most} draws")


def played_game() -> str:
    """The fingerprint of a game of 300 steps."""
    engine, rng = CrafterEngine(11), np.random.default_rng(11)
    engine.reset()
    for _ in range(300):
        engine.inventory.update(health=9, food=9, drink=9, energy=9)
        engine.act(int(rng.integers(17)))
    return fingerprint(engine)
