"""How far could a player of Crafter get? Scripted players that see more and more, mortal or not.

    python -m bench.player_limits [--games 200] [--processes 1]

    view      the teacher of the jobs: it reads the compact text of the 9x7 view, and remembers nothing
    memory    it knows everything seen in the episode (env_config.memory)
    whole     it knows the whole map

Each player plays the same worlds until death with four actions a decision, and plays them once more with
blows that do not hurt (it can still starve). The differences show why achievements are missing: because of
the view, early deaths, or limits of all these players. No evaluation plays these worlds (300,000 on).
"""

import json
from collections import Counter
from multiprocessing import Pool
from statistics import mean
from typing import Any

from bench import kit
from task_app.environments.crafter.engine import CrafterEngine
from task_app.environments.crafter.environment import CrafterConfig, CrafterEnvironment
from task_app.environments.crafter.grid import AREA, MATERIAL_NAMES
from task_app.environments.crafter.grid import cell_at as place_in_world
from task_app.environments.crafter.landmarks import (
    Facts,
    can_dig,
    facing_name,
    landmark_walks,
    make_facts,
    read_facts,
)
from task_app.environments.crafter.map_memory import MapMemory
from task_app.environments.crafter.rules import ACHIEVEMENTS
from task_app.environments.crafter.walks import Ground, cell_at, find_trails
from task_app.policies.crafter_teacher import decide, decide_with_memory
from task_app.protocols import ToolRequest
from trainer_backend.core.intervals import crafter_score_interval
from trainer_backend.core.statistics import mean_interval

FIRST_WORLD = 300_000
ACTIONS = 4
LONGEST = {False: 10_000, True: 1_500}  # env steps; an immortal player's game has no other end


def see_whole_map(engine: CrafterEngine, data: dict[str, Any]) -> Facts:
    cells = {}
    for y in range(AREA):
        for x in range(AREA):
            place = place_in_world(x, y)
            thing = engine.world.at[place]
            cells[cell_at(x, y)] = thing.name if thing else MATERIAL_NAMES[engine.world.materials[place]]
    ground = Ground(cells, player=cell_at(*data["position"]), facing=facing_name(data))
    trails = find_trails(ground, can_dig=can_dig(data))
    return make_facts(data, ground, landmark_walks(ground, trails, max_cells=AREA * AREA))


def play(player: str, world: int, immortal: bool) -> dict[str, Any]:
    """Play one game; return its achievements, its env steps, and how it ended."""
    environment = CrafterEnvironment(CrafterConfig(max_actions=ACTIONS, length=LONGEST[immortal]))
    data = environment.reset(FIRST_WORLD + world).data
    engine, memory = environment._engine, MapMemory()
    assert engine is not None
    if immortal:
        engine.player.hurt = lambda damage: None  # type: ignore[method-assign]
    while not engine.over:
        if player == "view":
            actions = decide(read_facts(data), max_actions=ACTIONS)
        else:
            facts = memory.facts(data) if player == "memory" else see_whole_map(engine, data)
            actions = decide_with_memory(facts, max_actions=ACTIONS)
        data = environment.step([ToolRequest("interact_many", {"actions": actions})]).observation.data
    vitals = [data["inventory"][name] for name in ("food", "drink", "energy")]
    end = "time" if not engine.dead else "starved" if 0 in vitals else "killed"
    night = " in the dark" if data["dark"] and end == "killed" else ""
    return {"achievements": data["achievements"], "steps": data["step"], "end": end + night}


def summarize(games: list[dict[str, Any]]) -> dict[str, Any]:
    interval = mean_interval([float(len(game["achievements"])) for game in games])
    counts = Counter(name for game in games for name in game["achievements"])
    score = crafter_score_interval(
        [{name: name in game["achievements"] for name in ACHIEVEMENTS} for game in games],
        [str(place) for place in range(len(games))],
    )
    missing = {name: round(1 - counts[name] / len(games), 3) for name in ACHIEVEMENTS}
    return {
        "unique_achievements": round(interval.mean, 3),
        "low": round(interval.low, 3),
        "high": round(interval.high, 3),
        "crafter_score": round(score.mean, 2),
        "env_steps": round(mean(game["steps"] for game in games), 1),
        "ends": dict(Counter(game["end"] for game in games).most_common()),
        "missing": dict(sorted(((k, v) for k, v in missing.items() if v >= 0.02), key=lambda item: -item[1])),
    }


def main() -> None:
    options = kit.options(
        __doc__, ("--games", 200, "worlds for each player"), ("--processes", 1, "side by side")
    )
    found: dict[str, Any] = {}
    with Pool(options.processes) as pool:
        for player in ("view", "memory", "whole"):
            for immortal in (False, True):
                calls = [(player, world, immortal) for world in range(options.games)]
                name = f"{player}, blows do not hurt" if immortal else player
                found[name] = summarize(pool.starmap(play, calls, chunksize=4))
                print(name, json.dumps(found[name]), flush=True)
    kit.write_results(
        kit.ROOT / "bench" / "results" / "player_limits.json",
        {"bench": "player_limits", "games": options.games, "first_world": FIRST_WORLD, "players": found},
    )


if __name__ == "__main__":
    main()
