"""State keys of 6,400 decisions, each below 0.2 s; also where the whole history counts, which grows.

    python -m bench.state_keys_speed [--limit 0.2] [--decisions 6400]

Crafter is played by random actions, in episodes of 50 decisions; timed are the keys alone, of observations
that are there: least CPU time of some repeats, for each key of Crafter and those of every environment. Done
naively, a history is digested again at each decision: what that costs is printed too. The same as one long
episode show that a decision of a running history costs the same, however long it is.

Exit code 1 where a key is above the limit.
"""

import hashlib
import json
import random
import sys
from collections.abc import Sequence

from bench import kit
from shared_schemas.state_keys import TEXT_LAST_N
from task_app.environments.crafter.environment import CrafterConfig, CrafterEnvironment
from task_app.environments.crafter.state_keys import CRAFTER_STATE_KEYS
from task_app.episode.prompts import Prompt
from task_app.episode.state_keys import STATE_KEYS, EpisodeStateKeys, keys_by_name, select_keys
from task_app.policies.scripted import random_actions
from task_app.protocols import Observation, ToolRequest

LIMIT_S = 0.2
REPEATS = 5
EPISODE, MAX_ACTIONS = 50, 4
FRESH = Prompt(())
Episodes = Sequence[Sequence[Observation]]


def played(decisions: int) -> list[list[Observation]]:
    """Observations before each decision; worlds follow until there are enough."""
    draw = random.Random(0)
    episodes: list[list[Observation]] = []
    while sum(map(len, episodes)) < decisions:
        environment = CrafterEnvironment(CrafterConfig(text="compact", max_actions=MAX_ACTIONS))
        observation, ended, seen = environment.reset(len(episodes)), False, []
        room = min(EPISODE, decisions - sum(map(len, episodes)))
        while not ended and len(seen) < room:
            seen.append(observation)
            call = ToolRequest("interact_many", {"actions": random_actions(draw, MAX_ACTIONS)})
            outcome = environment.step([call])
            observation, ended = outcome.observation, outcome.terminated
        episodes.append(seen)
    return episodes


def make_keys(name: str, episodes: Episodes) -> list[str]:
    """Make the keys like the worker."""
    chosen = select_keys([name], keys_by_name(CRAFTER_STATE_KEYS, conversation=False), where="state_keys")
    keys: list[str] = []
    for episode in episodes:
        running = EpisodeStateKeys(chosen)
        keys += [running.next(observation, FRESH)[name] for observation in episode]
    return keys


def naive_history(episodes: Episodes) -> list[str]:
    """Digest all texts so far at every decision."""
    return [
        hashlib.blake2b(json.dumps([seen.text for seen in episode[: t + 1]]).encode()).hexdigest()
        for episode in episodes
        for t in range(len(episode))
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    options = kit.options(
        __doc__, ("--limit", LIMIT_S, "most seconds for a key"), ("--decisions", 6_400), arguments=arguments
    )
    episodes = played(options.decisions)
    one_long = [[observation for episode in episodes for observation in episode]]
    worst = 0.0
    print(f"{options.decisions} decisions in {len(episodes)} episodes")
    of_all = ("text_last_3" if name == TEXT_LAST_N else name for name in STATE_KEYS)
    for name in (*CRAFTER_STATE_KEYS, *of_all):
        seconds = kit.least(lambda name=name: make_keys(name, episodes), REPEATS).cpu_s
        worst = max(worst, seconds)
        different = len(set(make_keys(name, episodes)))
        print(f"  {name:14s} {1e3 * seconds:6.1f} ms; {different} different states")
    history, naive = (
        kit.least(lambda: make_keys("text_history", episodes), REPEATS).cpu_s,
        kit.least(lambda: naive_history(episodes), 1).cpu_s,
    )
    long = kit.least(lambda: make_keys("text_history", one_long), REPEATS).cpu_s
    print(
        f"  all of the history at each decision: x{naive / history:.1f}; "
        f"as one long episode: x{long / history:.2f}"
    )
    figure = f"at most {worst:.3f} s (limit {options.limit:g})"
    return kit.report(figure, worst <= options.limit, "TOO SLOW")


if __name__ == "__main__":
    sys.exit(main())
