"""What a state folder holds, read back by another task app: as it was when the first one was killed.

The folder is copied while the first app lives: that is what a kill leaves.
"""

import asyncio
import base64
import json
import shutil
import sqlite3
from contextlib import asynccontextmanager

import httpx
import pytest
from structlog.testing import capture_logs

from service_kit.errors import SettingsError
from task_app.app import create_app
from task_app.plugins import EnvironmentPlugin, PlugBoards, default_plug_boards
from task_app.sessions.journal import FILE, WORK, Work
from task_app.settings import Settings
from tests.task_app.counting import KEY, CountingConfig, CountingEnvironment
from tests.task_app.fake_inference import completion, fake_inference
from tests.task_app.playing import act
from tests.task_app.sessions.test_idempotency import keyed

CRAFTER = {"env_name": "crafter", "seed": 17, "config": {"text": "compact"}}
SECRET = "a-key-of-a-gateway-4711"


@asynccontextmanager
async def app_on(folder, plug_boards=None, **settings):
    settings = Settings(api_keys=(KEY,), state_dir=folder, **settings)
    app = create_app(settings, boards=plug_boards or default_plug_boards())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://t", headers={"X-API-Key": KEY}) as client,
    ):
        yield client


def killed(folder, tmp_path):
    """The folder as a kill at this moment would leave it."""
    left = tmp_path / "left"
    shutil.copytree(folder, left)
    return left


async def post(client, path, body, status=200, **headers):
    answer = await client.post(path, json=body, headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json()


async def step(client, env_id, calls=None, **more):
    return await post(client, "/env/step", {"env_id": env_id, "tool_calls": calls or act("noop")}, **more)


async def created(client, **headers):
    return (await post(client, "/env/create", CRAFTER, **headers))["env_id"]


def sessions_in(folder):
    """The ids in a folder that no task app uses."""
    return [row[0] for row in changed(folder, "SELECT id FROM sessions ORDER BY id")]


def changed(folder, statement, *values):
    connection = sqlite3.connect(folder / FILE)
    rows = connection.execute(statement, values).fetchall()
    connection.commit()
    connection.close()
    return rows


async def one_session(folder, tmp_path, *, steps=3):
    """A folder with one session of some steps, and its id."""
    async with app_on(folder) as client:
        env_id = await created(client)
        for _ in range(steps):
            await step(client, env_id)
        return killed(folder, tmp_path), env_id


async def test_a_write_that_was_cut_short_is_as_if_it_had_not_begun(tmp_path):
    left, env_id = await one_session(tmp_path / "s", tmp_path)
    log = left / f"{FILE}-wal"
    log.write_bytes(log.read_bytes()[:-5])
    async with app_on(left) as client:
        assert (await step(client, env_id))["info"]["turn"] == 3


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda path: path.write_bytes(b"a diary" * 600), "as if damaged: file is not a database"),
        (lambda path: path.write_bytes(path.read_bytes()[:-4096]), "as if damaged: "),
        (lambda path: overwritten(path, at=4096 + 3, by=b"\xff" * 8), "as if damaged: "),
        (
            lambda path: changed(path.parent, "PRAGMA user_version = 99"),
            "has format 99; this task app reads 3",
        ),
        (
            lambda path: changed(path.parent, "PRAGMA application_id = 0"),
            "is a database, but not of a task app",
        ),
    ],
    ids=["no database", "cut short", "a page", "another format", "of another program"],
)
async def test_a_database_that_cannot_be_read_is_refused_by_name_and_stays(tmp_path, damage, told):
    folder = tmp_path / "s"
    async with app_on(folder) as client:
        await step(client, await created(client))
    damage(folder / FILE)
    before = (folder / FILE).read_bytes()
    with pytest.raises(SettingsError) as refused:
        create_app(Settings(api_keys=(KEY,), state_dir=folder))
    assert refused.value.where == "--state-dir"
    assert str(folder / FILE) in refused.value.detail
    assert told in refused.value.detail
    assert (folder / FILE).read_bytes() == before


def overwritten(path, *, at, by):
    data = bytearray(path.read_bytes())
    data[at : at + len(by)] = by
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("UPDATE sessions SET facts = '{}' WHERE id = ?", "it does not say what it should: KeyError"),
        ("UPDATE sessions SET snapshot = x'00' WHERE id = ?", "1 bytes that are no snapshot of a task app"),
        (
            "UPDATE steps SET seen = 'x' WHERE session = ?",
            "decision 1 had another outcome when it was replayed",
        ),
    ],
    ids=["facts", "snapshot", "a step"],
)
async def test_a_session_that_cannot_be_brought_back_costs_no_other_one_and_stays(tmp_path, change, reason):
    async with app_on(tmp_path / "s") as client:
        bad, good = await created(client), await created(client)
        await step(client, bad)
        await step(client, good)
        left = killed(tmp_path / "s", tmp_path)
    changed(left, change, bad)
    with capture_logs() as logs:
        async with app_on(left) as client:
            assert (await step(client, good))["info"]["turn"] == 2
            assert (await step(client, bad, status=404))["code"] == "unknown_id"
    (refused,) = [event for event in logs if event["event"] == "journal_refused"]
    assert refused["session"] == bad
    assert refused["reason"].startswith(reason)
    assert sessions_in(left) == sorted([bad, good])


async def test_what_was_done_but_never_answered_is_undone_and_done_by_its_retry(tmp_path):
    left, env_id = await one_session(tmp_path / "s", tmp_path, steps=1)
    # The kill hits between the record of a step and the answer to it.
    async with app_on(left) as client:
        session = client._transport.app.state.services.environments.find(env_id)
        token = WORK.set(Work(key="late", digest="digest"))
        answer = await step(client, env_id, act("move_right"))
        WORK.reset(token)
        assert (answer["info"]["turn"], session.turn) == (2, 2)
        again = tmp_path / "again"
        shutil.copytree(left, again)
    async with app_on(again) as client:
        assert await step(client, env_id, act("move_right"), **keyed("late")) == answer
        assert (await step(client, env_id))["info"]["turn"] == 3


async def test_a_session_whose_id_was_never_answered_is_forgotten(tmp_path):
    async with app_on(tmp_path / "s") as client:
        token = WORK.set(Work(key="late", digest="digest"))
        await created(client)
        WORK.reset(token)
        left = killed(tmp_path / "s", tmp_path)
    async with app_on(left, max_sessions=1) as client:
        await created(client)


async def test_an_old_answer_that_was_forgotten_undoes_nothing(tmp_path):
    async with app_on(tmp_path / "s", max_idempotency_keys=1) as client:
        env_id = await created(client)
        await step(client, env_id, **keyed("one"))
        await post(client, "/env/create", CRAFTER, **keyed("two"))
        left = killed(tmp_path / "s", tmp_path)
    async with app_on(left) as client:
        assert (await step(client, env_id))["info"]["turn"] == 2


async def test_what_was_answered_stays_done_over_any_number_of_restarts(tmp_path):
    """One step is told, the next is undone, and the answers are forgotten meanwhile."""
    folder = tmp_path / "0"
    async with app_on(folder) as client:
        env_id = await created(client)
        await step(client, env_id, **keyed("told"))
        token = WORK.set(Work(key="late", digest="digest"))
        await step(client, env_id)
        WORK.reset(token)
        shutil.copytree(folder, tmp_path / "1")
    for number in (1, 2):
        async with app_on(tmp_path / f"{number}", max_idempotency_keys=1) as client:
            services = client._transport.app.state.services
            assert services.environments.find(env_id).turn == 1
            await post(client, "/env/create", CRAFTER, **keyed(f"{number}"))
            shutil.copytree(tmp_path / f"{number}", tmp_path / f"{number + 1}")


async def test_ended_sessions_are_forgotten_by_the_database_too(tmp_path):
    folder = tmp_path / "s"
    async with app_on(folder, session_idle_s=0.01, sweep_every_s=0.01) as client:
        env_id = await created(client)
        await step(client, env_id)
        environments = client._transport.app.state.services.environments
        while len(environments):
            await asyncio.sleep(0)  # let the sweeper come to it
        await step(client, env_id, status=404)
    assert sessions_in(folder) == []
    async with app_on(folder) as client:
        kept = await created(client)
        env_id = await created(client)
        await step(client, env_id)
        await post(client, "/env/terminate", {"env_id": env_id})
    assert sessions_in(folder) == [kept]
    assert changed(folder, "SELECT * FROM steps") == []


async def test_policies_go_on_too_with_their_chance_and_the_switches_that_they_brought(tmp_path):
    on = {"enabled": True, "mode": "decision_stepwise"}
    policy = {"policy_name": "random", "config": {"seed": 5, "step_rewards": on}}
    async with app_on(tmp_path / "s") as client:
        env_id = await created(client)
        made = await post(client, "/policy/create", policy | {"bound_env_id": env_id})
        policy_id = made["policy_id"]
        await post(client, "/policy/step", {"policy_id": policy_id})
        left = killed(tmp_path / "s", tmp_path)
        expected = (await post(client, "/policy/step", {"policy_id": policy_id}))["tool_calls"]
    async with app_on(left) as client:
        again = await post(client, "/policy/step", {"policy_id": policy_id})
        assert (again["tool_calls"], again["meta"]["turn"]) == (expected, 2)
        assert (await step(client, env_id))["metadata"]["decision_rewards"]["turn"] == 1


async def test_the_switches_of_a_training_table_are_kept_as_step_rewards(tmp_path):
    training = {"step_rewards_enabled": True, "step_rewards_mode": "decision_stepwise"}
    async with app_on(tmp_path / "s") as client:
        env_id = (await post(client, "/env/create", CRAFTER | {"training": training}))["env_id"]
        left = killed(tmp_path / "s", tmp_path)
    [(facts,)] = changed(left, "SELECT facts FROM sessions")
    assert [one["mode"] for one in json.loads(facts)["switches"].values()] == ["decision_stepwise"]
    async with app_on(left) as client:
        assert (await step(client, env_id))["metadata"]["decision_rewards"]["turn"] == 1


async def test_no_key_is_written_so_a_policy_that_had_one_asks_for_it_again(tmp_path):
    call = {"id": "c", "type": "function", "function": {"name": "interact_many", "arguments": "{}"}}
    async with fake_inference(completion({"role": "assistant", "tool_calls": [call]})) as fake:
        config = {"inference_url": fake.url, "model": "m", "ask_token_ids": False}
        policy = {"policy_name": "openai", "config": config, "inference_key": SECRET}
        async with app_on(tmp_path / "s") as client:
            env_id = await created(client)
            made = await post(client, "/policy/create", policy | {"bound_env_id": env_id})
            policy_id = made["policy_id"]
            await post(client, "/policy/step", {"policy_id": policy_id})
            left = killed(tmp_path / "s", tmp_path)
        for file in left.iterdir():
            for form in (SECRET.encode(), base64.b64encode(SECRET.encode()), KEY.encode()):
                assert form not in file.read_bytes()
        async with app_on(left) as client:
            asked = await post(client, "/policy/step", {"policy_id": policy_id}, status=428)
            assert asked["code"] == "inference_key_needed"
            body = {"policy_id": policy_id, "inference_key": SECRET}
            assert (await post(client, "/policy/step", body))["meta"]["turn"] == 2
            assert (await post(client, "/policy/step", {"policy_id": policy_id}))["meta"]["turn"] == 3


class Unsealable(CountingEnvironment):
    """Restorable until its first step: from then on it has no snapshot."""

    def snapshot(self):
        if self._steps:
            raise ValueError("there is no snapshot of this")
        return b""

    def restore(self, state):
        return self.reset(0)


async def test_a_call_with_a_number_that_json_has_not_costs_its_decision_alone(tmp_path):
    async with app_on(tmp_path / "s", journal_snapshot_every=2) as client:
        env_id = await created(client)
        for number in ("NaN", "-Infinity", "1e999"):
            text = f'{{"actions": ["noop"], "n": {number}}}'
            call = {"function": {"name": "interact_many", "arguments": text}}
            told = (await step(client, env_id, [call]))["info"]["invalid_reason"]
            assert "no JSON object" in told
        assert (await step(client, env_id))["info"]["turn"] == 4
        left = killed(tmp_path / "s", tmp_path)
    async with app_on(left) as client:
        assert (await step(client, env_id))["info"]["turn"] == 5


async def test_a_session_that_cannot_be_written_as_a_whole_goes_on_by_its_records(tmp_path):
    plug_boards = PlugBoards({"counting": EnvironmentPlugin(CountingConfig, Unsealable)}, {})
    calls = [{"tool": "add", "args": {"names": ["a"]}}]
    with capture_logs() as logs:
        async with app_on(tmp_path / "s", plug_boards, journal_snapshot_every=2) as client:
            env_id = (await post(client, "/env/create", {"env_name": "counting"}))["env_id"]
            for _ in range(5):
                await step(client, env_id, calls)
            left = killed(tmp_path / "s", tmp_path)
    assert [event["event"] for event in logs].count("journal_not_compacted") == 2
    async with app_on(left, plug_boards) as client:
        assert (await step(client, env_id, calls))["info"]["turn"] == 6
