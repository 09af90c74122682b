"""A run of bench/scale.py in virtual time: the code that shares out work, over parts that only cost time.

From the project: which iterations may be asked for (`train.iterations_open`), the plan and each rollout's
gateway (`collect.plan`), the queue of the task apps (`collect.dispatcher`), which gateway has which server
(`processes.gateways.divide_table`), and sticky sessions, pauses and publishing (`inference.servers`).
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from bench.scale_model import Conversation, Core, CpuCost, SimulatedReplica, Speed, count_tokens
from bench.virtual_time import in_virtual_time
from shared_schemas.rollouts import Rollout, RolloutPage, RolloutRequest
from shared_schemas.trajectory import Sampling, Trajectory
from trainer_backend import job_parts
from trainer_backend.collect.apps import TaskApps
from trainer_backend.collect.client import TaskAppClient
from trainer_backend.collect.dispatcher import Dispatcher
from trainer_backend.collect.plan import Inference
from trainer_backend.inference.actor import Extras
from trainer_backend.inference.servers import Servers
from trainer_backend.inference.versions import PolicyVersion, ScoredPrompt
from trainer_backend.job.load import parse_job
from trainer_backend.job.schema import JobConfig
from trainer_backend.processes.gateways import divide_table
from trainer_backend.train import iterations_open

_FOR_EVER_S = 1e9
CANARY = ScoredPrompt(ids=(1, 2), logprobs=(0.0,))


@dataclass(frozen=True, slots=True)
class Cluster:
    """What a run has.

    Attributes:
        ranks: GPUs of the learner.
        places: conversations at a time.
        weight_update: "wait" or "keep", as [inference] has it.
    """

    ranks: int
    replicas: int
    gateways: int
    task_apps: int
    places: int
    max_staleness: int
    weight_update: str = "wait"


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of everything, for one cluster and one batch.

    Attributes:
        collect: of the orchestrator during the collection; `credit`: between it and the update.
        update_token_s: of the learner for each token of the batch.
        speed: of a replica.
    """

    conversation: Conversation
    task_app: CpuCost
    gateway: CpuCost
    collect: CpuCost
    credit: CpuCost
    update_token_s: float
    speed: Speed


@dataclass
class Batch:
    """What an iteration has played."""

    decisions: int = 0
    tokens: int = 0
    sampled: int = 0


class SimulatedGateway:
    """A gateway's core and its pool."""

    def __init__(self, cost: CpuCost, engines: Sequence[SimulatedReplica]) -> None:
        self.core, self.cost = Core(), cost
        self.pool = Servers(engines, wait_s=_FOR_EVER_S, canary_limit=1e-4, tell=lambda line: None)

    async def chat(self, rollout_id: str, prompt: int, new: int, answer: int) -> None:
        await self.core.use(self.cost.seconds(new + answer))
        await self.pool.generate(
            range(prompt),
            Sampling.model_construct(max_tokens=answer),
            request_id=rollout_id,
            extras=Extras(session=rollout_id),
        )


class SimulatedTaskApp(TaskAppClient):
    """A task app that plays its episodes here, on one core."""

    def __init__(self, number: int, run: "SimulatedRun") -> None:
        super().__init__(f"http://task-app-{number}", SecretStr(""), timeout_s=_FOR_EVER_S)
        self.core, self._run = Core(), run
        self._ended: deque[Rollout] = deque()
        self._any_ended, self._tasks = asyncio.Event(), set[asyncio.Task[None]]()

    async def submit(self, requests: Sequence[RolloutRequest]) -> str:
        for request in requests:
            task = asyncio.ensure_future(self._play(request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return self.url

    async def poll(self, run_id: str, cursor: str | None, *, wait_s: float) -> RolloutPage:
        if not self._ended:
            self._any_ended.clear()
            await self._any_ended.wait()
        rollouts, self._ended = tuple(self._ended), deque()
        for rollout in rollouts:
            turns = self._run.costs.conversation.turns(rollout.rollout_id)
            await self._run.read(len(turns), count_tokens(turns))
        return RolloutPage.model_construct(
            rollouts=rollouts, cursor="1", unfinished=len(self._tasks), instance_id=self.url
        )

    async def ack(self, run_id: str, rollout_ids: Sequence[str]) -> None: ...

    async def cancel(self, rollout_id: str) -> None: ...

    async def _play(self, request: RolloutRequest) -> None:
        run, prompt, batch = self._run, 0, self._run.batches[request.iteration]
        gateway = run.gateways[request.policy.config["inference_url"]]
        for turn in run.costs.conversation.turns(request.rollout_id):
            prompt += turn.observation
            await self.core.use(run.costs.task_app.seconds(turn.observation + turn.answer))
            await gateway.chat(request.rollout_id, prompt, turn.observation, turn.answer)
            await asyncio.sleep(turn.wait_s)
            prompt += turn.answer
            batch.decisions += 1
            batch.sampled += turn.answer
        batch.tokens += prompt
        fields = request.model_dump(
            include={"rollout_id", "run_id", "iteration", "group_id", "sibling", "attempt"}
        )
        # Its decisions are counted in the batch; the dispatcher looks at world and outcome alone.
        episode = Trajectory.model_construct(
            seed=request.start.seed, steps=(), outcome_reward=0.0, wall_s=0.0,
            parent_rollout_id=None, parent_turn=None,
        )  # fmt: skip
        self._ended.append(
            Rollout.model_construct(
                **fields, instance_id=self.url, status="finished", trajectory=episode, failure=None
            )
        )
        self._any_ended.set()


@dataclass
class Totals:
    """What a run has used up to a moment, in seconds."""

    at_s: float
    busy_s: dict[str, float]
    prompt_tokens: int
    reused_tokens: int


@dataclass
class SimulatedRun:
    """One run. `play` gives its state after each iteration."""

    job: JobConfig
    cluster: Cluster
    costs: Costs
    batches: dict[int, Batch] = field(default_factory=dict)
    gateways: dict[str, SimulatedGateway] = field(default_factory=dict)

    def __post_init__(self) -> None:
        cluster, table = self.cluster, self.job.inference
        self.core, self._learner_s, self._publish_s = Core(), 0.0, 0.0
        urls = tuple(f"http://replica-{number}" for number in range(cluster.replicas))
        keeps = cluster.weight_update == "keep"
        self.replicas = {url: SimulatedReplica(url, self.costs.speed, keeps=keeps) for url in urls}
        for number in range(cluster.gateways):
            share = divide_table(table.model_copy(update={"urls": urls}), number, cluster.gateways)
            engines = [self.replicas[url] for url in share.urls]
            self.gateways[f"http://gateway-{number}/v1"] = SimulatedGateway(self.costs.gateway, engines)
        first, *others = self.gateways
        actor = Inference(first, "run/actor", SecretStr("key"), other_urls=tuple(others))
        self._planner = job_parts.planner(self.job, "run", actor)
        self._apps = [SimulatedTaskApp(number, self) for number in range(cluster.task_apps)]
        task_apps = TaskApps.of(self._apps)
        for app in task_apps.members:
            app.at_most = -(-cluster.places // cluster.task_apps)
        self._dispatcher = Dispatcher(task_apps, timeout_s=_FOR_EVER_S, max_running=cluster.places)

    async def play(self, iterations: int) -> list[Totals]:
        """The order of `train.train`: collect, credit, update, publish."""
        collections: dict[int, asyncio.Task[Any]] = {}
        totals = []
        await self._publish(0)
        for done in range(iterations):
            for number in iterations_open(done, self.cluster.max_staleness, iterations):
                if number not in collections:
                    self.batches[number] = Batch()
                    requests = self._planner.training(number)
                    collections[number] = asyncio.ensure_future(self._dispatcher.collect(requests))
            collection = await collections[done + 1]
            assert not collection.failed
            batch = self.batches[done + 1]
            await self.core.use(self.costs.credit.seconds(batch.tokens, batch.decisions))
            seconds = batch.tokens * self.costs.update_token_s
            await asyncio.sleep(seconds)
            self._learner_s += seconds
            await self._publish(done + 1)
            totals.append(self._totals())
        return totals

    async def read(self, decisions: int, tokens: int) -> None:
        """Read an episode that a task app has sent."""
        await self.core.use(self.costs.collect.seconds(tokens, decisions))

    async def _publish(self, version: int) -> None:
        start = asyncio.get_running_loop().time()
        publication = PolicyVersion(number=version, folder=Path("weights"), prompt=CANARY)
        await asyncio.gather(*(gateway.pool.load(publication) for gateway in self.gateways.values()))
        self._publish_s += asyncio.get_running_loop().time() - start

    def _totals(self) -> Totals:
        """Of a kind of which there are several: the busiest one of them; of replicas: their mean."""
        replicas = list(self.replicas.values())
        busy_s = {
            "learner": self._learner_s,
            "replicas": sum(replica.busy_s for replica in replicas) / len(replicas),
            "gateway": max(gateway.core.busy_s for gateway in self.gateways.values()),
            "task app": max(app.core.busy_s for app in self._apps),
            "orchestrator": self.core.busy_s,
            "publish": self._publish_s,
        }
        return Totals(
            asyncio.get_running_loop().time(),
            busy_s,
            sum(replica.prompt_tokens for replica in replicas),
            sum(replica.reused_tokens for replica in replicas),
        )


@dataclass(frozen=True, slots=True)
class Figures:
    """What an iteration takes, on average after the first one.

    Attributes:
        busy: of its time, by resource.
        decisions_per_s, reused: of all replicas; prompt tokens from their caches, as a share.
    """

    iteration_s: float
    busy: dict[str, float]
    decisions_per_s: float
    tokens: float
    reused: float


def simulated(cluster: Cluster, costs: Costs, episodes: int, iterations: int) -> Figures:
    """Play a run, and look at this many iterations but the first.

    Beyond them as many more are played as are collected ahead, without which the last ones would have the
    replicas to themselves.
    """
    played = iterations + cluster.max_staleness
    job = parse_job(
        {
            "model": {"preset": "tiny-0.3m"},
            "rollout": {"episodes_per_batch": episodes},
            "training": {"group_size": 4, "iterations": played, "max_staleness": cluster.max_staleness},
        },
        where="bench/scale.py",
    ).config

    async def work() -> tuple[SimulatedRun, list[Totals]]:
        run = SimulatedRun(job, cluster, costs)
        return run, await run.play(played)

    (run, totals), _ = in_virtual_time(work())
    first, last = totals[0], totals[iterations - 1]
    seconds = last.at_s - first.at_s
    batches = [batch for number, batch in run.batches.items() if 1 < number <= iterations]
    prompts = last.prompt_tokens - first.prompt_tokens
    return Figures(
        iteration_s=seconds / (iterations - 1),
        busy={name: (last.busy_s[name] - first.busy_s[name]) / seconds for name in last.busy_s},
        decisions_per_s=sum(batch.decisions for batch in batches) / seconds,
        tokens=sum(batch.tokens for batch in batches) / len(batches),
        reused=(last.reused_tokens - first.reused_tokens) / max(prompts, 1),
    )


def doubled(costs: Costs, cluster: Cluster) -> dict[str, tuple[Costs, Cluster]]:
    """By resource: the same run with twice of it; by rule: with another one."""

    def half(cost: CpuCost) -> CpuCost:
        return CpuCost(cost.decision_us / 2, cost.token_us / 2)

    speed = costs.speed
    faster = replace(
        speed, weights_s=speed.weights_s / 2, row_s=speed.row_s / 2, prompt_s=speed.prompt_s / 2,
        cached_s=speed.cached_s / 2, room=speed.room * 2, max_running=speed.max_running * 2,
    )  # fmt: skip
    talk = costs.conversation
    found = {
        "learner": (replace(costs, update_token_s=costs.update_token_s / 2), cluster),
        "replicas": (replace(costs, speed=faster), cluster),
        "gateway": (replace(costs, gateway=half(costs.gateway)), cluster),
        "task app": (replace(costs, task_app=half(costs.task_app)), cluster),
        "orchestrator": (
            replace(costs, collect=half(costs.collect), credit=half(costs.credit)), cluster,
        ),
        "environment": (replace(costs, conversation=replace(talk, wait_s=talk.wait_s / 2)), cluster),
        "publish": (costs, replace(cluster, weight_update="keep")),
    }  # fmt: skip
    if cluster.max_staleness:  # else learner and replica share a GPU and take turns
        ahead = replace(cluster, max_staleness=cluster.max_staleness + 1)
        found["max_staleness"] = (costs, ahead)
    return found
