"""Trained forks on a corridor with a key: env steps to a return, and what choosing forks costs.

    python -m bench.forks [--seeds 20] [--cells 8] [--rate 0.1] [--groups 4] [--out FILE]

The policy is a table of logits, its value is exact, and credit, fork rules and comparisons are those of the
trainer. Left out: a language model, the replay of a parent (`uniform` needs none), and every other cost than
env steps.

Found with 8 cells over 20 seeds, median env steps to a return of 0.8 (quartiles), and median iterations:

                16 episodes an iteration     4 (--groups 1)               4, --rate 0.3
    branch      17.8k (15.3k to 22.4k) 14    9.8k (8.7k to 13.4k) 30.5    5.5k (3.8k to 7.8k) 16.5
    uniform     13.8k (13.3k to 15.4k) 11    6.2k (5.2k to 7.3k) 19       2.8k (2.2k to 3.6k) 8
    surprise    16.2k (14.8k to 17.9k) 12    7.8k (6.1k to 8.7k) 22       4.5k (3.4k to 5.5k) 13
    stepwise     6.7k (5.3k to 7.6k) 15      3.2k (2.6k to 4.2k) 28.5     1.6k (1.0k to 2.8k) 14

So `uniform` takes 0.77, 0.63 and 0.50 of the steps of `branch` (0.81 with 16 at --rate 0.3); 0.6 was hoped
for. With 16 episodes an update has data enough, and more of it saves few iterations: Adam moves a logit by
0.1 at most in each, and with 192 episodes there are still 8 and 11 (two seeds). With 4, noise decides. No
fork at all takes fewest steps here: two thirds of the steps come after forks, and in four of five forks both
continuations end alike.
"""

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainer_backend.core.advantages.branch import branch, branch_turns
from trainer_backend.core.advantages.episodes import EpisodeRewards
from trainer_backend.core.advantages.stepwise import stepwise
from trainer_backend.core.forks import FORK_RULES, Parent, compare_at_forks, cut_rest
from trainer_backend.core.rewards import discounted_returns
from trainer_backend.job.training_table import AlgorithmTable

CELLS, LIMIT, ACTIONS = 8, 30, 4  # left, right, take the key, open the door in the last cell
GROUPS, SIBLINGS, FORKS, EACH = 4, 4, 2, 2
RATE, GOAL, MOST_ITERATIONS = 0.1, 0.8, 2000
KEYS = AlgorithmTable(gamma=1.0)
State = tuple[int, bool]


def step(state: State, action: int) -> tuple[State, float, bool]:
    cell, has_key = state
    if action == 0:
        return (max(0, cell - 1), has_key), 0.0, False
    if action == 1:
        return (min(CELLS - 1, cell + 1), has_key), 0.0, False
    if action == 2:
        return (cell, has_key or cell == 3 * CELLS // 8), 0.0, False
    return state, float(has_key and cell == CELLS - 1), has_key and cell == CELLS - 1


@dataclass
class Policy:
    """Softmax over logits of each state, and Adam."""

    logits: dict[State, list[float]] = field(default_factory=dict)
    _moments: dict[State, tuple[list[float], list[float]]] = field(default_factory=dict)
    _steps: int = 0

    def chances(self, state: State) -> list[float]:
        exps = [math.exp(x) for x in self.logits.get(state, [0.0] * ACTIONS)]
        return [x / sum(exps) for x in exps]

    def update(self, gradient: dict[State, list[float]]) -> None:
        self._steps += 1
        for state, row in gradient.items():
            first, second = self._moments.setdefault(state, ([0.0] * ACTIONS, [0.0] * ACTIONS))
            logits = self.logits.setdefault(state, [0.0] * ACTIONS)
            for a, g in enumerate(row):
                first[a] = 0.9 * first[a] + 0.1 * g
                second[a] = 0.999 * second[a] + 0.001 * g * g
                mean, size = first[a] / (1 - 0.9**self._steps), second[a] / (1 - 0.999**self._steps)
                logits[a] += RATE * mean / (math.sqrt(size) + 1e-8)

    def value(self) -> float:
        """The exact chance to open the door."""
        states = [(cell, has_key) for cell in range(CELLS) for has_key in (False, True)]
        values = dict.fromkeys(states, 0.0)
        for _ in range(LIMIT):
            after = {}
            for state in states:
                total = 0.0
                for a, chance in enumerate(self.chances(state)):
                    then, reward, is_over = step(state, a)
                    total += chance * (reward + (0.0 if is_over else values[then]))
                after[state] = total
            values = after
        return values[0, False]


@dataclass
class Episode:
    states: list[State]
    actions: list[int]
    rewards: list[float]
    surprise: list[float]


def play(policy: Policy, state: State, limit: int, draw: random.Random) -> Episode:
    episode = Episode([], [], [], [])
    for _ in range(limit):
        chances = policy.chances(state)
        (action,) = draw.choices(range(ACTIONS), chances)
        episode.states.append(state)
        episode.actions.append(action)
        episode.surprise.append(-math.log(chances[action]))
        state, reward, is_over = step(state, action)
        episode.rewards.append(reward)
        if is_over:
            break
    return episode


def iterate(policy: Policy, rule: str, draw: random.Random) -> int:
    """One iteration of `stepwise`, of `branch`, or of a fork rule; returns its env steps."""
    parents = [play(policy, (0, False), LIMIT, draw) for _ in range(GROUPS * SIBLINGS)]
    after: list[tuple[int, int, list[Episode]]] = []
    for number, parent in enumerate(parents if rule != "stepwise" else ()):
        facts, seed = Parent(2, LIMIT, parent.surprise), draw.getrandbits(31)
        turns = (
            branch_turns(seed, count=FORKS, max_decisions=LIMIT, first=2)
            if rule == "branch"
            else FORK_RULES[rule].choose(facts, FORKS, seed)
        )
        for turn in turns:
            if turn <= len(parent.states):
                rest = [play(policy, parent.states[turn - 1], LIMIT - turn + 1, draw) for _ in range(EACH)]
                after.append((number, turn, rest))
    of_parents = [
        EpisodeRewards(str(i), str(i // SIBLINGS), one.rewards, branch_returns_T=[[] for _ in one.rewards])
        for i, one in enumerate(parents)
    ]
    trained = list(parents)
    if rule == "branch":
        for number, turn, rest in after:
            of_parents[number].branch_returns_T[turn - 1].extend(  # type: ignore[attr-defined]
                discounted_returns(one.rewards, 1.0)[0] for one in rest
            )
        advantages = branch(of_parents, KEYS).per_episode
    else:
        advantages = stepwise(of_parents, KEYS).per_episode
    if rule in FORK_RULES and after:
        members = [
            EpisodeRewards(f"{number}.{turn}.{k}", f"{number}.{turn}", one.rewards)
            for number, turn, rest in after
            for k, one in enumerate(rest)
        ]
        blind = not FORK_RULES[rule].reads_samples
        rests = [cut_rest(of_parents[n], turn, f"{n}.{turn}") for n, turn, _ in after if blind]
        found = compare_at_forks(stepwise([*members, *rests], KEYS), members, rests, 1.0)
        advantages = [*advantages, *found.per_episode]
        trained += [one for _, _, rest in after for one in rest]
    policy.update(gradient_of_all(policy, trained, advantages))
    return sum(len(one.states) for one in (*parents, *(e for _, _, rest in after for e in rest)))


def gradient_of_all(
    policy: Policy, episodes: Sequence[Episode], advantages: Sequence[Sequence[float]]
) -> dict[State, list[float]]:
    gradient: dict[State, list[float]] = {}
    for episode, row_T in zip(episodes, advantages, strict=True):
        for state, action, advantage in zip(episode.states, episode.actions, row_T, strict=True):
            row = gradient.setdefault(state, [0.0] * ACTIONS)
            for a, chance in enumerate(policy.chances(state)):
                row[a] += advantage * ((a == action) - chance) / (GROUPS * SIBLINGS)
    return gradient


def steps_to_goal(rule: str, seed: int) -> tuple[int, int] | None:
    """Env steps and iterations until the exact return is GOAL; None: never."""
    policy, draw, steps = Policy(), random.Random(seed), 0
    for iteration in range(1, MOST_ITERATIONS + 1):
        steps += iterate(policy, rule, draw)
        if policy.value() >= GOAL:
            return steps, iteration
    return None


def cost_of_choice(decisions: int = 64 * 50) -> float:
    """Seconds of CPU to choose the forks of so many decisions, in episodes of 50; the least of nine."""
    draw = random.Random(0)
    facts = [Parent(2, 50, [draw.random() for _ in range(50)]) for _ in range(decisions // 50)]
    choose: Callable[[Parent, int, int], object] = FORK_RULES["surprise"].choose

    def once() -> float:
        started = time.process_time()
        for seed, one in enumerate(facts):
            choose(one, FORKS, seed)
        return time.process_time() - started

    return min(once() for _ in range(9))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seeds", type=int, default=20)
    arguments.add_argument("--cells", type=int, default=CELLS)
    arguments.add_argument("--rate", type=float, default=RATE, help="of Adam")
    arguments.add_argument(
        "--groups", type=int, default=GROUPS, help="of an iteration, of four episodes each"
    )
    arguments.add_argument("--out", type=Path)
    options = arguments.parse_args()
    globals().update(CELLS=options.cells, RATE=options.rate, GROUPS=options.groups)
    figures: dict[str, object] = {"choice_s": cost_of_choice()}
    for rule in ("stepwise", "branch", "uniform", "surprise"):
        found = [steps_to_goal(rule, seed) for seed in range(options.seeds)]
        reached = sorted(item for item in found if item is not None)
        figures[rule] = {
            "reached": len(reached),
            "env_steps": [steps for steps, _ in reached],
            "quartiles": statistics.quantiles([s for s, _ in reached]) if len(reached) > 1 else None,
            "median_env_steps": statistics.median(s for s, _ in reached) if reached else None,
            "median_iterations": statistics.median(n for _, n in reached) if reached else None,
        }
        print(rule, figures[rule], flush=True)
    print(f"choosing forks of 3,200 decisions: {figures['choice_s']} s of CPU")
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
