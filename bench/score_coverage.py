"""How often the interval of the Crafter score contains the true score.

    python -m bench.score_coverage [--samples 1000] [--jobs 2] [--play] [--out PATH]

A population is 500 worlds with two games each. Its rates of success are the true ones, so its score is
known. An evaluation is drawn from it: worlds with replacement, and one or both games of each. The script
counts how often `crafter_score_interval` contains the population's score, and how often the delta method did,
which was in use before. Widths are relative to the range of the middle 95 % of the evaluations' scores: an
interval that knew the true rates would need about that.

Populations whose games were played, by the scripted teacher with random decisions in between; achievements
are as dependent as the game makes them:

    from scratch    random play; few of the teacher's decisions; the teacher without stone tools and what
                    needs them, which has the score of the policy in docs/studies.md that made none either
    demo            50 decisions of four actions, as weak as the demo's policy before RL and after
    strong          whole games by the teacher

Drawn populations have rates that no played one has: up to 17 achievements of 0, 0.1, 0.3, 1 or 2 %, which
100 games see seldom. An ability of each game, in part that of its world, makes all achievements likelier
together.

Beyond the limits of the interval, which takes rare achievements to be no more dependent than common ones: six
that a game unlocks all or none of, in 1 or 2 % of games. They are reported, and do not decide the exit code.

The evaluations of scripts in the docs are played too, and their intervals computed.
bench/results/score_games.json keeps all games; --play plays them again. Writes
bench/results/score_coverage.json. Exit code 1 where the interval contains the score in less than 93 % of the
evaluations of 100 games.
"""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import Pool
from operator import mul
from random import Random
from statistics import NormalDist, fmean, quantiles
from typing import Any

from bench import kit
from task_app.environments.crafter.environment import CrafterConfig, CrafterEnvironment
from task_app.environments.crafter.rules import ACHIEVEMENTS
from task_app.policies.scripted import CrafterTeacher, TeacherConfig, random_actions
from task_app.protocols import ToolRequest
from trainer_backend.core.intervals import achievement_shares, crafter_score_interval
from trainer_backend.core.seeds import evaluation_worlds, training_world
from trainer_backend.core.statistics import Interval, mean_interval

LEAST = 0.93
WORLDS, PLAYS = 500, 2
WORLD_SEEDS = range(100_000, 100_000 + WORLDS)
RESULTS = kit.ROOT / "bench" / "results"
GAMES = RESULTS / "score_games.json"
# Of an evaluation: worlds, and games of each.
SIZES = ((32, 1), (64, 1), (100, 1), (50, 2), (256, 1))
NEEDS_STONE_TOOLS = (
    "collect_diamond", "collect_iron", "make_iron_pickaxe", "make_iron_sword", "make_stone_pickaxe",
    "make_stone_sword",
)  # fmt: skip

Counts = Mapping[str, int]
Worlds = Sequence[Sequence[Counts]]


@dataclass(frozen=True, slots=True)
class Player:
    """The memoryless teacher.

    epsilon: share of its decisions that are random.
    actions: of a decision.
    decisions: of a game, at most.
    denied: achievements that count as not unlocked.
    """

    epsilon: float
    actions: int = 1
    decisions: int = 10_000
    denied: tuple[str, ...] = ()


PLAYED = {
    "from scratch: random play": Player(1.0),
    "from scratch: 15 % by the teacher": Player(0.85),
    "from scratch: no stone tools": Player(0.3, denied=NEEDS_STONE_TOOLS),
    "demo: before RL": Player(0.5, 4, 50),
    "demo: after RL": Player(0.35, 4, 50),
    "strong: 2 % random": Player(0.02, 4),
    "strong: the teacher": Player(0.0, 4),
}
# Evaluations in the docs that scripts played: who, and the worlds.
EVALUATIONS: Mapping[str, tuple[Player, Sequence[int]]] = {
    "random play, 400 held-out worlds": (Player(1.0, 8), evaluation_worlds(400)),
    "the teacher, 800 worlds of crafter_gpu": (
        Player(0.0, 4),
        [training_world(0, "warmup", 0, group, ()) for group in range(800)],
    ),
}
_LATE = [0.99] * 4 + [0.95, 0.91, 0.9, 0.85, 0.73, 0.61, 0.6, 0.5]
_EARLY = [0.97, 0.9, 0.6, 0.05, 0.05]
DRAWN = {
    **{
        f"drawn: 12 common, 10 of {100 * rate:g} %": _LATE + [rate] * 10 for rate in (0.0, 0.001, 0.003, 0.01)
    },
    **{f"drawn: 5 common, 17 of {100 * rate:g} %": _EARLY + [rate] * 17 for rate in (0.0, 0.003, 0.01, 0.02)},
    "drawn: strong, few rare": [0.999] * 12 + [0.97, 0.95, 0.9, 0.8, 0.7, 0.5, 0.3, 0.1, 0.02, 0.002],
}


BEYOND = {f"beyond: 6 together in {100 * rate:g} %": (_LATE + [rate] * 4, rate) for rate in (0.01, 0.02)}


def play(world: int, player: Player, plays: int) -> list[int]:
    """The games of a world, each as a number whose bit i tells whether it unlocked ACHIEVEMENTS[i]."""
    return [_play(world, player, Random(f"{world}/{number}")) for number in range(plays)]


def _play(seed: int, player: Player, source: Random) -> int:
    environment = CrafterEnvironment(CrafterConfig(max_actions=player.actions))
    teacher = CrafterTeacher(TeacherConfig(max_actions=player.actions))
    data = environment.reset(seed).data
    for _ in range(player.decisions):
        detour = source.random() < player.epsilon
        actions = random_actions(source, player.actions) if detour else teacher.actions(data)
        outcome = environment.step([ToolRequest("interact_many", {"actions": actions})])
        data = outcome.observation.data
        if outcome.terminated or outcome.truncated:
            break
    unlocked = set(data["achievements"]) - set(player.denied)
    return sum(2**number for number, name in enumerate(ACHIEVEMENTS) if name in unlocked)


def draw(rates: Sequence[float], *, world_part: float = 0.15, game_part: float = 0.15) -> list[list[int]]:
    """A population of given rates; the parts are those of the ability in the variance."""
    source = Random(f"{rates}")
    limits = [-math.inf if rate <= 0 else NormalDist().inv_cdf(rate) for rate in rates]
    own = math.sqrt(1 - world_part - game_part)

    def game(base: float) -> int:
        ability = base + math.sqrt(game_part) * source.gauss(0, 1)
        return sum(2**number for number, z in enumerate(limits) if ability + own * source.gauss(0, 1) < z)

    bases = [math.sqrt(world_part) * source.gauss(0, 1) for _ in WORLD_SEEDS]
    return [[game(base) for _ in range(PLAYS)] for base in bases]


def draw_together(rates: Sequence[float], rate: float) -> list[list[int]]:
    """A population of given rates, and all further achievements together in a share of its games."""
    others = sum(2**number for number in range(len(rates), len(ACHIEVEMENTS)))
    source = Random(f"{rates} {rate}")
    return [[mask | others * (source.random() < rate) for mask in games] for games in draw(rates)]


def delta_interval(counts: Sequence[Counts], worlds: Sequence[str]) -> Interval:
    """The interval that was in use before: the shares move m by its derivative, and no share is uncertain."""
    shares_NW = list(achievement_shares(counts, worlds).values())
    rates = [fmean(shares_W) for shares_W in shares_NW]
    m = fmean(math.log1p(100 * rate) for rate in rates)
    slopes = [100 / (1 + 100 * rate) / len(rates) for rate in rates]
    level = sum(map(mul, slopes, rates))
    shift = mean_interval([sum(map(mul, slopes, shares)) - level for shares in zip(*shares_NW, strict=True)])
    assert shift.low is not None and shift.high is not None
    return Interval(math.expm1(m), math.expm1(m + shift.low), math.expm1(m + shift.high), shift.count)


METHODS: Mapping[str, Callable[[Sequence[Counts], Sequence[str]], Interval]] = {
    "interval": crafter_score_interval,
    "delta": delta_interval,
}


def cover(name: str, masks: Sequence[Sequence[int]], *, samples: int) -> list[dict[str, Any]]:
    """A row for each size: coverage, both ways to miss, and width of each method."""
    population = [[_counts(mask) for mask in games] for games in masks]
    truth = _evaluate([[mask] for games in masks for mask in games]).mean
    return [
        {"population": name, "score": truth, "worlds": worlds, "plays": plays, "samples": samples}
        | _measure(population, truth, worlds, plays, samples)
        for worlds, plays in SIZES
    ]


def _evaluate(masks: Sequence[Sequence[int]]) -> Interval:
    """The score of games of a world each."""
    counts = [_counts(mask) for (mask,) in masks]
    return crafter_score_interval(counts, [str(number) for number in range(len(counts))])


def _counts(mask: int) -> Counts:
    return {name: mask >> number & 1 for number, name in enumerate(ACHIEVEMENTS)}


def _measure(population: Worlds, truth: float, worlds: int, plays: int, samples: int) -> dict[str, Any]:
    source = Random(f"{worlds} {plays}")
    names = [str(world) for world in range(worlds) for _ in range(plays)]
    intervals: dict[str, list[Interval]] = {method: [] for method in METHODS}
    for _ in range(samples):
        evaluation = [
            counts for games in source.choices(population, k=worlds) for counts in source.sample(games, plays)
        ]
        for method, interval in METHODS.items():
            intervals[method].append(interval(evaluation, names))
    scores = quantiles([item.mean for item in intervals["interval"]], n=40)
    return {
        "mean_score": fmean(item.mean for item in intervals["interval"]),
        **{method: _summarise(found, truth, scores[-1] - scores[0]) for method, found in intervals.items()},
    }


def _summarise(intervals: Sequence[Interval], truth: float, range_95: float) -> dict[str, float]:
    bounds = [(item.low, item.high) for item in intervals if item.low is not None and item.high is not None]
    above = fmean(truth > high for _, high in bounds)
    below = fmean(truth < low for low, _ in bounds)
    return {
        "coverage": round(1 - above - below, 4),
        "score_above": above,
        "score_below": below,
        "mean_low": fmean(low for low, _ in bounds),
        "mean_high": fmean(high for _, high in bounds),
        "relative_width": fmean(high - low for low, high in bounds) / range_95,
    }


def _write_games(pool: Any) -> None:
    populations = {
        name: pool.map(partial(play, player=player, plays=PLAYS), WORLD_SEEDS, chunksize=20)
        for name, player in PLAYED.items()
    }
    evaluations = {
        name: pool.map(partial(play, player=player, plays=1), worlds, chunksize=20)
        for name, (player, worlds) in EVALUATIONS.items()
    }
    content = {
        "about": "For bench/score_coverage.py: the games of each world, six hexadecimal digits a game, whose "
        "bit i tells whether it unlocked achievement i",
        "achievements": ACHIEVEMENTS,
        "populations": {name: _encode(worlds) for name, worlds in populations.items()},
        "evaluations": {name: _encode(worlds) for name, worlds in evaluations.items()},
    }
    GAMES.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _encode(worlds: Sequence[Sequence[int]]) -> str:
    return "".join(f"{mask:06x}" for games in worlds for mask in games)


def _decode(text: str, plays: int) -> list[list[int]]:
    masks = [int(text[start : start + 6], 16) for start in range(0, len(text), 6)]
    return [masks[start : start + plays] for start in range(0, len(masks), plays)]


def _show(row: Mapping[str, Any]) -> str:
    sides = "   ".join(
        f"{method} {row[method]['coverage']:.3f} (below {row[method]['score_below']:.3f}, above "
        f"{row[method]['score_above']:.3f}) width x{row[method]['relative_width']:.2f}"
        for method in METHODS
    )
    return f"{row['population']:34s} {row['score']:5.1f} % {row['worlds']:4d} x {row['plays']}   {sides}"


def main() -> int:
    options = kit.options(
        __doc__,
        ("--samples", 1000, "evaluations of each size"),
        ("--jobs", 2, "processes"),
        ("--play", False, "play the games again and keep them"),
        ("--out", RESULTS / "score_coverage.json", "where the rows are written"),
    )
    with Pool(options.jobs) as pool:
        if options.play:
            _write_games(pool)
        stored = json.loads(GAMES.read_text(encoding="utf-8"))
        played = {name: _decode(text, PLAYS) for name, text in stored["populations"].items()}
        populations = played | {name: draw(rates) for name, rates in DRAWN.items()}
        populations |= {name: draw_together(*rates) for name, rates in BEYOND.items()}
        covers = partial(cover, samples=options.samples)
        rows = [row for rows in pool.starmap(covers, populations.items(), chunksize=1) for row in rows]
    evaluations = {name: _evaluate(_decode(text, 1)) for name, text in stored["evaluations"].items()}
    for row in rows:
        print(_show(row))
    for name, interval in evaluations.items():
        print(f"{name}: {interval.mean:.1f} % ({interval.low:.1f} to {interval.high:.1f})")
    content = {
        "coverage": rows,
        "evaluations": {name: asdict(interval) for name, interval in evaluations.items()},
    }
    options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    least = min(
        row["interval"]["coverage"]
        for row in rows
        if row["worlds"] * row["plays"] == 100 and row["population"] not in BEYOND
    )
    return kit.report(f"least coverage of 100 games: {least:.3f} (at least {LEAST})", least >= LEAST)


if __name__ == "__main__":
    sys.exit(main())
