"""A task app is killed before each statement of its database; clients that retry see no difference.

The folder is copied before every statement that SQLite carries out: a copy is what a kill would have left.
A task app on each copy is sent all requests again, with their keys, and gives the answers of an undisturbed
one.
"""

import hashlib
import json
import shutil
from dataclasses import replace

from task_app.plugins import default_plug_boards
from tests.task_app.counting import boards
from tests.task_app.playing import act
from tests.task_app.sessions.test_idempotency import keyed
from tests.task_app.sessions.test_killed_requests import living
from tests.task_app.sessions.test_recovery import CRAFTER, app_on

DEFAULT = default_plug_boards()
PLUGGED = replace(DEFAULT, environments={**DEFAULT.environments, **boards().environments})


def digest_folder(folder):
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


class Kills:
    """Keeps what a kill would leave, wherever that is something new."""

    def __init__(self, folder, root):
        self._folder, self._root = folder, root
        self._last = None
        self.statements, self.left = 0, []

    def __call__(self, statement):
        self.statements += 1
        digest = digest_folder(self._folder)
        if digest != self._last:
            self._last = digest
            copy = self._root / f"left{len(self.left)}"
            shutil.copytree(self._folder, copy)
            self.left.append(copy)


class Story:
    """Requests, each with a key, that name the sessions which earlier ones made."""

    def __init__(self, client):
        self._client = client
        self._ids = {}
        self.answers = []

    async def send(self, path, body):
        """Its answer. `$name`, here and there, is the id of the session that was made under this name."""
        text = json.dumps(body)
        for name, session_id in self._ids.items():
            text = text.replace(f"${name}", session_id)
        headers = keyed(str(len(self.answers))) | {"Content-Type": "application/json"}
        answer = await self._client.post(path, content=text, headers=headers)
        assert answer.status_code == 200, (path, answer.text)
        self.answers.append(answer)
        told = answer.text
        for name, session_id in self._ids.items():
            told = told.replace(session_id, f"${name}")
        return json.loads(told)

    async def make(self, name, path, body):
        made = await self.send(path, body)
        self._ids[name] = made["env_id" if path.startswith("/env") else "policy_id"]

    async def tell(self):
        """All that happens, and what can be compared of it."""
        await self.make("crafter", "/env/create", CRAFTER)
        await self.make("counting", "/env/create", {"env_name": "counting", "seed": 3})
        await self.make(
            "policy",
            "/policy/create",
            {"policy_name": "random", "config": {"seed": 5}, "bound_env_id": "$crafter"},
        )
        both = [{"env_id": f"${name}", "tool_calls": act("noop")} for name in ("crafter", "counting")] * 3
        told = [
            await self.send("/env/step", {"env_id": "$crafter", "tool_calls": act("move_right", "do")}),
            await self.send("/env/step_many", {"steps": both}),
            await self.send("/rollout", living("$crafter", 2, {"policy_id": "$policy"})),
            await self.send("/env/reset", {"env_id": "$counting", "seed": 8}),
            (await self.send("/policy/step", {"policy_id": "$policy"}))["tool_calls"],
            await self.send("/env/step", {"env_id": "$counting", "tool_calls": []}),
            await self.send("/env/terminate", {"env_id": "$counting"}),
            await self.send("/env/step", {"env_id": "$crafter", "tool_calls": act("do")}),
        ]
        played = told[2].pop("trajectories")
        told[2] = [step["tool_calls"] for step in played[0]["steps"]]
        return told


async def test_whenever_it_is_killed_repeated_requests_have_the_answers_of_an_undisturbed_one(tmp_path):
    async with app_on(tmp_path / "s", PLUGGED, journal_snapshot_every=3) as client:
        kills = Kills(tmp_path / "s", tmp_path)
        client._transport.app.state.services.database.connection.set_trace_callback(kills)
        story = Story(client)
        expected = await story.tell()
        kills("the end")
    assert kills.statements > len(kills.left) == len(story.answers) + 1
    for number, left in enumerate(kills.left):
        async with app_on(left, PLUGGED, journal_snapshot_every=3) as client:
            again = Story(client)
            assert await again.tell() == expected
        replayed = ["idempotency-replayed" in answer.headers for answer in again.answers]
        assert replayed == [index < number for index in range(len(replayed))]
        same = [one.content == other.content for one, other in zip(story.answers, again.answers, strict=True)]
        assert all(same[:number])
