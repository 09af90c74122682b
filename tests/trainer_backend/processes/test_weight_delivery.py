"""Weights that the learner sends to servers of a pool: at a publish, and to a server that comes back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tests.processes import until
from tests.trainer_backend.inference.fake_vllm import FakeVllm, fake_vllm
from tests.trainer_backend.learner.hand_made import change, make_learner, tiny_tokenizer
from trainer_backend.errors import LearnerLost
from trainer_backend.inference.servers import Servers
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.processes.policy_server import make_servers
from trainer_backend.processes.weight_delivery import WeightBroadcast


@pytest.fixture
def learner() -> LocalLearner:
    return make_learner(tiny_tokenizer())


class Run:
    """Servers, their pool, and what has the learner send its weights to them."""

    def __init__(
        self, learner: LocalLearner, fakes: list[FakeVllm], urls: list[str], folder: Path, lines: list[str]
    ) -> None:
        self.learner, self.fakes = learner, fakes
        table = learner.config.inference.model_copy(
            update={"urls": tuple(urls), "engine": "vllm", "replica_wait_s": 30.0}
        )
        self.weights = WeightBroadcast(learner, folder, table)
        self.pool: Servers = make_servers(
            table, learner.facts(), lines.append, None, self.weights.serve_again
        )

    async def publish(self, number: int) -> None:
        version = await self.weights.write(number)
        await self.weights.deliver(self.pool.load(version))


@asynccontextmanager
async def serve_run(learner: LocalLearner, folder: Path, servers: int = 2) -> AsyncIterator[Run]:
    learner.publish(folder / "theirs")
    change(learner)  # a server begins with other weights
    with ExitStack() as stack:
        pairs = [stack.enter_context(fake_vllm(folder / "theirs")) for _ in range(servers)]
        run = Run(learner, [fake for fake, _ in pairs], [url for _, url in pairs], folder, [])
        try:
            yield run
        finally:
            await run.weights.close()
            await run.pool.close()


async def test_every_server_loads_what_the_learner_has_and_only_one_folder_is_written(learner, tmp_path):
    async with serve_run(learner, tmp_path) as run:
        for number in range(2):
            await run.publish(number)  # the canary compares each with the learner
            assert [replica.state for replica in run.pool.replicas] == ["serving"] * 2
            change(learner)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "theirs"]


async def test_a_server_that_comes_back_between_two_publishes_is_sent_the_weights_alone(learner, tmp_path):
    async with serve_run(learner, tmp_path) as run:
        await run.publish(0)
        (lost, other), (fake, _) = run.pool.replicas, run.fakes
        fake.loads.clear()
        loads = list(run.fakes[1].loads)
        lost.state = "lost"
        watch = asyncio.ensure_future(run.pool.look_after())
        await until(lambda: lost.state == "serving")
        watch.cancel()
        assert len(fake.loads) == 1 and run.fakes[1].loads == loads and other.loads == 1


async def test_a_server_that_is_slow_at_a_publish_is_sent_the_weights_after_it(learner, tmp_path):
    async with serve_run(learner, tmp_path) as run:
        run.fakes[1].may_pause.clear()
        watch = asyncio.ensure_future(run.pool.look_after())
        await run.publish(0)
        assert [replica.state for replica in run.pool.replicas] == ["serving", "stale"]
        run.fakes[1].may_pause.set()
        await until(lambda: run.pool.replicas[1].state == "serving")
        watch.cancel()


async def test_a_learner_that_is_lost_ends_the_publish(learner, tmp_path):
    def broadcast(*arguments: object) -> int:
        raise LearnerLost("its process has ended")

    async with serve_run(learner, tmp_path, servers=1) as run:
        run.weights._learner.broadcast = broadcast  # type: ignore[method-assign]
        with pytest.raises(LearnerLost):
            await run.publish(0)
