"""The rules of the Crafter teacher. `decide` depends only on the facts in the compact text observation.

Equal texts give equal actions, so a model that reads the text can imitate the teacher. The rules are tried in
the order of `RULE_ORDER`; each rule returns the actions of one decision, or None if it does not apply. A rule
first walks as the text says (`tree L2 U1` -> left, left, up), and then acts on the thing in front.
"""

from collections.abc import Callable
from dataclasses import replace

from task_app.environments.crafter.landmarks import NEAR_CELLS, PLACES, Facts
from task_app.environments.crafter.rules import RULES
from task_app.environments.crafter.walks import Walk

Actions = list[str]
Rule = Callable[[Facts, int], Actions | None]

LOW = 3
WEAK = 4
TOOLS = ("wood_pickaxe", "wood_sword", "stone_pickaxe", "stone_sword", "iron_pickaxe", "iron_sword")
_TABLE_WOOD = RULES.place["table"].uses["wood"]
_FURNACE_STONE = RULES.place["furnace"].uses["stone"]
_DANGERS = frozenset({"zombie", "skeleton", "arrow"})
_LIVES = {"zombie": 5, "skeleton": 3, "cow": 3}


def decide(facts: Facts, *, max_actions: int) -> Actions:
    """Return the actions of one decision: 1 to `max_actions` names."""
    return purpose(facts, max_actions=max_actions) or explore(facts)[:max_actions]


def decide_with_memory(facts: Facts, *, max_actions: int) -> Actions:
    """Apply the rules to nearby things only; if no rule applies, decide with all known things."""
    near = {kind: walk for kind, walk in facts.walks.items() if walk.cells <= NEAR_CELLS}
    actions = purpose(replace(facts, walks=near), max_actions=max_actions)
    return actions or decide(facts, max_actions=max_actions)


def purpose(facts: Facts, *, max_actions: int) -> Actions | None:
    """Return the actions of the first rule that applies; None if no rule applies."""
    for rule in RULE_ORDER:
        actions = rule(facts, max_actions)
        if actions:
            return actions[:max_actions]
    return None


def moves(facts: Facts, kind: str) -> Actions | None:
    """Return the moves that bring a `kind` in front of the player.

    The result is [] if a `kind` is in front already, and None if none can be reached.
    """
    if facts.target in PLACES.get(kind, (kind,)):
        return []
    return _walk_actions(facts, facts.walks[kind]) if kind in facts.walks else None


def _walk_actions(facts: Facts, walk: Walk) -> Actions:
    actions: Actions = []
    facing = facts.facing
    for leg in walk.legs:
        move = f"move_{leg.direction}"
        if leg.dig and facing != leg.direction:
            actions.append(move)  # turn
        actions += (["do", move] if leg.dig else [move]) * leg.count
        facing = leg.direction
    return actions


def _go_and(facts: Facts, kind: str, then: Actions) -> Actions | None:
    way = moves(facts, kind)
    if not way:
        return None if way is None else then
    return way if facts.walks[kind].more else way + then


def _gather(facts: Facts, kind: str, count: int) -> Actions | None:
    """Collect the thing in front and, if `count` is larger than 1, the nearest other thing of the kind.

    If no such thing is in front, collect the nearest one. The kind must vanish when it is collected.
    """
    if count <= 0:
        return None
    if facts.target != kind:
        return _go_and(facts, kind, ["do"])
    if count == 1 or kind not in facts.walks:
        return ["do"]
    walk = facts.walks[kind]
    return ["do", *_walk_actions(facts, walk), *([] if walk.more else ["do"])]


def _count(facts: Facts, name: str) -> int:
    return facts.inventory.get(name, 0)


def _todo(facts: Facts, name: str) -> bool:
    return name not in facts.achievements


def _hits(facts: Facts, creature: str) -> int:
    damage = 1
    for sword, value in (("wood_sword", 2), ("stone_sword", 3), ("iron_sword", 5)):
        damage = value if _count(facts, sword) else damage
    return -(-_LIVES[creature] // damage)


def sleep_on(facts: Facts, limit: int) -> Actions | None:
    return ["sleep"] * limit if facts.sleeping else None


def fight_back(facts: Facts, limit: int) -> Actions | None:
    """Attack a zombie or skeleton in one of the four neighbour cells."""
    for creature in ("zombie", "skeleton"):
        if creature in facts.neighbours.values():
            return _go_and(facts, creature, ["do"] * _hits(facts, creature))
    return None


def drink_or_eat_when_low(facts: Facts, limit: int) -> Actions | None:
    if _count(facts, "drink") <= LOW and (actions := _go_and(facts, "water", ["do"] * limit)):
        return actions
    return _go_and(facts, "cow", ["do"] * _hits(facts, "cow")) if _count(facts, "food") <= LOW else None


def craft(facts: Facts, limit: int) -> Actions | None:
    """Make every missing tool for which the player has the materials and the table or furnace nearby."""
    stock = dict(facts.inventory)
    crafts: Actions = []
    for tool in TOOLS:
        rule = RULES.make[tool]
        payable = all(stock.get(name, 0) >= count for name, count in rule.uses.items())
        if not stock.get(tool) and payable and facts.near.issuperset(rule.nearby):
            for name, count in rule.uses.items():
                stock[name] -= count
            crafts.append(f"make_{tool}")
    return crafts or None


def plant(facts: Facts, limit: int) -> Actions | None:
    if not _todo(facts, "place_plant") or not _count(facts, "sapling"):
        return None
    return _go_and(facts, "grass", ["place_plant"])


def put_down_a_stone(facts: Facts, limit: int) -> Actions | None:
    """Place a stone in front and collect it again, unless `place_stone` is unlocked."""
    if not _todo(facts, "place_stone") or not _count(facts, "stone"):
        return None
    if facts.target in RULES.place["stone"].where:
        return ["place_stone", "do"]
    return _go_and(facts, "ground", ["place_stone", "do"])


def set_up_table(facts: Facts, limit: int) -> Actions | None:
    """Go to a known table; if none is known and the wood suffices, place a table and make the next tools.

    The rule applies only if `_next_tools` returns tools and no table is near.
    """
    tools = _next_tools(facts)
    if not tools or "table" in facts.near:
        return None
    if "table" in facts.walks:
        return moves(facts, "table")
    wood = _TABLE_WOOD + sum(RULES.make[tool].uses["wood"] for tool in tools)
    if _count(facts, "wood") < wood:
        return None
    return _go_and(facts, "ground", ["place_table", *(f"make_{tool}" for tool in tools)])


def _next_tools(facts: Facts) -> list[str]:
    """Return the missing tools (pickaxe, sword) of the first material for which a tool is missing.

    The materials are wood, stone and iron. Return [] if the player has too little stone for the stone tools,
    or lacks iron, coal or wood for an iron tool. The wood for wooden and stone tools is not checked. Of two
    missing iron tools, return only the pickaxe.
    """
    for material in ("wood", "stone", "iron"):
        pair = [tool for tool in (f"{material}_pickaxe", f"{material}_sword") if not _count(facts, tool)]
        if not pair:
            continue
        if material == "wood":
            return pair
        if material == "stone":
            return pair if _count(facts, "stone") >= len(pair) else []
        ready = _count(facts, "iron") and _count(facts, "coal") and _count(facts, "wood")
        return pair[:1] if ready else []
    return []


def set_up_furnace(facts: Facts, limit: int) -> Actions | None:
    stone = _count(facts, "stone")
    if "furnace" in facts.near or stone < _FURNACE_STONE:
        return None
    spare = stone - sum(not _count(facts, tool) for tool in ("stone_pickaxe", "stone_sword"))
    iron_ready = "table" in facts.near and _count(facts, "iron") and _count(facts, "coal")
    if iron_ready or (_todo(facts, "place_furnace") and spare >= _FURNACE_STONE):
        return _go_and(facts, "ground", ["place_furnace"])
    return None


def sleep_early(facts: Facts, limit: int) -> Actions | None:
    """Sleep if energy is low and no zombie is known.

    Energy is low if it is below `LOW`. By day, until `wake_up` is unlocked, any value below 9 is low.
    """
    is_tired = _count(facts, "energy") < (9 if _todo(facts, "wake_up") and not facts.dark else LOW)
    return ["sleep"] * limit if is_tired and "zombie" not in facts.walks else None


def look_for_sapling(facts: Facts, limit: int) -> Actions | None:
    in_danger = _count(facts, "health") <= WEAK or not facts.walks.keys().isdisjoint(_DANGERS)
    if in_danger or not _todo(facts, "collect_sapling"):
        return None
    return _go_and(facts, "grass", ["do"] * limit)


def first_drink(facts: Facts, limit: int) -> Actions | None:
    return _go_and(facts, "water", ["do"]) if _todo(facts, "collect_drink") else None


def first_cow(facts: Facts, limit: int) -> Actions | None:
    return _go_and(facts, "cow", ["do"] * _hits(facts, "cow")) if _todo(facts, "eat_cow") else None


def hunt(facts: Facts, limit: int) -> Actions | None:
    """Attack a zombie or skeleton if none of its kind was defeated yet and health is above `WEAK`."""
    if _count(facts, "health") <= WEAK:
        return None
    for creature in ("zombie", "skeleton"):
        if _todo(facts, f"defeat_{creature}") and creature in facts.walks:
            return _go_and(facts, creature, ["do"] * _hits(facts, creature))
    return None


def wood(facts: Facts, limit: int) -> Actions | None:
    """Gather wood for the missing wooden tools and a table.

    If no wooden tool is missing, gather wood for the other tools and for a second table near the iron.
    """
    wooden, stony, iron = (
        sum(not _count(facts, f"{material}_{tool}") for tool in ("pickaxe", "sword"))
        for material in ("wood", "stone", "iron")
    )
    tools = wooden or stony + iron
    needs_table = tools > 0 and ("table" not in facts.near or (stony > 0 and not wooden))
    return _gather(facts, "tree", tools + _TABLE_WOOD * needs_table - _count(facts, "wood"))


def stone(facts: Facts, limit: int) -> Actions | None:
    if not _count(facts, "wood_pickaxe"):
        return None
    goal = sum(not _count(facts, tool) for tool in ("stone_pickaxe", "stone_sword"))
    goal += _FURNACE_STONE if _todo(facts, "place_furnace") or not _count(facts, "iron_sword") else 0
    return _gather(facts, "stone", goal - _count(facts, "stone"))


def ore(facts: Facts, limit: int) -> Actions | None:
    """Gather the first of diamond, iron and coal that is needed, known, and minable with the pickaxes."""
    goals = (
        ("diamond", "iron_pickaxe", 1),
        ("iron", "stone_pickaxe", 1 + (not _count(facts, "iron_pickaxe"))),
        ("coal", "wood_pickaxe", 1 + (not _count(facts, "iron_pickaxe"))),
    )
    for kind, pickaxe, goal in goals:
        if _count(facts, pickaxe) and (actions := _gather(facts, kind, goal - _count(facts, kind))):
            return actions
    return None


def explore(facts: Facts) -> Actions:
    """Walk to the edge of the view; if the edge cannot be reached, clear the cell in front and step there."""
    way = moves(facts, "way")
    if way:
        return way
    return ["noop"] if facts.target == "lava" else ["do", f"move_{facts.facing}"]


RULE_ORDER: tuple[Rule, ...] = (
    sleep_on, fight_back, drink_or_eat_when_low, craft, put_down_a_stone, plant, set_up_table, set_up_furnace,
    first_cow, first_drink, sleep_early, look_for_sapling, wood, ore, stone, hunt,
)  # fmt: skip
