"""Creatures, arrows and plants, which make the same random draws as in stock crafter 1.8.3.

As in stock, a creature whose health is 0 is removed in its next update, and still acts in that update. The
flag `removed` prevents it from moving.
"""

from task_app.environments.crafter.grid import ARROW_WALKABLE, DIRECTIONS, MATERIAL_IDS, STRIDE, WALKABLE
from task_app.environments.crafter.player import Interactive, Player
from task_app.environments.crafter.world import ARROW, COW, PLANT, SKELETON, ZOMBIE, World

PATH = MATERIAL_IDS["path"]
BREAKABLE = (MATERIAL_IDS["table"], MATERIAL_IDS["furnace"])
EATERS = (ZOMBIE, SKELETON, COW)
RIPE_AFTER = 300


class Being(Interactive):
    """A thing with health.

    A subclass may have a counter, such as a cooldown, in the attribute that `counter` names. The counter
    starts at 0.
    """

    __slots__ = ("health",)
    start_health: int
    counter = ""

    def __init__(self, x: int, y: int) -> None:
        super().__init__(x, y)
        self.health = self.start_health
        if self.counter:
            setattr(self, self.counter, 0)

    def hurt(self, damage: int) -> None:
        self.health = max(0, self.health - damage)

    def update(self, world: World, player: Player) -> None:
        raise NotImplementedError

    def extra(self) -> tuple[int, ...]:
        """Return the state that a snapshot stores in addition to kind, position and health."""
        return (getattr(self, self.counter),) if self.counter else ()

    def restore(self, health: int, extra: tuple[int, ...]) -> None:
        self.health = health
        if self.counter:
            setattr(self, self.counter, extra[0])


def toward(dx: int, dy: int, long_axis: bool) -> tuple[int, int]:
    """Return a unit step towards (dx, dy): along its longer axis if `long_axis`, else along the shorter one.

    If both axes are equally long, y counts as the longer one.
    """
    if (abs(dx) > abs(dy)) == long_axis:
        return (dx > 0) - (dx < 0), 0
    return 0, (dy > 0) - (dy < 0)


class Creature(Being):
    """A being that the player can kill; a kill counts for the achievement that `achievement` names."""

    __slots__ = ()
    achievement: str

    def acted_on(self, player: Player, damage: int) -> None:
        self.hurt(damage)
        if self.health <= 0:
            player.achievements[self.achievement] += 1


class Cow(Creature):
    """A cow, which moves in a random direction with probability 1/2 in each step, and is food when killed."""

    __slots__ = ()
    kind = COW
    start_health = 3
    achievement = "eat_cow"

    def update(self, world: World, player: Player) -> None:
        if self.health <= 0:
            world.remove(self)
        if world.uniform() < 0.5:
            self.try_move(world, DIRECTIONS[world.word() & 3], WALKABLE)

    def acted_on(self, player: Player, damage: int) -> None:
        super().acted_on(player, damage)
        if self.health <= 0:
            player.inventory["food"] += 6
            player.hunger = 0


class Zombie(Creature):
    """A zombie, which usually walks towards a player within 8 cells, and otherwise moves at random.

    If the player is on a neighbouring cell, the zombie hits for 2 health, or for 7 if the player sleeps. Then
    it waits 5 steps next to the player before it hits again.
    """

    __slots__ = ("cooldown",)
    kind = ZOMBIE
    start_health = 5
    counter = "cooldown"
    achievement = "defeat_zombie"
    cooldown: int

    def update(self, world: World, player: Player) -> None:
        if self.health <= 0:
            world.remove(self)
        dx, dy = player.x - self.x, player.y - self.y
        if abs(dx) + abs(dy) <= 8 and world.uniform() < 0.9:
            self.try_move(world, toward(dx, dy, world.uniform() < 0.8), WALKABLE)
        else:
            self.try_move(world, DIRECTIONS[world.word() & 3], WALKABLE)
        if abs(player.x - self.x) + abs(player.y - self.y) <= 1:
            if self.cooldown:
                self.cooldown -= 1
            else:
                player.hurt(7 if player.sleeping else 2)
                self.cooldown = 5


class Skeleton(Creature):
    """A skeleton, which keeps its distance from the player and shoots arrows.

    It steps back from a player within 3 cells. If it has not stepped back, it may shoot at a player within 5
    cells, follow a player within 8 cells, or move at random, each with a fixed probability.
    """

    __slots__ = ("reload",)
    kind = SKELETON
    start_health = 3
    counter = "reload"
    achievement = "defeat_skeleton"
    reload: int

    def update(self, world: World, player: Player) -> None:
        if self.health <= 0:
            world.remove(self)
        self.reload = max(0, self.reload - 1)
        dx, dy = player.x - self.x, player.y - self.y
        distance, uniform = abs(dx) + abs(dy), world.uniform
        if distance <= 3:
            step_x, step_y = toward(dx, dy, uniform() < 0.6)
            if self.try_move(world, (-step_x, -step_y), WALKABLE):
                return
        if distance <= 5 and uniform() < 0.5:
            self._shoot(world, toward(dx, dy, True))
        elif distance <= 8 and uniform() < 0.3:
            self.try_move(world, toward(dx, dy, uniform() < 0.6), WALKABLE)
        elif uniform() < 0.2:
            self.try_move(world, DIRECTIONS[world.word() & 3], WALKABLE)

    def _shoot(self, world: World, direction: tuple[int, int]) -> None:
        if self.reload > 0 or direction == (0, 0):
            return
        dx, dy = direction
        target = self.cell + dx + dy * STRIDE
        if world.at[target] is None and ARROW_WALKABLE[world.materials[target]]:
            world.add(Arrow(self.x + dx, self.y + dy, direction))
            self.reload = 4


class Arrow(Being):
    """An arrow, which flies straight on until it hits something.

    A thing that is hit loses 2 health. A table or furnace that is hit becomes path.
    """

    __slots__ = ("facing",)
    kind = ARROW
    start_health = 0

    def __init__(self, x: int, y: int, facing: tuple[int, int] = (0, 1)) -> None:
        super().__init__(x, y)
        self.facing = facing

    def update(self, world: World, player: Player) -> None:
        target = self.cell + self.facing[0] + self.facing[1] * STRIDE
        hit = world.at[target]
        if hit is not None:
            hit.hurt(2)
            world.remove(self)
        elif not ARROW_WALKABLE[world.materials[target]]:
            world.remove(self)
            if world.materials[target] in BREAKABLE:
                world.set_material(target, PATH)
        else:
            self.try_move(world, self.facing, ARROW_WALKABLE)

    def extra(self) -> tuple[int, ...]:
        return self.facing

    def restore(self, health: int, extra: tuple[int, ...]) -> None:
        self.health, self.facing = health, (extra[0], extra[1])


class Plant(Being):
    """A plant. It is ripe after RIPE_AFTER steps, unless a creature on a neighbouring cell eats it first."""

    __slots__ = ("grown",)
    kind = PLANT
    start_health = 1
    counter = "grown"
    grown: int

    @property
    def ripe(self) -> bool:
        return self.grown > RIPE_AFTER

    @property
    def name(self) -> str:
        return "ripe-plant" if self.ripe else "plant"

    def update(self, world: World, player: Player) -> None:
        self.grown += 1
        around = [world.at[self.cell + dx + dy * STRIDE] for dx, dy in DIRECTIONS]
        if any(thing is not None and thing.kind in EATERS for thing in around):
            self.hurt(1)
        if self.health <= 0:
            world.remove(self)

    def acted_on(self, player: Player, damage: int) -> None:
        if self.ripe:  # the player cannot hurt an unripe plant
            self.grown = 0
            player.inventory["food"] += 4
            player.achievements["eat_plant"] += 1


BEINGS: dict[int, type[Being]] = {cls.kind: cls for cls in (Cow, Zombie, Skeleton, Arrow, Plant)}
