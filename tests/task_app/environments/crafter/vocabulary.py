"""Every word that the compact text can hold: a tokenizer built from this list has no unknown words."""

from itertools import product

from task_app.environments.crafter.grid import FACINGS, VOID
from task_app.environments.crafter.landmarks import KINDS, THINGS
from task_app.environments.crafter.rules import ACHIEVEMENTS, MATERIALS, RULES
from task_app.environments.crafter.text import (
    LEG_LETTERS,
    LONGEST_LEG,
    MATERIAL_ITEMS,
    NEAR,
    NEWS_WORDS,
    TODO,
    TOOLS,
    VITAL_WORDS,
)


def compact_vocabulary() -> tuple[str, ...]:
    """All words of the compact text, sorted, each once; `more` and `far` tell that a walk goes on."""
    seen = sorted({*MATERIALS, *THINGS, VOID})
    words = {*KINDS, "asleep", "dark", "day", *NEWS_WORDS, *TOOLS, "lava", "more", "far"}
    words |= {
        f"{word}{count}" for name, word in VITAL_WORDS.items() for count in range(RULES.item_max[name] + 1)
    }
    words |= {f"{name}{count}" for name in MATERIAL_ITEMS for count in range(RULES.item_max[name] + 1)}
    words |= {f"no-{name}" for name in TOOLS} | {f"todo-{name}" for name in TODO}
    words |= {f"+{name}" for name in ACHIEVEMENTS} | {f"@{name}" for name in seen}
    words |= {f"{direction}={name}" for direction, name in product(FACINGS, seen)}
    words |= {f"facing-{direction}" for direction in FACINGS}
    words |= {f"{prefix}-{name}" for prefix, name in product(("near", "far"), NEAR)}
    words |= {
        f"{dig}{LEG_LETTERS[direction]}{count}"
        for dig, direction in product(("", "x"), FACINGS)
        for count in range(1, LONGEST_LEG + 1)
    }
    return tuple(sorted(words))
