"""The two text styles, on views drawn by hand and on real play, and the walks that they tell."""

import random
import re
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from task_app.environments.crafter.environment import CrafterConfig, CrafterEnvironment
from task_app.environments.crafter.grid import FACINGS, VOID
from task_app.environments.crafter.landmarks import KINDS, NEAR_CELLS, THINGS, Facts, read_facts
from task_app.environments.crafter.prompt import NO_NEWS
from task_app.environments.crafter.rules import ACHIEVEMENTS, ACTIONS, MATERIALS, RULES
from task_app.environments.crafter.text import (
    LEG_LETTERS,
    LONGEST_LEG,
    MATERIAL_ITEMS,
    MAX_REMEMBERED_WORDS,
    MAX_WORDS,
    NEAR,
    NEWS_WORDS,
    TODO,
    TOOLS,
    VITAL_WORDS,
    compact_text,
    full_text,
)
from task_app.environments.crafter.walks import (
    GROUND,
    Ground,
    Leg,
    Trails,
    Walk,
    cell_at,
    find_trails,
    locate,
    step,
    walk_to,
)
from task_app.policies.crafter_teacher import decide, decide_with_memory, wood
from task_app.policies.scripted import CrafterTeacher, TeacherConfig
from task_app.protocols import ToolRequest

LETTERS = {
    ".": "grass", "~": "water", "T": "tree", "#": "stone", "_": "path", "P": "player", "c": "cow",
    "Z": "zombie", "t": "table", "f": "furnace", "L": "lava", "i": "iron", " ": "void",
}  # fmt: skip


def view(picture: str, *, facing: tuple[int, int] = (0, 1), **changes: Any) -> dict[str, Any]:
    """Observation data of a view drawn with one letter a cell."""
    rows = [[LETTERS[letter] for letter in line] for line in picture.split("\n")]
    data: dict[str, Any] = {
        "rows": rows,
        "facing": list(facing),
        "target": rows[3 + facing[1]][4 + facing[0]],
        "near": [],
        "inventory": dict(RULES.item_start),
        "position": [32, 32],
        "sleeping": False,
        "daylight": 1.0,
        "dark": False,
        "step": 7,
        "max_steps": 200,
        "achievements": [],
        "news": NO_NEWS,
    }
    return data | changes


LAKE = "\n".join((".........", "..T......", ".........", "....P..~~", "....c..~~", ".......~~", "........."))


def test_the_full_text_prints_the_view_row_by_row_north_first():
    data = view(LAKE, achievements=["collect_wood"], inventory=RULES.item_start | {"wood": 3, "health": 8})
    assert full_text(data) == "\n".join(
        (
            "=== CRAFTER GAME STATE ===",
            "Step: 7/200",
            "Health: 8",
            "Position: [32, 32]",
            "Facing: [0, 1]",
            "Inventory: food:9, drink:9, energy:9, wood:3",
            "Achievements: collect_wood",
            "In front: cow",
            "Light: day",
            "",
            "Local Map View (9x7):",
            "grass grass grass grass grass grass grass grass grass",
            "grass grass tree grass grass grass grass grass grass",
            "grass grass grass grass grass grass grass grass grass",
            "grass grass grass grass player grass grass water water",
            "grass grass grass grass cow grass grass water water",
            "grass grass grass grass grass grass grass water water",
            "grass grass grass grass grass grass grass grass grass",
            "",
            "Choose your next actions.",
        )
    )


def test_the_full_text_says_when_it_is_dark_and_what_just_happened():
    news = NO_NEWS | {"unlocked": ["wake_up"], "health_change": -2}
    text = full_text(view(LAKE, dark=True, news=news))
    assert "Light: dark (night; zombies may be about)" in text
    assert "News: unlocked wake_up\nNews: health fell by 2\n" in text


def test_the_compact_text_of_a_hand_drawn_view():
    words = compact_text(view(LAKE, news=NO_NEWS | {"unlocked": ["eat_cow"], "no_effect": True})).split()
    assert " ".join(words[:17]) == (
        "hp9 food9 drink9 rest9 day facing-down @cow left=grass right=grass up=grass down=cow "
        "sapling0 wood0 stone0 coal0 iron0 diamond0"
    )
    assert words[23:25] == ["far-table", "far-furnace"]
    # The last step of a walk bumps into its tree or water. The faced cow has no walk, and is walked around.
    assert " ".join(words[37:]) == "way L1 D3 grass L1 ground L1 water R3 tree L2 U2 +eat_cow no-effect"


def test_walks_lead_around_what_blocks_and_never_through_lava():
    picture = "\n".join(
        ("LLLLLLLLL", "L...i...L", "L.LLLLL.L", "L.LLP.L.L", "L.LL.LL.L", "L.......L", "LLLLLLLLL")
    )
    walks = read_facts(view(picture)).walks
    assert walks["iron"] == Walk((Leg("down", 2), Leg("left", 3)), more=True)
    assert "lava" not in walks


def test_the_compact_text_warns_of_the_nearest_lava():
    picture = "\n".join(("." * 9, "." * 9, "......L..", "....P....", "." * 9, "L........", "." * 9))
    assert " lava R2 U1 " in compact_text(view(picture))
    assert "lava" not in compact_text(view(LAKE))


def test_walks_go_through_stone_only_with_a_pickaxe():
    picture = "\n".join(("#########",) * 3 + ("####P###i",) + ("#########",) * 3)
    with_pickaxe = RULES.item_start | {"wood_pickaxe": 1}
    assert "iron" not in read_facts(view(picture)).walks
    assert read_facts(view(picture, inventory=with_pickaxe)).walks["iron"] == Walk(
        (Leg("right", 3, dig=True), Leg("right", 1))
    )
    assert "iron xR3 R1" in compact_text(view(picture, inventory=with_pickaxe))


def test_a_crowded_view_keeps_to_sixty_words():
    picture = "\n".join(
        (".Z.c.~.T.", ".#.t.f.i.", ".........", "....P....", ".........", "..Z...c..", ".~.....T.")
    )
    news = NO_NEWS | {"unlocked": ["collect_wood", "place_table"], "health_change": -2, "invalid": "no call"}
    words = compact_text(view(picture, news=news)).split()
    assert 25 <= len(words) <= 60
    assert words[-4:] == ["+collect_wood", "+place_table", "hurt", "invalid"]


_TABLE = RULES.place["table"].uses["wood"]
_NAME_OF_LETTER = {letter: name for name, letter in LEG_LETTERS.items()}
_LEG = re.compile(r"(x?)([LRUD])(\d)")


def read_compact(text: str) -> Facts:
    """The facts that a compact text states: proof that it says all that the memoryless teacher plays from."""
    words = text.split()
    counts = {word.rstrip("0123456789"): int(word[-1]) for word in words[:17] if word[-1].isdigit()}
    inventory = {name: counts[word] for name, word in VITAL_WORDS.items()}
    inventory |= {name: counts[name] for name in MATERIAL_ITEMS}
    inventory |= {name: int(name in words) for name in TOOLS}
    return Facts(
        inventory=inventory,
        achievements=frozenset(name for name in TODO if f"todo-{name}" not in words),
        facing=words[5].removeprefix("facing-"),
        target=words[6].removeprefix("@"),
        neighbours=dict(word.split("=") for word in words[7:11]),
        near=frozenset(name for name in ("table", "furnace") if f"near-{name}" in words),
        walks=_walks(words[25:]),
        lava=(),  # a warning that the teacher does not read: its walks never enter lava
        sleeping=words[4] == "asleep",
        dark=words[4] == "dark",
    )


def _walks(words: list[str]) -> dict[str, Walk]:
    walks: dict[str, Walk] = {}
    kind = ""
    for word in words:
        if word in (*KINDS, "lava"):
            kind, walks[word] = word, Walk(())
        elif word == "more":
            walks[kind] = Walk(walks[kind].legs, more=True)
        elif word == "far":  # the teacher goes there last, and a decision ends before the walk does
            walks[kind] = Walk((*walks[kind].legs, Leg("up", NEAR_CELLS)), more=True)
        elif match := _LEG.fullmatch(word):
            leg = Leg(_NAME_OF_LETTER[match[2]], int(match[3]), dig=bool(match[1]))
            walks[kind] = Walk((*walks[kind].legs, leg))
    walks.pop("lava", None)
    return walks


@pytest.mark.parametrize(("memory", "most_words"), [(False, MAX_WORDS), (True, MAX_REMEMBERED_WORDS)])
def test_in_play_the_compact_text_is_short_of_a_closed_vocabulary_and_determines_the_teacher(
    memory, most_words
):
    vocabulary, differing, total = set(compact_vocabulary()), 0, 0
    source, rules = random.Random(0), decide_with_memory if memory else decide
    for seed in range(6):
        environment = CrafterEnvironment(CrafterConfig(text="compact", memory=memory, max_actions=4))
        teacher = CrafterTeacher(TeacherConfig(memory=memory, max_actions=4))
        observation = environment.reset(seed)
        for _ in range(40):
            words = observation.text.split()
            assert 25 <= len(words) <= most_words and vocabulary.issuperset(words)
            actions = teacher.actions(observation.data)
            differing += rules(read_compact(observation.text), max_actions=4) != actions
            total += 1
            if source.random() < 0.3:
                actions = source.choices(ACTIONS, k=4)
            outcome = environment.step([ToolRequest("interact_many", {"actions": actions})])
            observation = outcome.observation
            if outcome.terminated:
                break
    # Only a view too crowded for its words can hide what the teacher acts on.
    assert differing / total < 0.01


def test_with_memory_the_text_leads_out_of_view_and_a_snapshot_remembers_the_map():
    settings = CrafterConfig(text="compact", memory=True)
    environment, other = CrafterEnvironment(settings), CrafterEnvironment(settings)
    last, teacher = environment.reset(1), CrafterTeacher(TeacherConfig(max_actions=4))
    for _ in range(30):
        call = ToolRequest("interact_many", {"actions": teacher.actions(last.data)})
        last = environment.step([call]).observation
    assert other.restore(environment.snapshot()) == last
    view_only = CrafterEnvironment(CrafterConfig(text="compact")).restore(environment.snapshot())
    assert read_compact(last.text).walks.keys() > read_compact(view_only.text).walks.keys()


@pytest.mark.parametrize(
    ("tools", "near", "goal"),
    [
        ((), (), 2 + _TABLE),
        (("wood_pickaxe", "wood_sword"), (), 4 + _TABLE),
        (("wood_pickaxe", "wood_sword"), ("table",), 4 + _TABLE),  # the second table, where the iron lies
        (("wood_pickaxe", "wood_sword", "stone_pickaxe", "stone_sword"), ("table",), 2),
    ],
)
def test_the_teacher_gathers_wood_for_the_tools_that_come_next(tools, near, goal):
    def facts(count: int) -> Facts:
        return Facts(
            inventory={"wood": count, **dict.fromkeys(tools, 1)}, achievements=frozenset(), facing="up",
            target="tree", neighbours={}, near=frozenset(near), walks={}, lava=(), sleeping=False, dark=False,
        )  # fmt: skip

    assert wood(facts(goal - 1), 4) == ["do"]
    assert wood(facts(goal), 4) is None


maps = st.lists(
    st.sampled_from(["grass", "grass", "sand", "path", "stone", "water"]), min_size=35, max_size=35
)


def build_ground(names: list[str]) -> Ground:
    """7x5 names around a player in the middle."""
    cells = {cell_at(number % 7, number // 7): name for number, name in enumerate(names)}
    return Ground(cells | {cell_at(3, 2): "player"}, player=cell_at(3, 2), facing="down")


def surcharge(ground: Ground, cell: int, *, can_dig: bool) -> float:
    """Env steps to go on from a cell that one stands before: 1, 3 through stone, never through water."""
    if ground.at(cell) in GROUND or cell == ground.player:
        return 1
    return 3 if can_dig and ground.at(cell) == "stone" else float("inf")


@settings(max_examples=60, deadline=None)
@given(maps, st.booleans())
def test_no_neighbour_offers_a_cheaper_or_straighter_way_than_the_one_taken(names, can_dig):
    ground = build_ground(names)
    trails = find_trails(ground, can_dig=can_dig)
    ranks = [(cost, turns, locate(cell)) for cell, (cost, turns, *_) in trails.items()]
    assert ranks == sorted(ranks)  # in the order in which they are preferred
    for cell in ground.cells.keys() - {ground.player}:
        offers = [
            (cost + surcharge(ground, at, can_dig=can_dig), turns + (came not in ("", name)))
            for at, (cost, turns, came, _) in trails.items()
            for name in FACINGS
            if step(at, name) == cell
        ]
        best = min(offers, default=(float("inf"), 0))
        assert trails[cell][:2] == best if best[0] < float("inf") else cell not in trails


@settings(max_examples=60, deadline=None)
@given(maps, st.booleans())
def test_the_legs_of_a_whole_walk_lead_to_its_cell_and_dig_where_stone_is(names, can_dig):
    ground = build_ground(names)
    trails: Trails = find_trails(ground, can_dig=can_dig)
    for cell in trails.keys() - {ground.player}:
        walk, at = walk_to(ground, trails, cell, max_cells=100), ground.player
        for leg in walk.legs:
            for _ in range(leg.count):
                at = step(at, leg.direction)
                assert leg.dig == (ground.at(at) == "stone" and at != cell)
        assert at == cell and not walk.more


def test_a_cell_has_one_number_and_numbers_compare_as_places_do():
    places = [(x, y) for x in range(-8, 120) for y in range(-8, 120)]
    assert [locate(cell_at(x, y)) for x, y in places] == places
    assert [cell_at(x, y) for x, y in places] == sorted(cell_at(x, y) for x, y in places)


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
