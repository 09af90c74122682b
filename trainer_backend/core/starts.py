"""Chooses which snapshots of a run's training games to keep, and at which snapshots groups start. Pure.

The *cell* of a snapshot is its rarest achievement: the one that the fewest kept snapshots have. A snapshot in
a rare cell is at the frontier of what the policy reaches. The whole set of achievements would not be a useful
cell: if games unlock achievements in any order, nearly every snapshot has its own set, so all are rare.
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
# The rarest achievement of a snapshot; None: the snapshot has no achievement.
Cell = str | None
# The most snapshots that an iteration adds. Most of them must be taken by replaying a game.
MOST_NEW = 16


class CurriculumKeys(Table):
    """Keys of a job for starts from snapshots of the run's own training games."""

    share: float = Field(default=0.25, gt=0, lt=1)
    """share of an iteration's groups that start at a snapshot; the number of these groups is rounded down,
    and is 0 while no snapshot is kept"""
    rule: str = "frontier"
    """at which snapshots groups start; frontier: snapshots whose rarest achievement few kept snapshots have;
    uncertain: snapshots from which 20 to 80 % of the starts gained something; late: snapshots of all turns,
    each turn equally often"""
    pool: int = Field(default=256, ge=1, le=100_000)
    """most snapshots to keep; if there are more, the oldest snapshot of the most frequent turn is dropped,
    among the snapshots whose rarest achievement is the most common"""
    pool_mib: float = Field(default=64.0, gt=0)
    """most MiB that all kept snapshots together may occupy"""


@dataclass(frozen=True, slots=True)
class Moment:
    """A snapshot of a training game, at which later games may start."""

    key: str
    """The game's name in the plan, a colon, and `turn`."""
    iteration: int
    rollout_id: str
    """The rollout that reached this moment. Earlier rollouts may have played the first part of the game."""
    group_id: str
    seed: int
    """Seed of the world."""
    turn: int
    """Number of decisions of the whole game before the snapshot."""
    invalid: int
    """Number of the decisions before the snapshot that were invalid."""
    achieved: Achieved
    """Achievements of the whole game before the snapshot."""
    snapshot: str


@dataclass(frozen=True, slots=True)
class Pool:
    """The kept snapshots, oldest first, and the results of the games that started at them."""

    moments: tuple[Moment, ...] = ()
    results: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By key of a moment: the number of starts there that gained something, and the number of all starts."""

    @property
    def mib(self) -> float:
        return sum(len(item.snapshot) for item in self.moments) / 2**20

    def after(
        self, moments: Iterable[Moment], gains: Iterable[tuple[str, bool]], keys: CurriculumKeys
    ) -> "Pool":
        """Return the pool after an iteration that added `moments`.

        `gains` contains one pair for each start at a snapshot: the key of the moment, and whether the start
        gained something.
        """
        results = dict(self.results)
        for key, gained in gains:
            gain, count = results.get(key, (0, 0))
            results[key] = (gain + gained, count + 1)
        kept = _drop_common([*self.moments, *moments], keys.pool, keys.pool_mib * 2**20)
        names = {item.key for item in kept}
        return Pool(tuple(kept), {key: found for key, found in results.items() if key in names})


def find_cells(moments: "Sequence[Moment] | Sequence[Candidate]") -> list[Cell]:
    """Return each moment's rarest achievement: the one that the fewest moments have. Names break ties."""
    counts = Counter(name for item in moments for name in item.achieved)
    return [min(item.achieved, key=lambda name: (counts[name], name), default=None) for item in moments]


def _drop_common(moments: Sequence[Moment], most: int, most_bytes: float) -> list[Moment]:
    """Drop moments until the remaining moments fit within both limits, and return those in order.

    Each time, the oldest moment of the most common turn within the most common cell is dropped. Without the
    choice of a turn, only early turns would soon remain, because all games reach early turns.
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


# Given the pool, returns a weight for each moment. Starts are drawn in proportion to the weights.
Rule = Callable[[Pool], Sequence[float]]


def frontier(pool: Pool) -> list[float]:
    """Weigh each cell by 1/sqrt(number of its snapshots), and divide this weight among the cell's snapshots.

    Each turn within a cell gets the same part of the cell's weight, and each snapshot of a turn gets the same
    part of the turn's weight. With equal weights per snapshot, most starts would be at early turns, because
    most snapshots are from early turns. But games that start late are more likely to reach the next reward.

    Source: Ecoffet et al., First return, then explore (Go-Explore), arXiv:2004.12919, where the weight of a
    cell is 1/sqrt(C_seen + 1). Here the number of the cell's kept snapshots replaces C_seen + 1.
    """
    cells = find_cells(pool.moments)
    places = [(cell, item.turn) for cell, item in zip(cells, pool.moments, strict=True)]
    by_cell, by_place = Counter(cells), Counter(places)
    turns = Counter(cell for cell, _ in by_place)
    return [by_cell[place[0]] ** -0.5 / turns[place[0]] / by_place[place] for place in places]


def uncertain(pool: Pool) -> list[float]:
    """Return 1 for each snapshot from which 20 to 80 % of the starts gained something, 0 for other snapshots.

    One gain and one miss are added to the counts of each snapshot, so a snapshot without starts counts
    as 50 % and has weight 1. If all weights are 0, no group starts at a snapshot.

    Source: Florensa et al., Reverse Curriculum Generation, arXiv:1707.05300, section 4.2: starts are kept
    if their share of successes lies between two bounds.
    """
    found = (pool.results.get(item.key, (0, 0)) for item in pool.moments)
    return [float(0.2 <= (gain + 1) / (count + 2) <= 0.8) for gain, count in found]


def late(pool: Pool) -> list[float]:
    """Give each turn that has snapshots the same weight, divided equally among the snapshots of the turn."""
    turns = Counter(item.turn for item in pool.moments)
    return [1.0 / turns[item.turn] for item in pool.moments]


STARTS: dict[str, Rule] = {"frontier": frontier, "uncertain": uncertain, "late": late}


@dataclass(frozen=True, slots=True)
class Starts:
    """Draws the snapshots at which groups of an iteration start."""

    keys: CurriculumKeys
    rule: Rule
    pool: Pool
    job_seed: int
    reseedable: bool
    """Whether the environment can continue a snapshot with another random seed."""

    def choose(self, iteration: int, groups: int) -> list[Moment]:
        """Draw one moment for each group that starts at a snapshot: the last groups of the iteration."""
        count = math.floor(self.keys.share * groups)
        weights = self.rule(self.pool) if self.pool.moments else []
        if not count or not any(weights):
            return []
        draws = random.Random(derived_seed(self.job_seed, "starts", iteration))
        return draws.choices(self.pool.moments, weights, k=count)

    def draws_seed(self, iteration: int, group: int) -> int | None:
        """Return the seed of a group's random draws; None: the snapshot's own random generator is used."""
        return derived_seed(self.job_seed, "start draws", iteration, group) if self.reseedable else None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A moment that may be kept: the state of a game after `own_turn` decisions of its rollout."""

    plan: str
    own_turn: int
    turn: int
    """Number of decisions of the whole game before the moment, including those before the rollout began."""
    achieved: Achieved


def candidates(plan: str, achieved: Sequence[Achieved], seed: int, *, done: int = 0) -> list[Candidate]:
    """Return the moments of a rollout that may be kept: after each new achievement, and one random moment.

    Args:
        plan: the rollout's name in the plan.
        achieved: the achievements before each decision of the rollout.
        seed: seed of the random moment, which is never the start of the rollout.
        done: number of decisions that were played before the snapshot at which the rollout began, if any.
    """
    rises = [turn for turn in range(1, len(achieved)) if achieved[turn] != achieved[turn - 1]]
    draws = random.Random(derived_seed(seed, "kept", plan))
    some = draws.randrange(1, len(achieved)) if len(achieved) > 1 else 0
    turns = sorted({*rises, *([some] if some else [])})
    return [Candidate(plan, turn, done + turn, achieved[turn]) for turn in turns]


def kept(found: Iterable[Candidate], seed: int, most: int = MOST_NEW) -> list[Candidate]:
    """Draw at most `most` of an iteration's candidates, in equal numbers from each cell as far as possible.

    Within a cell, one candidate of each turn is drawn before a second candidate of any turn.
    """
    drawn = sorted(found, key=lambda one: derived_seed(seed, "kept", one.plan, one.own_turn))
    cells = dict(zip(drawn, find_cells(drawn), strict=True))
    by_turn = _take_turns(drawn, lambda one: (cells[one], one.turn))
    return _take_turns(sorted(by_turn, key=lambda one: cells[one] or ""), cells.__getitem__)[:most]


def _take_turns(found: Sequence[Candidate], group: Callable[[Candidate], Hashable]) -> list[Candidate]:
    """Sort stably: the first candidates of all groups, then the second of all groups, and so on."""
    counts = Counter[Hashable]()
    numbers = []
    for one in found:
        numbers.append(counts[group(one)])
        counts[group(one)] += 1
    return [found[place] for place in sorted(range(len(found)), key=numbers.__getitem__)]
