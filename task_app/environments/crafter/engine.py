"""A reproducible Crafter engine: the game of the package crafter 1.8.3 ("stock"), some thirty times faster.

The same seed and actions give the same episode in every process. In stock, one choice depends on memory
addresses: which creature is despawned. This engine makes that choice by order of creation (see balance.py).
An env step draws no picture. In the dark it still draws the random numbers of stock's picture, so that all
later random numbers equal stock's.
"""

import functools
from typing import Any, NoReturn, cast

import numpy as np
import numpy.typing as npt

from task_app.environments.crafter import picture
from task_app.environments.crafter.balance import balance
from task_app.environments.crafter.grid import CENTER
from task_app.environments.crafter.objects import Being, Plant
from task_app.environments.crafter.player import Player
from task_app.environments.crafter.rules import ACHIEVEMENTS, ACTIONS
from task_app.environments.crafter.state import GameState, capture, rebuild
from task_app.environments.crafter.view import COLUMNS, ROWS, LocalView, local_view
from task_app.environments.crafter.world import World, seeded_bits
from task_app.environments.crafter.worldgen import generate_world

SEED_LIMIT = 2**31 - 1
STOCK_SIZE = 64  # side in pixels of the picture that stock draws in every step
# One random number per pixel of stock's dark map picture: 9x7 cells with a side of 64 // 9 = 7 pixels.
NIGHT_DRAWS = COLUMNS * ROWS * (STOCK_SIZE // COLUMNS) ** 2
UPDATE_RADIUS = 2 * COLUMNS  # things at this distance (in steps) from the player or farther do not move
BALANCE_EVERY = 10


@functools.lru_cache(maxsize=16_384)
def daylight_at(step: int) -> float:
    """Return the daylight after `step` env steps, in [0, 1], equal to stock's to the last bit.

    A day lasts 300 steps.
    """
    progress = (step / 300) % 1 + 0.3
    return float(1 - np.abs(np.cos(np.pi * progress)) ** 3)


class CrafterEngine:
    """Runs one episode of Crafter in the 64x64 world of one seed. Threads must not share an engine."""

    def __init__(self, seed: int, *, length: int = 10_000) -> None:
        """Prepare an engine; `reset` makes its world.

        The seed lies in 0 .. 2**31 - 2, as for `crafter.Env`. An episode ends after `length` env steps, at
        least 1. Raises ValueError for a seed or a length out of range.
        """
        self.seed = _check_int("seed", seed, 0, SEED_LIMIT - 1)
        self.length = _check_int("length", length, 1, None)
        self.step_count = 0
        self._game: tuple[World, Player] | None = None
        self._zero_count = len(ACHIEVEMENTS)
        self.last_health = 0  # after the last step, for the next reward

    @property
    def world(self) -> World:
        """The world. Raises NotReset before the first reset."""
        return (self._game or _refuse_early())[0]

    @property
    def player(self) -> Player:
        """The player. Raises NotReset before the first reset."""
        return (self._game or _refuse_early())[1]

    def reset(self) -> None:
        """Make the world that stock's `crafter.Env(seed=seed)` makes at its first reset.

        Every reset makes this same world; stock makes a new world at each reset.
        """
        self.step_count = 0
        player = Player(CENTER, CENTER, Plant)
        # The seed of stock's first episode. hash() of a tuple of ints does not depend on PYTHONHASHSEED.
        world = generate_world(hash((self.seed, 1)) % (2**31 - 1), player)
        world.daylight = daylight_at(0)
        self._game = world, player
        self.last_health = player.inventory["health"]
        self._zero_count = len(ACHIEVEMENTS)

    def act(self, action: int) -> float:
        """Run one env step, and return stock's reward.

        The reward is a tenth of the change of health, plus 1.0 if the step unlocked at least one achievement.

        Args:
            action: index in ACTIONS, 0 .. 16.

        Raises:
            NotReset: `reset` was not called.
            EpisodeOver: the player is dead, or `length` steps were made.
            ValueError: the action is out of range.
        """
        world, player = self._game or _refuse_early()
        if self.over:
            raise EpisodeOver(f"the episode ended at step {self.step_count}; call reset() to start again")
        if not 0 <= action < len(ACTIONS):
            raise ValueError(f"action must lie in 0 .. {len(ACTIONS) - 1}, got {action!r}")
        self.step_count += 1
        world.daylight = daylight_at(self.step_count)
        others = cast("list[Being]", world.things[1:])  # without a plant that is placed in this step
        player.update(world, action)
        # |dx| + |dy| < r is equivalent to |dx + dy| < r and |dx - dy| < r, which needs no call of abs().
        low, left = player.x + player.y - UPDATE_RADIUS, player.x - player.y - UPDATE_RADIUS
        high, right = low + 2 * UPDATE_RADIUS, left + 2 * UPDATE_RADIUS
        # A thing moves only in its own update, so the near things can be selected before the first update.
        near = [
            being for being in others if low < being.x + being.y < high and left < being.x - being.y < right
        ]
        for being in near:
            being.update(world, player)
        if self.step_count % BALANCE_EVERY == 0:
            balance(world, player)
        if world.daylight < 0.5:
            world.random.random_sample(NIGHT_DRAWS)
        return self._compute_reward(player)

    def _compute_reward(self, player: Player) -> float:
        health = player.inventory["health"]
        reward = (health - self.last_health) / 10
        self.last_health = health
        counts = [*player.achievements.values()]
        if counts.count(0) != self._zero_count:
            self._zero_count = counts.count(0)
            reward += 1.0
        return reward

    @property
    def dead(self) -> bool:
        """Whether the player's health is 0."""
        return self._game is not None and self._game[1].inventory["health"] <= 0

    @property
    def over(self) -> bool:
        """Whether the player is dead or `length` steps were made."""
        return self.step_count >= self.length or self.dead

    @property
    def inventory(self) -> dict[str, int]:
        """The 16 item counts, including health, food, drink and energy; the dict changes with each step."""
        return self.player.inventory

    @property
    def achievements(self) -> dict[str, int]:
        """How often each of the 22 achievements was reached in this episode.

        The dict changes with each step.
        """
        return self.player.achievements

    @property
    def position(self) -> tuple[int, int]:
        """(x, y) of the player, each in 0 .. 63; y grows downwards."""
        return self.player.x, self.player.y

    @property
    def faced_health(self) -> int:
        """Health of the creature or plant in front of the player; 0 if there is none."""
        world, player = self._game or _refuse_early()
        return int(getattr(world.at[player.target_cell()], "health", 0))

    def view(self) -> LocalView:
        return local_view(*(self._game or _refuse_early()))

    def frame(self, width: int = 288, height: int = 288) -> npt.NDArray[np.uint8]:
        """Draw the game as stock does, as an RGB picture [height, width, 3]; the game does not change."""
        return picture.draw(*(self._game or _refuse_early()), width, height)

    def capture(self) -> GameState:
        return capture(*(self._game or _refuse_early()))

    def reseed(self, seed: int) -> None:
        self.world.draw_from(seeded_bits(seed))

    def with_state(self, state: GameState, step: int, last_health: int) -> "CrafterEngine":
        """Return a new engine with this engine's seed and length, in the given state after `step` env steps.

        `last_health` is the health after the last step, from which the next reward is computed.
        """
        other = CrafterEngine(self.seed, length=self.length)
        world, player = rebuild(state)
        world.daylight = daylight_at(step)
        other._game = world, player
        other.step_count, other.last_health = step, last_health
        other._zero_count = [*player.achievements.values()].count(0)
        return other


def _refuse_early() -> NoReturn:
    raise NotReset("there is no world yet; call reset() first")


def _check_int(name: str, value: Any, low: int, high: int | None) -> int:  # Any: callers may pass anything
    bounds = f"at least {low}" if high is None else f"in [{low}, {high}]"
    # bool is a subclass of int, but True is a mistake.
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or value < low or (high is not None and value > high):
        raise ValueError(f"{name} must be an int {bounds}, got {value!r}")
    return int(value)


class NotReset(RuntimeError):
    """Raised when an engine without a world is used; call reset() first."""


class EpisodeOver(RuntimeError):
    """Raised for a step after the episode's end; call reset(). (In stock, a dead player can continue.)"""
