"""Whatever is done to sessions, whenever the task app is killed: they go on as if nothing had happened."""

import asyncio
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from task_app.environments.crafter.environment import CrafterConfig, CrafterEnvironment
from task_app.plugins import default_plug_boards
from task_app.protocols import ToolRequest
from tests.task_app.counting import CountingEnvironment, boards
from tests.task_app.sessions.test_recovery import app_on, post

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


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(DOINGS, max_size=12), st.sampled_from([1, 2, 5]))
def test_killed_or_not_sessions_are_those_of_one_process(doings, every):
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(lived(doings, every, Path(folder)))
