"""What a state folder holds, read back by another task app: as it was when the first one was killed.

The folder is copied while the first app lives: that is what a kill leaves. Whatever is done to sessions, and
whenever the task app is killed, they go on as if nothing had happened.
"""

import asyncio
import base64
import json
import shutil
import signal
import sqlite3
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from service_kit.errors import SettingsError
from task_app.__main__ import main
from task_app.app import create_app
from task_app.environments.crafter.environment import CrafterConfig, CrafterEnvironment
from task_app.plugins import EnvironmentPlugin, PlugBoards, default_plug_boards
from task_app.protocols import ToolRequest
from task_app.sessions.journal import FILE, WORK, Work
from task_app.settings import Settings
from tests.task_app.counting import KEY, CountingConfig, CountingEnvironment, boards
from tests.task_app.fake_inference import completion, fake_inference
from tests.task_app.playing import ON, act
from tests.task_app.sessions.test_idempotency import keyed
from tests.task_app.test_service_process import task_app

CRAFTER = {"env_name": "crafter", "seed": 17, "config": {"text": "compact"}}
SECRET = "a-key-of-a-gateway-4711"


@asynccontextmanager
async def app_on(folder, plug_boards=None, **changes):
    own = Settings(api_keys=(KEY,), state_dir=folder, **changes)
    app = create_app(own, boards=plug_boards or default_plug_boards())
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


async def test_a_write_that_was_cut_short_is_as_if_it_had_not_begun(tmp_path):
    async with app_on(tmp_path / "s") as client:
        env_id = await created(client)
        for _ in range(3):
            await step(client, env_id)
        left = killed(tmp_path / "s", tmp_path)
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
        ("PRAGMA user_version = 99", "has format 99; this task app reads 3"),
        ("PRAGMA application_id = 0", "is a database, but not of a task app"),
    ],
    ids=["no database", "cut short", "a page", "another format", "of another program"],
)
async def test_a_database_that_cannot_be_read_is_refused_by_name_and_stays(tmp_path, damage, told):
    folder = tmp_path / "s"
    async with app_on(folder) as client:
        await step(client, await created(client))
    if isinstance(damage, str):
        changed(folder, damage)
    else:
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


ACTIONS = st.lists(
    st.sampled_from(["noop", "move_left", "move_right", "do", "sleep"]), min_size=1, max_size=3
)
NAMES = st.lists(st.sampled_from(["a", "b", "x"]), min_size=1, max_size=3)
# What a request does; `kill` leaves the folder as it is and starts another task app on it.
DOINGS = st.one_of(
    st.tuples(st.just("step"), ACTIONS, NAMES),
    st.tuples(st.just("keyed"), ACTIONS, NAMES),
    st.tuples(st.just("reset"), st.integers(0, 3), st.none()),
    st.tuples(st.just("kill"), st.none(), st.none()),
)
# One that has snapshots, and one that is played again.
KINDS = {
    "crafter": (lambda: CrafterEnvironment(CrafterConfig(text="compact")), "interact_many", "actions"),
    "counting": (CountingEnvironment, "add", "names"),
}


class World:
    """The sessions of a task app that is killed now and then, and the same environments in this process."""

    def __init__(self, every):
        self.every, self.keys = every, 0
        self.models = {name: make() for name, (make, _, _) in KINDS.items()}
        self.ids, self.turns = {}, dict.fromkeys(KINDS, 0)

    async def create(self, client):
        for name, model in self.models.items():
            config = {"text": "compact"} if name == "crafter" else {}
            made = await post(client, "/env/create", {"env_name": name, "seed": 1, "config": config})
            self.ids[name] = made["env_id"]
            assert made["observation"]["text"] == model.reset(1).text

    async def step(self, client, doing, arguments):
        for name, value in zip(KINDS, arguments, strict=True):
            _, tool, argument = KINDS[name]
            body = {"env_id": self.ids[name], "tool_calls": [{"tool": tool, "args": {argument: value}}]}
            headers = {}
            if doing == "keyed":
                self.keys += 1
                headers = {"Idempotency-Key": str(self.keys)}
            answer = await post(client, "/env/step", body, **headers)
            if doing == "keyed":
                assert await post(client, "/env/step", body, **headers) == answer
            outcome = self.models[name].step([ToolRequest(tool, {argument: value})])
            self.turns[name] += 1
            assert answer["info"]["turn"] == self.turns[name]
            assert answer["observation"]["text"] == outcome.observation.text
            assert answer["env_rewards"] == list(outcome.env_rewards)

    async def reset(self, client, seed):
        for name, model in self.models.items():
            answer = await post(client, "/env/reset", {"env_id": self.ids[name], "seed": seed})
            assert answer["observation"]["text"] == model.reset(seed).text
            self.turns[name] = 0


async def lived(doings, every, root):
    world, number, rest = World(every), 0, [("create", None, None), *doings]
    plugged = boards()
    plugged.environments["crafter"] = default_plug_boards().environments["crafter"]
    while rest:
        async with app_on(root / str(number), plugged, journal_snapshot_every=every) as client:
            while rest:
                doing, *arguments = rest.pop(0)
                if doing == "kill":
                    shutil.copytree(root / str(number), root / str(number + 1))
                    break
                if doing == "create":
                    await world.create(client)
                elif doing == "reset":
                    await world.reset(client, arguments[0])
                else:
                    await world.step(client, doing, arguments)
        number += 1


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(DOINGS, max_size=12), st.sampled_from([1, 2, 5]))
def test_killed_or_not_sessions_are_those_of_one_process(doings, every):
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(lived(doings, every, Path(folder)))


MOVES = [
    act("move_right"),
    act("move_right", "move_right", "do"),
    act("move_down", "move_right", "do"),
    act("noop"),
]


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait(10)


def posted(client, path, body, *, key=None):
    headers = {"Idempotency-Key": key} if key else {}
    answer = client.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def made(client, *, key=None):
    body = {"env_name": "crafter", "seed": 17, "config": {"step_rewards": ON, "text": "compact"}}
    return posted(client, "/env/create", body, key=key)["env_id"]


def stepped(client, env_id, calls, *, key=None):
    return posted(client, "/env/step", {"env_id": env_id, "tool_calls": calls}, key=key)


def test_after_a_kill_sessions_go_on_and_retries_get_the_answers_of_before(tmp_path, capsys):
    # Every second decision is written whole, so one of the two killed sessions has a decision after that.
    settings = {"TURNWISE_JOURNAL_SNAPSHOT_EVERY": "2"}
    with task_app("--state-dir", str(tmp_path), **settings) as (process, client):
        undisturbed, even, odd = made(client), made(client, key="create"), made(client)
        expected = [stepped(client, undisturbed, calls) for calls in MOVES]
        begun = [stepped(client, even, calls, key=f"{i}") for i, calls in enumerate(MOVES[:2])]
        assert begun == [stepped(client, odd, calls) for calls in MOVES[:2]] == expected[:2]
        snapshot = posted(client, "/env/snapshot", {"env_id": odd})["snapshot"]
        assert stepped(client, odd, MOVES[2]) == expected[2]

        # A second task app cannot use its folder.
        with pytest.raises(SystemExit, match="2"):
            main(["--port", "0", "--state-dir", str(tmp_path)])
        assert "is in use by another task app" in capsys.readouterr().err
        kill(process)
    with task_app("--state-dir", str(tmp_path), **settings) as (_, client):
        assert made(client, key="create") == even
        assert stepped(client, even, MOVES[1], key="1") == begun[1]
        body = {"env_id": even, "tool_calls": MOVES[2]}
        other = client.post("/env/step", json=body, headers={"Idempotency-Key": "1"})
        assert (other.status_code, other.json()["code"]) == (409, "idempotency_conflict")
        assert [stepped(client, even, calls) for calls in MOVES[2:]] == expected[2:]
        assert stepped(client, odd, MOVES[3]) == expected[3]
        # A snapshot too goes on alike in another process, in which strings hash otherwise.
        restored = posted(client, "/env/restore", {"snapshot": snapshot})["env_id"]
        assert [stepped(client, restored, calls)["metadata"] for calls in MOVES[2:]] == [
            step["metadata"] for step in expected[2:]
        ]
