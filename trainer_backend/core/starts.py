"""Groups that start at snapshots of the run's own games: which snapshots to keep, and to start from. Pure.

A snapshot's *cell* is the rarest of its achievements among the snapshots that are kept. A snapshot in a rare
cell is at the frontier of what the policy reaches. Whole sets of achievements do not serve as cells: where
games unlock them in any order, nearly every snapshot has a set of its own, and all look rare.
"""

import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import Field

from trainer_backend.core.keys import Table
from trainer_backend.core.seeds import derived_seed

Achieved = tuple[str, ...]
# The rarest achievement of a snapshot; None: it has none.
Cell = str | None
# The most snapshots that an iteration adds; for most of them a game must be played again.
MOST_NEW = 16


class CurriculumKeys(Table):
    """Keys of starts from the run's own snapshots."""

    share: float = Field(default=0.25, gt=0, lt=1)
    """share of an iteration's groups that start at a snapshot, rounded down; 0 while no snapshot is kept"""
    rule: str = "frontier"
    """at which snapshots groups start; frontier: those whose rarest achievement is rare among the kept ones;
    uncertain: those from which 20 to 80 % of the starts gained something; late: all turns equally often"""
    pool: int = Field(default=256, ge=1, le=100_000)
    """most snapshots to keep; beyond this, one is dropped at a time: of the snapshots with the most common
    rarest achievement, the oldest at their most common turn"""
    pool_mib: float = Field(default=64.0, gt=0)
    """most MiB that the kept snapshots may take together"""


@dataclass(frozen=True, slots=True)
class Moment:
    """A snapshot of a training game, from which others may start."""

    key: str
    """The game's name in the plan, and `turn`."""
    iteration: int
    rollout_id: str
    """The game's rollout; if the game began at a snapshot itself, the rollout of its last part."""
    group_id: str
    seed: int
    """Seed of the world."""
    turn: int
    """Number of decisions of the whole game before the snapshot."""
    invalid: int
    """Number of those decisions that were invalid."""
    achieved: Achieved
    """Achievements before the snapshot."""
    snapshot: str


@dataclass(frozen=True, slots=True)
class Pool:
    """The kept snapshots, oldest first, and the results of starts from them."""

    moments: tuple[Moment, ...] = ()
    results: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By key of a moment: the number of its starts that gained something, and of all its starts."""

    @property
    def mib(self) -> float:
        return sum(len(item.snapshot) for item in self.moments) / 2**20

    def after(
        self, moments: Iterable[Moment], gains: Iterable[tuple[str, bool]], keys: CurriculumKeys
    ) -> "Pool":
        """Return the pool after an iteration with these new moments, and gains of starts by key."""
        results = dict(self.results)
        for key, gained in gains:
            gain, count = results.get(key, (0, 0))
            results[key] = (gain + gained, count + 1)
        kept = _drop_common([*self.moments, *moments], keys.pool, keys.pool_mib * 2**20)
        names = {item.key for item in kept}
        return Pool(tuple(kept), {key: found for key, found in results.items() if key in names})


def find_cells(moments: "Sequence[Moment] | Sequence[Candidate]") -> list[Cell]:
    """Return the rarest achievement of each moment, by the number of moments that have it; ties by name."""
    counts = Counter(name for item in moments for name in item.achieved)
    return [min(item.achieved, key=lambda name: (counts[name], name), default=None) for item in moments]


def _drop_common(moments: Sequence[Moment], most: int, most_bytes: float) -> list[Moment]:
    """Drop moments until the rest fits: always the oldest of the most common turn of the most common cell.

    Dropping the oldest of the cell would soon leave only the early turns, which all games reach.
    """
    by_cell: defaultdict[Cell, dict[int, deque[int]]] = defaultdict(dict)
    cells = find_cells(moments)
    counts = Counter(cells)
    for number, (cell, item) in enumerate(zip(cells, moments, strict=True)):
        by_cell[cell].setdefault(item.turn, deque()).append(number)
    gone, size = set[int](), sum(len(item.snapshot) for item in moments)
    while len(moments) - len(gone) > most or size > most_bytes:
        cell = max(by_cell, key=lambda one: (counts[one], -min(queue[0] for queue in by_cell[one].values())))
        turns = by_cell[cell]
        turn = max(turns, key=lambda one: (len(turns[one]), -turns[one][0]))
        number = turns[turn].popleft()
        gone.add(number)
        counts[cell] -= 1
        size -= len(moments[number].snapshot)
        if not turns[turn]:
            del turns[turn]
        if not turns:
            del by_cell[cell]
    return [item for number, item in enumerate(moments) if number not in gone]


# Given the pool, returns a weight for each of its moments; starts are drawn by these weights.
Rule = Callable[[Pool], Sequence[float]]


def frontier(pool: Pool) -> list[float]:
    """Weigh cells by 1/sqrt of their snapshots, turns of a cell equally, and snapshots of a turn equally.

    Turns count equally, because most snapshots of a cell are from its first turns, but siblings that start at
    its last turns are more likely to reach the next reward.

    Source: Ecoffet et al., First return, then explore (Go-Explore), arXiv:2004.12919, whose cells are drawn
    with 1/sqrt(C_seen + 1). In place of C_seen + 1 stands the number of the cell's kept snapshots.
    """
    cells = find_cells(pool.moments)
    places = [(cell, item.turn) for cell, item in zip(cells, pool.moments, strict=True)]
    by_cell, by_place = Counter(cells), Counter(places)
    turns = Counter(cell for cell, _ in by_place)
    return [by_cell[place[0]] ** -0.5 / turns[place[0]] / by_place[place] for place in places]


def uncertain(pool: Pool) -> list[float]:
    """Weigh equally the snapshots from which 20 to 80 % of the starts gained something; others 0.

    The prior is one gain and one miss, so a snapshot without starts has 50 %. If all weights are 0, no group
    starts at a snapshot.

    Source: the bounds: Florensa et al., Reverse Curriculum Generation, arXiv:1707.05300, section 4.2, who
    keep starts of intermediate success.
    """
    found = (pool.results.get(item.key, (0, 0)) for item in pool.moments)
    return [float(0.2 <= (gain + 1) / (count + 2) <= 0.8) for gain, count in found]


def late(pool: Pool) -> list[float]:
    """Weigh all turns with snapshots equally, and the snapshots of a turn equally."""
    turns = Counter(item.turn for item in pool.moments)
    return [1.0 / turns[item.turn] for item in pool.moments]


STARTS: dict[str, Rule] = {"frontier": frontier, "uncertain": uncertain, "late": late}


@dataclass(frozen=True, slots=True)
class Starts:
    """Chooses the snapshots at which groups of an iteration start."""

    keys: CurriculumKeys
    rule: Rule
    pool: Pool
    job_seed: int
    reseedable: bool
    """Whether each group gets its own random draws."""

    def choose(self, iteration: int, groups: int) -> list[Moment]:
        """Draw the moments at which the last groups of an iteration start, in the order of the groups."""
        count = math.floor(self.keys.share * groups)
        weights = self.rule(self.pool) if self.pool.moments else []
        if not count or not any(weights):
            return []
        draws = random.Random(derived_seed(self.job_seed, "starts", iteration))
        return draws.choices(self.pool.moments, weights, k=count)

    def draws_seed(self, iteration: int, group: int) -> int | None:
        """Return the seed of a group's random draws; None: the snapshot's generator continues."""
        return derived_seed(self.job_seed, "start draws", iteration, group) if self.reseedable else None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A moment of a game that may be kept: after `own_turn` of the game's own decisions."""

    plan: str
    own_turn: int
    turn: int
    """Decisions of the whole game before the moment, including those before its own start at a snapshot."""
    achieved: Achieved


def candidates(plan: str, achieved: Sequence[Achieved], seed: int, *, done: int = 0) -> list[Candidate]:
    """Return the moments of a game that may be kept: after each new achievement, and a random moment.

    Args:
        plan: the game's name in the plan.
        achieved: the achievements before each decision with a snapshot, from the first.
        seed: of the random moment, which is never the start.
        done: decisions before the first one, if the game began at a snapshot.
    """
    rises = [turn for turn in range(1, len(achieved)) if achieved[turn] != achieved[turn - 1]]
    draws = random.Random(derived_seed(seed, "kept", plan))
    some = draws.randrange(1, len(achieved)) if len(achieved) > 1 else 0
    turns = sorted({*rises, *([some] if some else [])})
    return [Candidate(plan, turn, done + turn, achieved[turn]) for turn in turns]


def kept(found: Iterable[Candidate], seed: int, most: int = MOST_NEW) -> list[Candidate]:
    """Draw at most `most` of an iteration's candidates, evenly over cells.

    Within a cell, each turn gives one candidate before any gives a second.
    """
    drawn = sorted(found, key=lambda one: derived_seed(seed, "kept", one.plan, one.own_turn))
    cells = dict(zip(drawn, find_cells(drawn), strict=True))
    by_turn = _take_turns(drawn, lambda one: (cells[one], one.turn))
    return _take_turns(sorted(by_turn, key=lambda one: cells[one] or ""), cells.__getitem__)[:most]


def _take_turns(found: Sequence[Candidate], group: Callable[[Candidate], Hashable]) -> list[Candidate]:
    """Sort: the first candidate of each group, then the second of each, and so on; stable otherwise."""
    counts = Counter[Hashable]()
    numbers = []
    for one in found:
        numbers.append(counts[group(one)])
        counts[group(one)] += 1
    return [found[place] for place in sorted(range(len(found)), key=numbers.__getitem__)]
