"""The two text styles of an observation, as pure functions of `Observation.data`.

The style `full` has the usual layout of Crafter task apps. The style `compact` consists of a few dozen words
of a small closed vocabulary, one token each, for models with under a million parameters.
"""

from collections.abc import Iterable, Mapping
from itertools import compress
from typing import Any

from task_app.environments.crafter.landmarks import KINDS, MAX_CELLS, NEAR_CELLS, Facts, read_facts
from task_app.environments.crafter.prompt import news_lines
from task_app.environments.crafter.walks import Leg

MATERIAL_ITEMS = ("sapling", "wood", "stone", "coal", "iron", "diamond")
TOOLS = ("wood_pickaxe", "stone_pickaxe", "iron_pickaxe", "wood_sword", "stone_sword", "iron_sword")
# Achievements that the inventory does not show. The text lists those that are not unlocked yet, so that the
# player does not repeat the others.
TODO = (
    "collect_sapling", "place_plant", "collect_drink", "eat_cow", "wake_up", "place_table", "place_stone",
    "place_furnace", "collect_diamond", "defeat_zombie", "defeat_skeleton", "eat_plant",
)  # fmt: skip
NEAR = ("table", "furnace")
NEWS_WORDS = ("hurt", "no-effect", "invalid")
MAX_WORDS = 60
# The limit is higher with a memory, because the player then knows most kinds of things.
MAX_REMEMBERED_WORDS = 110
# A leg of more cells than this is written as if it had this many.
LONGEST_LEG = 9
VITAL_WORDS = {"health": "hp", "food": "food", "drink": "drink", "energy": "rest"}
LEG_LETTERS = {"left": "L", "right": "R", "up": "U", "down": "D"}


def full_text(data: Mapping[str, Any]) -> str:
    """Write the state as named lines, and the map row by row from the north."""
    inventory = data["inventory"]
    items = [f"{name}:{count}" for name, count in inventory.items() if count and name != "health"]
    light = "dark (night; zombies may be about)" if data["dark"] else "day"
    if data["sleeping"]:
        light = "asleep (every action is sleep until you wake)"
    lines = [
        "=== CRAFTER GAME STATE ===",
        f"Step: {data['step']}/{data['max_steps']}",
        f"Health: {inventory['health']}",
        f"Position: {list(data['position'])}",
        f"Facing: {list(data['facing'])}",
        f"Inventory: {', '.join(items) or 'empty'}",
        f"Achievements: {', '.join(data['achievements']) or 'none'}",
        f"In front: {data['target']}",
        f"Light: {light}",
        *(f"News: {line}" for line in news_lines(data["news"])),
        "",
        "Local Map View (9x7):",
        *(" ".join(row) for row in data["rows"]),
        "",
        "Choose your next actions.",
    ]
    return "\n".join(lines)


def compact_text(data: Mapping[str, Any], remembered: Facts | None = None) -> str:
    """Write the state in 25 to 60 words of a closed vocabulary, always in the same order, on one line.

    The first twenty-five words have fixed positions: vitals, light, direction, the faced cell, the four
    neighbouring cells, materials, tools, and whether table and furnace are in crafting range. Then follow the
    achievements that are still to do, the walks, and the news.

        hp9 food8 drink7 rest9 day facing-up @grass left=tree right=grass up=grass down=sand sapling0 ...
        no-wood_pickaxe ... near-table far-furnace todo-eat_cow ... tree L1 water L2 U1 way U3 +collect_wood

    `water L2 U1` is a walk: two moves to the left, then one up, which bumps into the water, so that the
    player faces it. `xU2` means two cells up through stone: the player must dig each cell and then enter it.
    `more` means that the walk continues. There is no walk to the faced cell (`@grass`). The walks `grass` and
    `ground` end when the player faces a cell of grass, or any ground to build on. The walk `way` leads out of
    view. `lava R2 D1` is a warning and not a walk: the nearest lava is two columns to the right and one row
    down. In the news, `no-effect` means that the last action changed nothing, and `invalid` means that the
    last call was refused.

    `remembered` are the facts of a `MapMemory`. If they are given, the walks lead to all things seen so far,
    the text has up to 110 words, and `far` replaces `more` for a thing that is more than NEAR_CELLS cells
    away.
    """
    facts = remembered or read_facts(data)
    most = MAX_REMEMBERED_WORDS if remembered else MAX_WORDS
    head, news = _state_words(facts), [f"+{name}" for name in data["news"]["unlocked"]]
    flags = data["news"]["health_change"] < 0, data["news"]["no_effect"], data["news"]["invalid"] is not None
    news += compress(NEWS_WORDS, flags)
    if facts.lava:
        head += ["lava", *_leg_words(facts.lava)]
    for kind in KINDS:
        if walk := facts.walks.get(kind):
            shown = walk.cut(MAX_CELLS) if remembered else walk  # walks of a view are cut already
            rest = "far" if remembered and walk.cells > NEAR_CELLS else "more"
            words = [kind, *_leg_words(shown.legs), *[rest] * shown.more]
            # In a crowded view the last kinds are omitted.
            head += words if len(head) + len(words) + len(news) <= most else []
    return " ".join((head + news)[:most])


def _state_words(facts: Facts) -> list[str]:
    inventory = facts.inventory
    return [
        *[f"{word}{inventory[name]}" for name, word in VITAL_WORDS.items()],
        "asleep" if facts.sleeping else "dark" if facts.dark else "day",
        f"facing-{facts.facing}",
        f"@{facts.target}",
        *[f"{direction}={kind}" for direction, kind in facts.neighbours.items()],
        *[f"{name}{inventory[name]}" for name in MATERIAL_ITEMS],
        *[name if inventory[name] else f"no-{name}" for name in TOOLS],
        *[f"{'near' if name in facts.near else 'far'}-{name}" for name in NEAR],
        *[f"todo-{name}" for name in TODO if name not in facts.achievements],
    ]


def _leg_words(legs: Iterable[Leg]) -> list[str]:
    return [
        f"{'x' if leg.dig else ''}{LEG_LETTERS[leg.direction]}{min(leg.count, LONGEST_LEG)}" for leg in legs
    ]
