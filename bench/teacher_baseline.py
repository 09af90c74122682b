"""How well scripted play does: unique achievements of the Crafter teacher and of random play.

    python -m bench.teacher_baseline [--seeds 100] [--jobs 2] [--json PATH]

Prints mean unique achievements with 95 % confidence intervals for 25 and 50 decisions of at most 2 to 8
actions, the success rate of every achievement at 50 decisions of at most 4 (the demo), and how far the
compact text determines what the memoryless teacher does.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from math import sqrt
from multiprocessing import Pool
from pathlib import Path
from random import Random
from statistics import mean, pstdev
from typing import Any

from bench import kit
from task_app.environments.crafter.environment import CrafterConfig, CrafterEnvironment
from task_app.environments.crafter.rules import ACHIEVEMENTS
from task_app.environments.crafter.text import compact_text
from task_app.policies.scripted import CrafterTeacher, TeacherConfig, random_actions
from task_app.protocols import ToolRequest

DECISIONS = (25, 50)
MAX_ACTIONS = range(2, 9)
DEMO = (50, 4)
FIRST_SEED = 100_000  # held out: nothing was tuned on these worlds
CI_95 = 1.96
Actor = Callable[[dict[str, Any]], list[str]]


def actor(policy: str, *, max_actions: int, seed: int) -> Actor:
    """A fresh player, as a function of `Observation.data`."""
    if policy == "random":
        source = Random(seed)
        return lambda data: random_actions(source, max_actions)
    memory = policy == "teacher with memory"
    return CrafterTeacher(TeacherConfig(memory=memory, max_actions=max_actions)).actions


def unlocked_at(seed: int, *, policy: str, max_actions: int) -> dict[int, list[str]]:
    """Achievements unlocked after each number of DECISIONS, in one episode."""
    environment = CrafterEnvironment(CrafterConfig(max_actions=max_actions))
    act = actor(policy, max_actions=max_actions, seed=seed)
    data, at, ended = environment.reset(FIRST_SEED + seed).data, {}, False
    for decision in range(1, max(DECISIONS) + 1):
        if not ended:
            outcome = environment.step([ToolRequest("interact_many", {"actions": act(dict(data))})])
            data, ended = outcome.observation.data, outcome.terminated
        if decision in DECISIONS:
            at[decision] = list(data["achievements"])
    return at


def text_and_action(seed: int, *, epsilon: float) -> list[tuple[str, tuple[str, ...]]]:
    """What the memoryless teacher would do at every compact text of an episode played with slips."""
    environment = CrafterEnvironment(CrafterConfig(max_actions=DEMO[1]))
    player = CrafterTeacher(TeacherConfig(max_actions=DEMO[1], epsilon=epsilon, seed=seed))
    teacher = CrafterTeacher(TeacherConfig(max_actions=DEMO[1]))
    data, pairs = environment.reset(FIRST_SEED + seed).data, []
    for _ in range(DEMO[0]):
        pairs.append((compact_text(data), tuple(teacher.actions(data))))
        outcome = environment.step([ToolRequest("interact_many", {"actions": player.actions(data)})])
        data = outcome.observation.data
        if outcome.terminated:
            break
    return pairs


def baselines(pool: Any, seeds: int) -> dict[str, Any]:
    results: dict[str, Any] = {"mean": {}, "success": {}}
    for policy in ("teacher", "teacher with memory", "random"):
        for max_actions in MAX_ACTIONS:
            play = partial(unlocked_at, policy=policy, max_actions=max_actions)
            episodes = pool.map(play, range(seeds), chunksize=8)
            for decisions in DECISIONS:
                scores = [len(episode[decisions]) for episode in episodes]
                interval = CI_95 * pstdev(scores) / sqrt(len(scores))
                results["mean"][f"{policy}, {decisions} x {max_actions}"] = (mean(scores), interval)
            if max_actions == DEMO[1]:
                counts = Counter(name for episode in episodes for name in episode[DEMO[0]])
                results["success"][policy] = {name: counts[name] / seeds for name in ACHIEVEMENTS}
    return results


def imitation(pool: Any, seeds: int, epsilon: float = 0.1) -> dict[str, int]:
    """How often one compact text goes with two different action lists."""
    actions_of: dict[str, Counter[tuple[str, ...]]] = defaultdict(Counter)
    for pairs in pool.map(partial(text_and_action, epsilon=epsilon), range(seeds), chunksize=8):
        for text, actions in pairs:
            actions_of[text][actions] += 1
    return {
        "decisions": sum(counts.total() for counts in actions_of.values()),
        "different texts": len(actions_of),
        "texts seen more than once": sum(counts.total() > 1 for counts in actions_of.values()),
        "texts with conflicting actions": sum(len(counts) > 1 for counts in actions_of.values()),
        "different action lists": len({actions for counts in actions_of.values() for actions in counts}),
    }


def show(results: dict[str, Any]) -> None:
    policies = list(results["success"])
    print(f"{'decisions x max actions':24s}" + "".join(f"{policy:>22s}" for policy in policies))
    for decisions in DECISIONS:
        for max_actions in MAX_ACTIONS:
            case = f"{decisions} x {max_actions}"
            cells = (results["mean"][f"{policy}, {case}"] for policy in policies)
            print(f"{case:24s}" + "".join(f"{value:15.2f} ± {ci:4.2f}" for value, ci in cells))
    print(f"\nsuccess rate at {DEMO[0]} x {DEMO[1]}")
    for name in sorted(ACHIEVEMENTS, key=lambda name: -results["success"]["teacher"][name]):
        print(f"{name:24s}" + "".join(f"{results['success'][policy][name]:22.0%}" for policy in policies))
    print("\ncompact text -> memoryless teacher")
    for name, count in results["imitation"].items():
        print(f"{name:32s}{count:8d}")


def main() -> None:
    options = kit.options(
        __doc__, ("--seeds", 100), ("--jobs", 2), ("--json", Path, "write the figures here, too")
    )
    with Pool(options.jobs) as pool:
        results = baselines(pool, options.seeds)
        results["imitation"] = imitation(pool, options.seeds)
    show(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
