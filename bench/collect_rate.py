"""Measures how many decisions of whole games of Crafter are collected a second, also against another tree.

    python -m bench.collect_rate [--model FOLDER] [--games 64] [--rounds 3] [--against TREE]

Games of configs/crafter_cpu.toml go from a new world until death. They are played by the scripted teacher
and, with --model, by the model of a folder (a run's checkpoint). A gateway in this process serves the model,
or a gateway in its own process with --set 'cluster.launcher="local"'. The measured stage consists of
requests, episodes, answers, spool and Parquet file. Its CPU time is that of the collecting process and of
its children: the task app, and the gateway if it has its own process. Rounds alternate between the trees
with the same seeds; the first round is not counted.
"""

import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil

from bench import kit
from shared_schemas.rollouts import RolloutRequest
from trainer_backend import job_parts
from trainer_backend.collect.dispatcher import Dispatcher
from trainer_backend.job.load import load_job
from trainer_backend.job.schema import JobConfig
from trainer_backend.processes.gateways import gateway_listener
from trainer_backend.processes.policy_server import FolderPolicy, PolicyServer
from trainer_backend.run.run import collected
from trainer_backend.rundir.rollout_files import write_rollouts
from trainer_backend.rundir.spool import Spool

JOB = kit.ROOT / "configs" / "crafter_cpu.toml"
SETTINGS = (
    "rollout.env_config.length=10000", "rollout.max_turns=10000", "rollout.max_invalid_decisions=10000",
    "rollout.timeout_s=7200", "services.iteration_timeout_s=7200",
)  # fmt: skip


def children_seconds() -> float:
    """Return the CPU seconds so far of this process's children: the job's own task apps and gateways."""
    total = 0.0
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it has ended
            spent = child.cpu_times()
            total += spent.user + spent.system
    return total


class Stage:
    """A stage of a run that can be collected again and again, each time under a new run id."""

    def __init__(
        self, folder: Path, dispatcher: Dispatcher, plan: Callable[[str], list[RolloutRequest]]
    ) -> None:
        self._folder, self._dispatcher, self._plan = folder, dispatcher, plan
        self._count = 0

    async def collect(self) -> dict[str, float]:
        """Play all games; return the number of decisions, the mean outcome, CPU seconds and wall seconds."""
        self._count += 1
        requests = self._plan(f"bench.{self._count}")
        ours_s, apps_s, wall_s = time.process_time(), children_seconds(), time.monotonic()
        spool = Spool.open(
            self._folder / "stage.spool.jsonl", requests, versions=range(1), gateway_urls=(), tell=print
        )
        batch = await collected(
            requests, self._dispatcher, spool=spool, tell=lambda done, total: None, stop=asyncio.Event()
        )
        assert batch is not None and not batch.failed, "every game is played to its end"
        write_rollouts(self._folder / "stage.parquet", batch.all)
        spool.remove()
        await self._dispatcher.ack(requests[0].run_id, batch.all)
        games = [rollout.trajectory for rollout in batch.rollouts if rollout.trajectory is not None]
        return {
            "decisions": sum(len(game.steps) for game in games),
            "outcome": statistics.mean(game.outcome_reward for game in games),
            "children_s": children_seconds() - apps_s,
            "trainer_s": time.process_time() - ours_s,
            "wall_s": time.monotonic() - wall_s,
        }


class Published:
    """Stands in for a learner that publishes weights to separate gateways; the weights are in a folder."""

    def __init__(self, model: Path) -> None:
        self._model = model

    def publish(self, folder: Path, what: str) -> None:
        shutil.copytree(self._model, folder)


@asynccontextmanager
async def stage_of(job: JobConfig, model: Path | None, folder: Path) -> AsyncIterator[Stage]:
    """Yield a stage with its task app and gateway. The model plays it, or the teacher without a model."""
    async with job_parts.task_apps(job, folder / "task_app.log") as apps:
        dispatcher = Dispatcher(apps, timeout_s=job.services.iteration_timeout_s)
        if model is None:
            yield Stage(folder, dispatcher, lambda run_id: job_parts.planner(job, run_id).warmup())
            return
        if job.cluster is not None:  # imported here, since the other tree may have none
            from trainer_backend.run.fixed_setup import FixedSetup
            from trainer_backend.rundir.layout import RunDirectory

            with job_parts.gateways(job, FixedSetup(), RunDirectory(folder, "bench"), print) as gateways:
                async with gateways.serving(Published(model)) as processes:
                    await processes.publish(0)
                    inference = processes.inference
                    yield Stage(
                        folder,
                        dispatcher,
                        lambda run_id: job_parts.planner(job, run_id, inference).training(1),
                    )
            return
        with gateway_listener(job.services) as listener:
            server = PolicyServer(job.job.name, listener, job.inference)
            policy = await asyncio.to_thread(FolderPolicy, job.model, server, model)
            with policy.serving() as inference:
                yield Stage(
                    folder, dispatcher, lambda run_id: job_parts.planner(job, run_id, inference).training(1)
                )


async def work(model: Path | None, games: int, settings: Sequence[str]) -> None:
    """Be a tree's worker: for each line of stdin, collect a stage and print its figures as JSON."""
    with tempfile.TemporaryDirectory() as name:
        every = (f"rollout.episodes_per_batch={games}", f"warmup.episodes={games}")
        job = load_job(JOB, (*SETTINGS, *every, *settings)).config
        async with stage_of(job, model, Path(name)) as stage:
            while await asyncio.to_thread(sys.stdin.readline):
                print("answer", json.dumps(await stage.collect()), flush=True)


def measure(player: str, sides: "dict[str, kit.Side]", rounds: int) -> None:
    """Time a player on each tree in turns, and print the time of a decision."""
    figures: dict[str, dict[str, list[float]]] = {}
    for name, sets in kit.compare_sides(__file__, sides, rounds).items():
        micro = {
            key: [1e6 * row[f"{key}_s"] / row["decisions"] for row in sets] for key in ("children", "trainer")
        }
        rates = [row["decisions"] / row["wall_s"] for row in sets]
        both = [sum(pair) for pair in zip(*micro.values(), strict=True)]
        print(
            f"{player}, {name} tree: {kit.spread(rates, 0)} decisions a second; CPU time of one in µs: "
            f"{kit.spread(both, 0)}, of these children {kit.spread(micro['children'], 0)}, "
            f"trainer {kit.spread(micro['trainer'], 0)}; {sets[0]['decisions']:.0f} decisions, "
            f"outcome {sets[0]['outcome']:.2f}"
        )
        figures[name] = {"rates": rates, "cpu_us": both}
    if "other" in figures:
        for figure, best in (("rates", 1), ("cpu_us", -1)):
            pairs = zip(figures["this"][figure], figures["other"][figure], strict=True)
            ratios = [(ours / theirs) ** best for ours, theirs in pairs]
            print(f"{player}: {figure} x{kit.spread(ratios)}, {rounds} rounds in turns")


def main() -> int:
    options = kit.options(
        __doc__,
        ("--model", Path, "a model folder, such as checkpoints/started_from of a run"),
        ("--games", 64, "games of a stage"),
        ("--rounds", 3),
        ("--against", Path, "the root of another tree"),
        ("--player", [], "teacher or model; absent: both, as far as --model is given"),
        ("--set", [], "table.key=value, for this tree alone"),
        ("--work", False, "used by the script itself"),
    )
    if options.work:
        asyncio.run(work(options.model, options.games, options.set))
        return 0
    own = [word for text in options.set for word in ("--set", text)]
    models = {"teacher": None} | ({} if options.model is None else {"model": options.model.resolve()})
    for player in options.player or models:
        words = ["--work", "--games", str(options.games)]
        words += [] if models[player] is None else ["--model", str(models[player])]
        sides = {"this": kit.Side(kit.ROOT, [*words, *own])}
        if options.against is not None:
            sides["other"] = kit.Side(options.against.resolve(), words)
        measure(player, sides, options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
