"""The reproducible Crafter engine: stock crafter 1.8.3, some thirty times faster, equal in every process.

Equal seeds and actions give equal episodes anywhere. Against stock one thing is settled that stock leaves to
memory addresses: a creature to despawn is picked in order of creation (see balance.py). And a step draws no
picture; the random numbers that stock's night picture takes from the world's generator are still consumed.
"""

import functools
import hashlib
import json
from typing import Any, cast

import crafter
import numpy as np
import numpy.typing as npt

from task_app.environments.crafter import picture
from task_app.environments.crafter.balance import balance
from task_app.environments.crafter.grid import AREA, CENTER
from task_app.environments.crafter.objects import Being, Plant
from task_app.environments.crafter.player import Player
from task_app.environments.crafter.rules import ACHIEVEMENTS, ACTIONS, RULES, Rules
from task_app.environments.crafter.state import GameState, capture, rebuild
from task_app.environments.crafter.view import COLUMNS, ROWS, LocalView, local_view
from task_app.environments.crafter.world import World
from task_app.environments.crafter.worldgen import generate_world

__all__ = [
    "ACHIEVEMENTS",
    "ACTIONS",
    "RULES",
    "CrafterEngine",
    "EngineError",
    "EpisodeOver",
    "LocalView",
    "NotReset",
    "Rules",
]

SEED_LIMIT = 2**31 - 1
STOCK_SIZE = 64  # pixels a side of the picture that a default stock environment draws in every step
# One double a pixel of stock's map picture when it is dark: 9x7 cells of 64 // 9 = 7 pixels a side.
NIGHT_DRAWS = COLUMNS * ROWS * (STOCK_SIZE // COLUMNS) ** 2
UPDATE_RADIUS = 2 * COLUMNS  # things this far from the player (in steps) or farther stand still
BALANCE_EVERY = 10


@functools.lru_cache(maxsize=16_384)
def daylight_at(step: int) -> float:
    """Light after `step` steps, in [0, 1]: a day of 300 steps, by stock's scalar numpy operations."""
    progress = (step / 300) % 1 + 0.3
    return float(1 - np.abs(np.cos(np.pi * progress)) ** 3)


class CrafterEngine(crafter.Env):  # type: ignore[misc]  # crafter has no types
    """One episode of Crafter in the 64x64 world of one seed. Threads may own one each, not share one."""

    def __init__(self, seed: int, *, length: int = 10_000) -> None:
        """Prepare an engine without a world; `reset` makes it.

        Args:
            seed: 0 .. 2**31 - 2, as for `crafter.Env`.
            length: env steps after which the episode is over, at least 1.

        Raises:
            ValueError: a seed or length of another type or outside its range.
        """
        # Stock's constructor is left out on purpose: it loads all textures (30 ms, 0.5 MB) each time.
        self._seed = _checked_int("seed", seed, 0, SEED_LIMIT - 1)
        self._length = _checked_int("length", length, 1, None)
        self._episode, self._step = 0, 0
        self._world_or_none: World | None = None
        self._player_or_none: Player | None = None
        self._unlocked: set[str] = set()
        self._locked_count = len(ACHIEVEMENTS)
        self._last_health = 0
        # What stock's spaces, and libraries that know stock, look at.
        self._area, self._view, self._reward = (AREA, AREA), np.array((9, 9)), True
        self._size = np.array((STOCK_SIZE, STOCK_SIZE))
        self.reward_range = None
        self.metadata = None

    @property
    def _world(self) -> World:
        if self._world_or_none is None:
            raise NotReset("there is no world yet; call reset() first")
        return self._world_or_none

    @property
    def _player(self) -> Player:
        if self._player_or_none is None:
            raise NotReset("there is no player yet; call reset() first")
        return self._player_or_none

    def reset(self) -> None:
        """Start the world that `crafter.Env(seed=seed)` makes at its first reset, each time the same one."""
        self._episode, self._step = 1, 0
        player = Player(CENTER, CENTER, Plant)
        # hash() of a tuple of ints does not depend on PYTHONHASHSEED.
        world = generate_world(hash((self._seed, self._episode)) % (2**31 - 1), player)
        world.daylight = daylight_at(0)
        self._world_or_none, self._player_or_none = world, player
        self._last_health = player.inventory["health"]
        self._unlocked = set()
        self._locked_count = len(ACHIEVEMENTS)

    def act(self, action: int) -> float:
        """One env step.

        Args:
            action: place in ACTIONS, 0 .. 16.

        Returns:
            Stock's reward: change of health / 10, plus 1.0 if any achievement was unlocked (however many).

        Raises:
            NotReset: before the first reset.
            EpisodeOver: the player died, or `length` steps were made.
            ValueError: no such action.
        """
        world, player = self._world, self._player
        if self.over:
            raise EpisodeOver(f"the episode ended at step {self._step}; call reset() to start again")
        if not 0 <= action < len(ACTIONS):
            raise ValueError(f"action must lie in 0 .. {len(ACTIONS) - 1}, got {action!r}")
        self._step += 1
        world.daylight = daylight_at(self._step)
        others = cast("list[Being]", world.things[1:])  # before the player acts: a new plant waits a step
        player.update(world, action)
        px, py = player.x, player.y
        west, east = px - UPDATE_RADIUS, px + UPDATE_RADIUS  # tells most of the far ones at once
        # A thing is moved by its own update only, so who is near can be settled before the first update.
        near = [
            being
            for being in others
            if west < being.x < east and abs(being.x - px) + abs(being.y - py) < UPDATE_RADIUS
        ]
        for being in near:
            being.update(world, player)
        if self._step % BALANCE_EVERY == 0:
            balance(world, player)
        if world.daylight < 0.5:
            world.random.random_sample(NIGHT_DRAWS)
        return self._reward_of_step(player)

    def _reward_of_step(self, player: Player) -> float:
        health = player.inventory["health"]
        reward = (health - self._last_health) / 10
        self._last_health = health
        counts = [*player.achievements.values()]
        if counts.count(0) != self._locked_count:
            self._locked_count = counts.count(0)
            self._unlocked = {name for name, count in player.achievements.items() if count > 0}
            reward += 1.0
        return reward

    def step(self, action: int) -> tuple[None, float, bool, dict[str, Any]]:
        """`act` in the shape of gym: (None, reward, over, info).

        There is no picture (see `frame`) and no map of the whole world in `info`, which holds copies:
        inventory, achievements, discount (0.0 after death, else 1.0), player_pos, reward.
        """
        reward = self.act(action)
        info = {
            "inventory": dict(self.inventory),
            "achievements": dict(self.achievements),
            "discount": 1.0 - float(self.dead),
            "player_pos": self.position,
            "reward": reward,
        }
        return None, reward, self.over, info

    @property
    def seed_value(self) -> int:
        """The seed given at the start (gym's base class has a method `seed`)."""
        return self._seed

    @property
    def length(self) -> int:
        """Env steps after which the episode is over."""
        return self._length

    @property
    def dead(self) -> bool:
        """Health is gone."""
        return self._player_or_none is not None and self._player_or_none.inventory["health"] <= 0

    @property
    def over(self) -> bool:
        """Dead, or `length` steps made."""
        return self._step >= self._length or self.dead

    @property
    def step_count(self) -> int:
        """Env steps since the reset."""
        return self._step

    @property
    def last_health(self) -> int:
        """Health after the last step's reward: what the next reward is measured from."""
        return self._last_health

    @property
    def inventory(self) -> dict[str, int]:
        """The 16 live item counts; health, food, drink and energy among them."""
        return self._player.inventory

    @property
    def achievements(self) -> dict[str, int]:
        """The 22 live counters, which only grow within an episode."""
        return self._player.achievements

    @property
    def sleeping(self) -> bool:
        """The player sleeps: whatever the action, the next step is slept through."""
        return self._player.sleeping

    @property
    def daylight(self) -> float:
        """1 at noon, 0 at midnight; below 0.5 the picture is dark and noisy."""
        return self._world.daylight

    @property
    def position(self) -> tuple[int, int]:
        """(x, y) of the player, 0 .. 63 each, y growing downwards."""
        player = self._player
        return player.x, player.y

    @property
    def facing(self) -> tuple[int, int]:
        """(dx, dy) of the cell that the player faces."""
        return self._player.facing

    @property
    def faced_health(self) -> int:
        """Health of the creature or plant in front of the player; 0 when there is none."""
        # Arrows are things without health.
        return int(getattr(self._world.at[self._player.target_cell()], "health", 0))

    def view(self) -> LocalView:
        """What a player sees, in words."""
        return local_view(self._world, self._player)

    def frame(self, width: int = 288, height: int = 288) -> npt.NDArray[np.uint8]:
        """[height, width, 3] picture as stock would draw it now; the game is unchanged by it."""
        return picture.draw(self._world, self._player, width, height)

    def render(self, size: tuple[int, int] | None = None) -> npt.NDArray[np.uint8]:
        """Stock's name for `frame`; `size` is (width, height), by default 64x64."""
        return self.frame(*(size or (STOCK_SIZE, STOCK_SIZE)))

    def capture(self) -> GameState:
        """The whole state of the game as plain values."""
        return capture(self._world, self._player)

    def fingerprint(self) -> str:
        """Hex digest of everything that the future depends on; equal fingerprints, equal futures."""
        state = self.capture()
        digest = hashlib.sha256(state.ground)
        digest.update(state.words.astype("<u4").tobytes())
        rest = (
            (self._seed, self._length, self._step, self._last_health, sorted(self._unlocked)),
            (state.things, state.chunks, state.word_position, state.place, state.facing),
            (state.inventory, state.achievements, state.sleeping, [float(value) for value in state.hidden]),
        )
        digest.update(json.dumps(rest).encode())
        return digest.hexdigest()

    def fork(self) -> "CrafterEngine":
        """An independent copy that goes on exactly like this one."""
        return self.restored(self.capture(), self._step, self._last_health)

    def restored(self, state: GameState, step: int, last_health: int) -> "CrafterEngine":
        """A new engine with this one's seed and length, in the given state after `step` steps."""
        other = CrafterEngine(self._seed, length=self._length)
        world, player = rebuild(state)
        world.daylight = daylight_at(step)
        other._world_or_none, other._player_or_none = world, player
        other._episode, other._step, other._last_health = 1, step, last_health
        other._unlocked = {name for name, count in player.achievements.items() if count > 0}
        other._locked_count = len(ACHIEVEMENTS) - len(other._unlocked)
        return other


def _checked_int(name: str, value: Any, low: int, high: int | None) -> int:  # Any: callers may pass anything
    allowed = f"at least {low}" if high is None else f"in [{low}, {high}]"
    # bool is an int, and True is no seed that anyone meant.
    allowed_type = isinstance(value, int) and not isinstance(value, bool)
    if not allowed_type or value < low or (high is not None and value > high):
        raise ValueError(f"{name} must be an int {allowed}, got {value!r}")
    return int(value)


class EngineError(RuntimeError):
    """The engine cannot do this in its present state; the message says what to call first."""


class NotReset(EngineError):
    """There is no world yet: reset() comes first."""


class EpisodeOver(EngineError):
    """The episode ended; only reset() goes on from here. (Stock crafter lets a dead player walk on.)"""
