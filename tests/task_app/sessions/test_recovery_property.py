"""Whatever is done to sessions, whenever the task app is killed: they go on as if nothing had happened."""

import asyncio
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from task_app.__main__ import main
from task_app.environments.crafter.environment import CrafterConfig, CrafterEnvironment
from task_app.plugins import default_plug_boards
from task_app.protocols import ToolRequest
from tests.task_app.counting import CountingEnvironment, boards
from tests.task_app.playing import ON, act
from tests.task_app.sessions.test_recovery import app_on, post
from tests.task_app.test_service_process import task_app

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


def created(client, *, key=None):
    body = {"env_name": "crafter", "seed": 17, "config": {"step_rewards": ON, "text": "compact"}}
    return posted(client, "/env/create", body, key=key)["env_id"]


def stepped(client, env_id, calls, *, key=None):
    return posted(client, "/env/step", {"env_id": env_id, "tool_calls": calls}, key=key)


def test_after_a_kill_sessions_go_on_and_retries_get_the_answers_of_before(tmp_path, capsys):
    # Every second decision is written whole, so one of the two killed sessions has a decision after that.
    settings = {"TURNWISE_JOURNAL_SNAPSHOT_EVERY": "2"}
    with task_app("--state-dir", str(tmp_path), **settings) as (process, client):
        undisturbed, even, odd = created(client), created(client, key="create"), created(client)
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
        assert created(client, key="create") == even
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
