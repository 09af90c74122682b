"""How much could a trained policy of Crafter gain from better choices at its uncertain decisions?

    python -m bench.best_of_n RUN [--checkpoint iteration_0] [--games 40] [--continuations 4]

A game is played to its end. Then several continuations are played from the snapshot before the game's first
uncertain decision. If the best of them ends better, it replaces the rest of the game. The same is done at the
next uncertain decision, and so on. Continuations share the world's random numbers only as long as their
actions agree, so the best one may be lucky in a way that no policy can foresee. The result is therefore an
upper bound of the gain by such choices, one at a time. RUN is a run of a job in Crafter.
"""

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench import kit
from bench.player_limits import FIRST_WORLD
from shared_schemas.trajectory import Sampling
from task_app.environments.crafter.environment import CrafterConfig, CrafterEnvironment
from task_app.protocols import Observation, ToolRequest
from trainer_backend.core.seeds import derived_seed
from trainer_backend.core.statistics import mean_interval
from trainer_backend.inference.engine import LocalEngine, stop_token_ids
from trainer_backend.inference.reply import split_stop
from trainer_backend.inference.served_policy import ServedPolicy
from trainer_backend.models import load_model_folder
from trainer_backend.rundir.layout import open_run

# A decision is uncertain if the policy gave the sampled answer less than this probability.
UNSURE = 0.5


class Turn(NamedTuple):
    """A decision: the state of the game before it, and the probability of the sampled answer."""

    state: bytes
    probability: float


@dataclass(frozen=True)
class Game:
    turns: Sequence[Turn]
    unique: float

    def unsure_from(self, start: int) -> int | None:
        """Return the index of the first uncertain decision from `start` on; None if there is none."""
        rest = enumerate(self.turns[start:], start)
        return next((place for place, turn in rest if turn.probability < UNSURE), None)


@dataclass(frozen=True)
class Player:
    """A checkpoint's policy, and the environment and sampling of its job."""

    policy: ServedPolicy
    config: CrafterConfig
    sampling: Sampling

    async def play(self, environment: CrafterEnvironment, observation: Observation, *key: object) -> Game:
        """Play from the observation to the end of the game; `key` seeds the samples."""
        turns: list[Turn] = []
        over = False
        while not over:
            state = environment.snapshot()
            calls, invalid, probability = await self._decide(environment, observation, (*key, len(turns)))
            turns.append(Turn(state, probability))
            outcome = environment.step(calls, invalid_reason=invalid)
            observation, over = outcome.observation, outcome.terminated or outcome.truncated
        return Game(turns, environment.outcome_reward())

    async def play_on(self, turn: Turn, *key: object) -> Game:
        environment = CrafterEnvironment(self.config)
        return await self.play(environment, environment.restore(turn.state), *key)

    async def _decide(
        self, environment: CrafterEnvironment, observation: Observation, key: Sequence[object]
    ) -> tuple[list[ToolRequest], str | None, float]:
        """Return the calls, the reason if there are none, and the probability of the sampled answer."""
        messages = [item.model_dump(exclude_none=True) for item in environment.messages(observation, ())]
        tools = [tool.model_dump(mode="json") for tool in environment.tools()]
        sampling = self.sampling.model_copy(update={"seed": derived_seed("best-of-n", *map(str, key))})
        ids = self.policy.renderer.prompt_ids(messages, tools)
        answer = await self.policy.engine.generate(ids, sampling, request_id="-".join(map(str, key)))
        text, _ = split_stop(answer, self.policy.renderer)
        reply = self.policy.tool_format.parse(text, tools)
        calls = [ToolRequest(call.name, json.loads(call.arguments)) for call in reply.tool_calls]
        return calls, None if calls else reply.error or "no call", math.exp(sum(answer.logprobs))


async def improve(player: Player, world: int, continuations: int) -> dict[str, float]:
    """Play a game and improve it; return the unique achievements of both (`first` and `best`)."""
    environment = CrafterEnvironment(player.config)
    game = first = await player.play(environment, environment.reset(FIRST_WORLD + world), world)
    place, choices = game.unsure_from(0), 0
    while place is not None:
        turn = game.turns[place]
        keys = ((world, place, number) for number in range(continuations))
        others = await asyncio.gather(*(player.play_on(turn, *key) for key in keys))
        best = max(others, key=lambda other: other.unique)
        if best.unique > game.unique:
            game = Game((*game.turns[:place], *best.turns), best.unique)
        place, choices = game.unsure_from(place + 1), choices + 1
    return {"world": world, "first": first.unique, "best": game.unique, "choices": choices}


async def run(options: Any) -> dict[str, Any]:
    directory = open_run(Path(options.run))
    job, folder = directory.job(), directory.checkpoints / options.checkpoint
    model, tokenizer = load_model_folder(folder)
    stop_ids = stop_token_ids(model.generation_config, tokenizer)
    engine = LocalEngine(model, stop_ids=stop_ids, keys=job.inference)
    engine.start()
    config, sampling = CrafterConfig(**job.rollout.env_config), job.rollout.choose_sampling()
    player = Player(ServedPolicy(engine, tokenizer), config, sampling)
    try:
        games = await asyncio.gather(
            *(improve(player, world, options.continuations) for world in range(options.games))
        )
    finally:
        engine.stop()
    gains = mean_interval([game["best"] - game["first"] for game in games])
    return {
        "bench": "best_of_n",
        "job": job.job.name,
        "seed": job.job.seed,
        "checkpoint": options.checkpoint,
        "continuations": options.continuations,
        "unsure_below": UNSURE,
        "first": asdict(mean_interval([game["first"] for game in games])),
        "best": asdict(mean_interval([game["best"] for game in games])),
        "gain": asdict(gains),
        "games": games,
    }


def main() -> None:
    options = kit.options(
        __doc__, ("run", str, "its folder"), ("--checkpoint", "iteration_0"), ("--games", 40, "worlds"),
        ("--continuations", 4, "of each uncertain decision"),
    )  # fmt: skip
    found = asyncio.run(run(options))
    kit.write_results(kit.ROOT / "bench" / "results" / "best_of_n.json", found)
    print(json.dumps({name: found[name] for name in ("first", "best", "gain")}))


if __name__ == "__main__":
    main()
