"""What an environment holds is given back once, however its episode or session ends."""

import asyncio

import pytest

from shared_schemas.rollouts import EnvSpec
from task_app.app import create_app
from task_app.errors import EpisodeFailed
from task_app.plugins import EnvironmentPlugin, PlugBoards
from task_app.sessions.sessions import EnvironmentSession
from task_app.settings import Settings
from tests.task_app.counting import (
    KEY,
    CountingConfig,
    CountingEnvironment,
    PlannedPolicy,
    WaitingPolicy,
    add,
    boards,
    rollout,
    running_app,
)
from tests.task_app.rollout_client import accept, wait_for_all


class Held(CountingEnvironment):
    """The counting environment, which holds something from its first reset on."""

    def __init__(self, config, log):
        super().__init__(config)
        self._log = log

    def reset(self, seed):
        self._log.resets += 1
        return super().reset(seed)

    def close(self):
        self._log.closed += 1
        self._log.loop.call_soon_threadsafe(self._log.signal.set)
        if self._log.fails:
            raise OSError("the far end is gone")


class Log:
    def __init__(self, *, fails=False):
        self.resets = self.closed = 0
        self.fails = fails
        self.loop, self.signal = asyncio.get_running_loop(), asyncio.Event()

    def boards(self, waiting=None):
        broken = PlannedPolicy(add("a"), EpisodeFailed("gone"))
        held = EnvironmentPlugin(CountingConfig, lambda config: Held(config, self))
        return PlugBoards({"counting": held}, boards(broken=lambda: broken, waiting=lambda: waiting).policies)


@pytest.mark.parametrize(
    ("policy", "status"), [("planned", "finished"), ("broken", "failed"), ("waiting", "cancelled")]
)
@pytest.mark.parametrize("fails", [False, True])
async def test_a_rollout_closes_its_environment_however_it_ends(policy, status, fails):
    log, waiting = Log(fails=fails), WaitingPolicy()
    async with running_app(log.boards(waiting)) as client:
        await accept(client, rollout("one", policy={"policy_name": policy}))
        if policy == "waiting":
            await waiting.asked.wait()
            await client.delete("/rollouts/one")
        assert (await wait_for_all(client, 1))["one"].status == status
        await log.signal.wait()
    assert (log.resets, log.closed) == (1, 1)


async def test_whatever_an_environment_was_made_for_it_is_closed_once():
    for path, body, resets in (
        ("/env/create", {"env_name": "counting", "seed": 1}, 2),
        ("/task_info?seed=1", None, 1),
        ("/rollout", {"run_id": "r", "env": ENV, "policy": {"policy_name": "planned"}, "ops": OPS}, 1),
    ):
        log = Log()
        async with running_app(log.boards()) as client:
            answer = await client.request("POST" if body else "GET", path, json=body)
            assert answer.status_code == 200, answer.text
            if path == "/env/create":
                session = {"env_id": answer.json()["env_id"]}
                await client.post("/env/reset", json=session)
                assert log.closed == 0
                await client.post("/env/terminate", json=session)
            await log.signal.wait()
        assert (log.resets, log.closed) == (resets, 1), path


async def test_the_end_of_the_service_closes_what_its_sessions_hold():
    log = Log()
    async with running_app(log.boards()) as client:
        for _ in range(2):
            await client.post("/env/create", json={"env_name": "counting"})
    assert (log.resets, log.closed) == (2, 2)


ENV, OPS = {"env_name": "counting", "seed": 1}, ["agent", "env"]


class SlowSession(EnvironmentSession):
    """A session whose environment is left when the service waits for another one too."""

    both: asyncio.Barrier
    is_left = False

    async def wait_closed(self, within_s):
        async with asyncio.timeout(10):
            await self.both.wait()
        self.is_left = True


async def test_the_end_of_the_service_waits_for_all_sessions_at_once():
    app, both = create_app(Settings(api_keys=(KEY,)), boards=boards()), asyncio.Barrier(2)
    sessions = [SlowSession(CountingEnvironment(), EnvSpec(env_name="counting")) for _ in range(2)]
    async with app.router.lifespan_context(app):
        for number, session in enumerate(sessions):
            session.both = both
            app.state.services.environments.adopt(f"env_{number}", session)
    assert [session.is_left for session in sessions] == [True, True]
