"""The player: its visible and hidden counters, and the effects of the 17 actions.

It reproduces the `Player` of stock crafter 1.8.3, with the same random draws and quirks.
"""

from collections.abc import Callable, Mapping

from task_app.environments.crafter.grid import (
    AREA,
    FACINGS,
    MATERIAL_IDS,
    MATERIAL_NAMES,
    PLAYER_WALKABLE,
    STRIDE,
)
from task_app.environments.crafter.rules import ACHIEVEMENTS, ACTIONS, RULES, CollectRule, MakeRule, PlaceRule
from task_app.environments.crafter.world import PLAYER, Thing, World

ITEM_MAX = dict(RULES.item_max)
SMALLEST_MAX = min(ITEM_MAX.values())
ENERGY_MAX = ITEM_MAX["energy"]
SLEEP = ACTIONS.index("sleep")
LAVA, WATER = MATERIAL_IDS["lava"], MATERIAL_IDS["water"]
# Damage of a blow with each sword; 1 without a sword.
SWORDS = (("wood_sword", 2), ("stone_sword", 3), ("iron_sword", 5))


class Interactive(Thing):
    """A thing on which the player can act."""

    __slots__ = ()

    def acted_on(self, player: "Player", damage: int) -> None:
        """React to the player's action `do`, which is a blow that takes `damage` health points."""


class Player(Thing):
    """The player of a world.

    Attributes:
        inventory: the 16 item counts, including health, food, drink and energy.
        achievements: how often each of the 22 achievements was reached.
        facing: (dx, dy) of the direction in which the player last moved or tried to move.
        sleeping: whether the player sleeps. A sleeping player whose energy is not full executes `sleep`
            instead of the requested action.
        last_health, hunger, thirst, fatigue, recover: stock's hidden counters, in multiples of 0.5.
    """

    kind = PLAYER

    def __init__(self, x: int, y: int, plant: Callable[[int, int], Thing]) -> None:
        """Place the player at (x, y) with the starting inventory.

        `plant(x, y)` makes the plant that a sapling becomes when the player places it.
        """
        super().__init__(x, y)
        self.plant = plant
        self.facing = (0, 1)
        self.inventory = dict(RULES.item_start)
        self.achievements = dict.fromkeys(ACHIEVEMENTS, 0)
        self.sleeping = False
        self.last_health = self.inventory["health"]
        self.hunger = self.thirst = self.fatigue = self.recover = 0.0

    def hurt(self, damage: int) -> None:
        self.inventory["health"] = max(0, self.inventory["health"] - damage)

    def update(self, world: World, action: int) -> None:
        """Run one step of the player: the action, then hunger and healing."""
        if self.sleeping:
            if self.inventory["energy"] < ENERGY_MAX:
                action = SLEEP
            else:
                self.sleeping = False
                self.achievements["wake_up"] += 1
        HANDLERS[action](self, world)
        self._update_life_stats()
        self._degen_or_regen_health()
        amounts = self.inventory.values()
        # Counts are nearly always within their bounds, which two built-in calls check faster than a loop.
        if max(amounts) > SMALLEST_MAX or min(amounts) < 0:
            for name, amount in self.inventory.items():
                self.inventory[name] = max(0, min(amount, ITEM_MAX[name]))
        health = self.inventory["health"]
        if health < self.last_health:  # damage wakes the player up, without the achievement wake_up
            self.sleeping = False
        self.last_health = health

    def _update_life_stats(self) -> None:
        pace = 0.5 if self.sleeping else 1
        self.hunger += pace
        if self.hunger > 25:
            self.hunger = 0
            self.inventory["food"] -= 1
        self.thirst += pace
        if self.thirst > 20:
            self.thirst = 0
            self.inventory["drink"] -= 1
        self.fatigue = min(self.fatigue - 1, 0) if self.sleeping else self.fatigue + 1
        if self.fatigue < -10:
            self.fatigue = 0
            self.inventory["energy"] += 1
        if self.fatigue > 30:
            self.fatigue = 0
            self.inventory["energy"] -= 1

    def _degen_or_regen_health(self) -> None:
        inventory, asleep = self.inventory, self.sleeping
        if inventory["food"] > 0 and inventory["drink"] > 0 and (inventory["energy"] > 0 or asleep):
            self.recover += 2 if asleep else 1
        else:
            self.recover -= 0.5 if asleep else 1
        if self.recover > 25:
            self.recover = 0
            inventory["health"] = max(0, inventory["health"] + 1)
        if self.recover < -15:
            self.recover = 0
            inventory["health"] = max(0, inventory["health"] - 1)

    def target_cell(self) -> int:
        """Return the index of the faced cell, which may lie one cell outside the world."""
        return self.cell + self.facing[0] + self.facing[1] * STRIDE

    def walk(self, world: World, direction: tuple[int, int]) -> None:
        """Face `direction`, and step onto the next cell if it is free. Lava counts as free, and kills."""
        self.facing = direction
        self.try_move(world, direction, PLAYER_WALKABLE)
        if world.materials[self.cell] == LAVA:
            self.inventory["health"] = 0

    def act_on_target(self, world: World) -> None:
        """Execute action 'do': hit, eat or collect what the player faces."""
        target = self.target_cell()
        thing = world.at[target]
        if thing is None:
            self._collect(world, target)
        elif isinstance(thing, Interactive):
            inventory = self.inventory
            thing.acted_on(self, max(1, *(damage for sword, damage in SWORDS if inventory[sword]), 1))

    def _collect(self, world: World, target: int) -> None:
        material = world.materials[target]
        if material == WATER:
            self.thirst = 0
        rule = COLLECT[material]
        if rule is None or not self._holds(rule.requires):
            return
        world.set_material(target, MATERIAL_IDS[rule.leaves])
        # Draw even at probability 1, as stock does: otherwise all later draws would differ.
        if world.uniform() <= rule.probability:
            for name, amount in rule.receives.items():
                self.inventory[name] += amount
                self.achievements[f"collect_{name}"] += 1

    def fall_asleep(self, world: World) -> None:
        """Execute action 'sleep': fall asleep, unless energy is full."""
        if self.inventory["energy"] < ENERGY_MAX:
            self.sleeping = True

    def place(self, world: World, name: str, rule: PlaceRule) -> None:
        """Put a material or a plant on the faced cell.

        Nothing happens if the cell is not empty, if its ground is not allowed, or if the player lacks the
        items.
        """
        target = self.target_cell()
        if world.at[target] is not None or MATERIAL_NAMES[world.materials[target]] not in rule.where:
            return
        if not self._use(rule.uses):
            return
        if rule.kind == "material":
            world.set_material(target, MATERIAL_IDS[name])
        else:
            world.add(self.plant(self.x + self.facing[0], self.y + self.facing[1]))
        self.achievements[f"place_{name}"] += 1

    def make(self, world: World, name: str, rule: MakeRule) -> None:
        nearby = self._materials_nearby(world)
        if all(MATERIAL_IDS[material] in nearby for material in rule.nearby) and self._use(rule.uses):
            self.inventory[name] += rule.gives
            self.achievements[f"make_{name}"] += 1

    def _materials_nearby(self, world: World) -> set[int]:
        # Quirk of stock: a slice from x - 1 = -1 is empty, so nothing is nearby at the left and top edge.
        if self.x == 0 or self.y == 0:
            return set()
        columns = 2 if self.x == AREA - 1 else 3
        rows = 2 if self.y == AREA - 1 else 3
        start = self.cell - STRIDE - 1
        nearby: set[int] = set()
        for row in range(rows):
            nearby.update(world.materials[start + row * STRIDE : start + row * STRIDE + columns])
        return nearby

    def _holds(self, needs: Mapping[str, int]) -> bool:
        return all(self.inventory[name] >= amount for name, amount in needs.items())

    def _use(self, uses: Mapping[str, int]) -> bool:
        """Take the items out of the inventory if it contains all of them; return whether it did."""
        if not self._holds(uses):
            return False
        for name, amount in uses.items():
            self.inventory[name] -= amount
        return True


Handler = Callable[[Player, World], None]


def _find_handler(action: str) -> Handler:
    """Return the function that executes an action; the first word of the action's name selects it."""
    verb, _, name = action.partition("_")
    if action == "noop":
        return lambda player, world: None
    if action == "do":
        return Player.act_on_target
    if action == "sleep":
        return Player.fall_asleep
    if verb == "move":
        return lambda player, world: player.walk(world, FACINGS[name])
    if verb == "place":
        return lambda player, world: player.place(world, name, RULES.place[name])
    return lambda player, world: player.make(world, name, RULES.make[name])


HANDLERS: tuple[Handler, ...] = tuple(_find_handler(action) for action in ACTIONS)
COLLECT: tuple[CollectRule | None, ...] = tuple(RULES.collect.get(name) for name in MATERIAL_NAMES)
