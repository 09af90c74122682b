"""Requests with an Idempotency-Key that a kill cuts short: their retries do nothing twice.

They do all of it where it could be undone, and else are told that the answer is lost. In the last test a task
app is killed before each statement of its database; clients that retry see no difference.
"""

import asyncio
import hashlib
import json
import shutil
from contextlib import contextmanager

import httpx
import pytest

from service_kit.problems import problem_response
from task_app.errors import SessionBusy
from task_app.plugins import default_plug_boards
from task_app.sessions.idempotency import Once, request_digest
from task_app.sessions.journal import NOT_CARRIED_OUT, WORK, Database, Work
from tests.task_app.counting import boards, rollout
from tests.task_app.playing import act
from tests.task_app.rollout_client import WAITING, accept, waiting_boards
from tests.task_app.sessions.test_idempotency import keyed
from tests.task_app.sessions.test_recovery import CRAFTER, app_on, killed, post

BOTH = boards()
BOTH.environments["crafter"] = default_plug_boards().environments["crafter"]
BOTH.policies["random"] = default_plug_boards().policies["random"]
SNAPSHOTS = pytest.mark.parametrize("env_name", ["crafter", "counting"], ids=["snapshots", "played again"])


@contextmanager
def unanswered(client, path, json, key="k"):
    """What is done within is due to this request, which the kill will leave without an answer."""
    sent = client.build_request("POST", path, json=json)
    digest = request_digest("POST", path.encode(), b"", sent.content)
    token = WORK.set(Work(key=key, digest=digest))
    yield
    WORK.reset(token)


async def created(client, env_name, **headers):
    return (await post(client, "/env/create", {"env_name": env_name, "seed": 3}, **headers))["env_id"]


def many(env_id, count):
    return {"steps": [{"env_id": env_id, "tool_calls": []}] * count}


async def turns(client, env_id, count=1, **headers):
    results = (await post(client, "/env/step_many", many(env_id, count), **headers))["results"]
    return [item["info"]["turn"] for item in results]


def living(env_id, decisions, policy):
    """A whole /rollout on a living session."""
    ops = ["agent", "env"] * decisions
    return {"run_id": "r", "env": {"env_id": env_id}, "policy": policy, "ops": ops, "on_done": "terminate"}


async def lost(client, path, json, key="k"):
    refused = await post(client, path, json, status=409, **keyed(key))
    return refused["code"] == "answer_lost"


@SNAPSHOTS
async def test_a_batch_is_undone_whole_and_done_by_its_retry(tmp_path, env_name):
    async with app_on(tmp_path / "s", BOTH) as client:
        env_id = await created(client, env_name)
        with unanswered(client, "/env/step_many", many(env_id, 5)):
            await turns(client, env_id, 5)
        left = killed(tmp_path / "s", tmp_path)
    async with app_on(left, BOTH) as client:
        assert await turns(client, env_id, 5, **keyed("k")) == [1, 2, 3, 4, 5]
        assert await turns(client, env_id, 5, **keyed("k")) == [1, 2, 3, 4, 5]
        assert await turns(client, env_id) == [6]


async def test_a_batch_is_undone_whole_also_where_a_snapshot_was_due_in_it(tmp_path):
    """A snapshot every 2 decisions: at the second and the fourth of five, the first of another request."""
    async with app_on(tmp_path / "0", BOTH, journal_snapshot_every=2) as client:
        env_id = await created(client, "crafter")
        assert await turns(client, env_id) == [1]
        with unanswered(client, "/env/step_many", many(env_id, 5)):
            await turns(client, env_id, 5)
        left = killed(tmp_path / "0", tmp_path)
    async with app_on(left, BOTH, journal_snapshot_every=2) as client:
        assert await turns(client, env_id, 5, **keyed("k")) == [2, 3, 4, 5, 6]
        again = killed(left, tmp_path / "more")
    async with app_on(again, BOTH, journal_snapshot_every=2) as client:
        assert await turns(client, env_id, 5, **keyed("k")) == [2, 3, 4, 5, 6]
        assert await turns(client, env_id) == [7]


@SNAPSHOTS
async def test_a_batch_under_way_stays_when_another_request_resets_its_session(tmp_path, env_name):
    async with app_on(tmp_path / "s", BOTH, journal_snapshot_every=2) as client:
        env_id = await created(client, env_name)
        with unanswered(client, "/env/step_many", many(env_id, 2)):
            await turns(client, env_id, 2)
        await post(client, "/env/reset", {"env_id": env_id})
        assert await turns(client, env_id, 3) == [1, 2, 3]
        left = killed(tmp_path / "s", tmp_path)
    async with app_on(left, BOTH, journal_snapshot_every=2) as client:
        assert await lost(client, "/env/step_many", many(env_id, 2))
        assert await turns(client, env_id) == [4]


async def test_a_reset_stays_once_another_request_comes_to_its_session(tmp_path):
    async with app_on(tmp_path / "s", BOTH, journal_snapshot_every=1) as client:
        env_id = await created(client, "counting")
        await turns(client, env_id, 2)
        reset = {"env_id": env_id, "seed": 4}
        with unanswered(client, "/env/reset", reset):
            await post(client, "/env/reset", reset)
        # The next request has come, and has not done anything yet.
        session = client._transport.app.state.services.environments.find(env_id)
        session.journal.ready(session)
        left = killed(tmp_path / "s", tmp_path)
    async with app_on(left, BOTH) as client:
        assert await lost(client, "/env/reset", reset)
        assert await turns(client, env_id) == [1]


def played_actions(answer):
    (trajectory,) = answer["trajectories"]
    return [step["tool_calls"] for step in trajectory["steps"]]


async def test_a_rollout_on_living_sessions_is_undone_whole_and_played_the_same_by_its_retry(tmp_path):
    """Four decisions with a snapshot every 2; the policy's chance goes back too."""
    async with app_on(tmp_path / "s", journal_snapshot_every=2) as client:
        env_id = await created(client, "crafter")
        made = {"policy_name": "random", "config": {"seed": 5}, "bound_env_id": env_id}
        policy_id = (await post(client, "/policy/create", made))["policy_id"]
        played = living(env_id, 4, {"policy_id": policy_id})
        with unanswered(client, "/rollout", played):
            first = await post(client, "/rollout", played)
        left = killed(tmp_path / "s", tmp_path)
    async with app_on(left, journal_snapshot_every=2) as client:
        again = await post(client, "/rollout", played, **keyed("k"))
        assert (first["ops_executed"], again["ops_executed"]) == (8, 8)
        assert played_actions(again) == played_actions(first)
        asked = await post(client, "/policy/step", {"policy_id": policy_id})
        assert (asked["meta"]["turn"], await turns(client, env_id)) == (5, [5])


async def test_a_batch_on_two_sessions_is_undone_in_both_or_in_none(tmp_path):
    """In none, because a client continues one of the sessions."""
    async with app_on(tmp_path / "s", BOTH) as client:
        one, two = await created(client, "crafter"), await created(client, "counting")
        batch = {"steps": many(one, 1)["steps"] + many(two, 1)["steps"]}
        with unanswered(client, "/env/step_many", batch):
            await post(client, "/env/step_many", batch)
        first = killed(tmp_path / "s", tmp_path)
        await turns(client, two)
        second = killed(tmp_path / "s", tmp_path / "second")
    async with app_on(first, BOTH) as client:
        results = (await post(client, "/env/step_many", batch, **keyed("k")))["results"]
        assert [item["info"]["turn"] for item in results] == [1, 1]
    async with app_on(second, BOTH) as client:
        assert await lost(client, "/env/step_many", batch)
        assert (await turns(client, one), await turns(client, two)) == ([2], [3])


async def test_a_request_before_one_that_stays_stays_too(tmp_path):
    """k1 did one, k2 the other two; k2's first session went on, so k2 stays in both, and k1 before it."""
    async with app_on(tmp_path / "s", BOTH) as client:
        one, two = await created(client, "crafter"), await created(client, "counting")
        batch = {"steps": many(one, 1)["steps"] + many(two, 1)["steps"]}
        with unanswered(client, "/env/step_many", many(two, 1), "k1"):
            await turns(client, two)
        with unanswered(client, "/env/step_many", batch, "k2"):
            await post(client, "/env/step_many", batch)
        await turns(client, one)
        left = killed(tmp_path / "s", tmp_path)
    async with app_on(left, BOTH) as client:
        assert await lost(client, "/env/step_many", many(two, 1), "k1")
        assert await lost(client, "/env/step_many", batch, "k2")
        assert (await turns(client, one), await turns(client, two)) == ([3], [3])


async def test_what_a_queued_rollout_does_is_due_to_its_own_request(tmp_path):
    """One place: a keyed /rollouts holds it, whose end starts a /rollout without a key on a session."""
    (first,), plugged = waiting_boards(1)
    async with app_on(tmp_path / "s", plugged, max_concurrent_rollouts=1) as client:
        env_id = await created(client, "counting")
        batch = {"rollouts": [rollout("r", **WAITING, limits={"max_decisions": 1})]}
        await post(client, "/rollouts", batch, status=202, **keyed("of another"))
        playing = asyncio.create_task(post(client, "/rollout", living(env_id, 2, {"policy_name": "planned"})))
        while client._transport.app.state.services.runner.unfinished()["queued"] < 1:
            await asyncio.sleep(0)
        first.go.set()
        await playing
        left = killed(tmp_path / "s", tmp_path)
    async with app_on(left, plugged) as client:
        assert await turns(client, env_id) == [3]


async def test_an_answer_that_is_too_large_to_keep_leaves_what_was_done(tmp_path):
    async with app_on(tmp_path / "s", BOTH, max_idempotency_bytes=1_024) as client:
        env_id = await created(client, "crafter")
        assert await turns(client, env_id, 3, **keyed("k")) == [1, 2, 3]
        left = killed(tmp_path / "s", tmp_path)
    async with app_on(left, BOTH) as client:
        assert await lost(client, "/env/step_many", many(env_id, 3))
        assert await turns(client, env_id) == [4]


async def test_rollouts_are_accepted_again_by_the_next_process(tmp_path):
    """They ended with the process before, so its answer would be about nothing."""
    policies, plugged = waiting_boards(2)
    batch = {"rollouts": [rollout("r", **WAITING)]}
    async with app_on(tmp_path / "s", plugged) as client:
        told = await post(client, "/rollouts", batch, status=202, **keyed("k"))
        assert await post(client, "/rollouts", batch, status=202, **keyed("k")) == told
        await post(client, "/run/abort", {"run_id": "over"}, **keyed("a"))
        left = killed(tmp_path / "s", tmp_path)
    async with app_on(left, plugged) as client:
        again = await client.post("/rollouts", json=batch, headers=keyed("k"))
        assert (again.status_code, "idempotency-replayed" in again.headers) == (202, False)
        assert again.json()["accepted"] == ["r"]
        assert again.json()["instance_id"] != told["instance_id"]
        assert (await accept(client, *batch["rollouts"])).json()["known"] == ["r"]
        aborted = await client.post("/run/abort", json={"run_id": "over"}, headers=keyed("a"))
        assert "idempotency-replayed" not in aborted.headers
        for policy in policies:
            policy.go.set()


@pytest.mark.parametrize(("does_something", "calls"), [(False, 2), (True, 1)])
async def test_a_refusal_after_something_was_done_does_not_free_the_key(does_something, calls):
    """A 503 says that nothing was done, and to ask again; the changes of sessions know better."""
    asked, database = [], Database(None, most=9, most_bytes=9_999, most_s=9.0)
    database.open()

    async def app(scope, receive, send):
        asked.append(scope["path"])
        if does_something:
            database.record(
                "env_1", [("DELETE FROM steps WHERE session = ?", ("env_1",))], NOT_CARRIED_OUT, whole=True
            )
        await problem_response(SessionBusy("it is busy"))(scope, receive, send)

    once = Once(app, database=database)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(once), base_url="http://t") as client:
        found = [(await client.post("/rollout", headers=keyed("k"))).status_code for _ in range(2)]
    database.close()
    assert (len(asked), found) == (calls, [503, 409 if does_something else 503])


def digest_folder(folder):
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


class Kills:
    """Before every statement that SQLite carries out it copies the folder, wherever that is something new.

    A copy is what a kill would have left.
    """

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
    """Requests, each with a key, that name the sessions which earlier ones made.

    A task app on each copy is sent all of them again, and gives the answers of an undisturbed one.
    """

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
    async with app_on(tmp_path / "s", BOTH, journal_snapshot_every=3) as client:
        kills = Kills(tmp_path / "s", tmp_path)
        client._transport.app.state.services.database.connection.set_trace_callback(kills)
        story = Story(client)
        expected = await story.tell()
        kills("the end")
    # Each request is one transaction, with its answer.
    assert kills.statements > len(kills.left) == len(story.answers) + 1
    for number, left in enumerate(kills.left):
        async with app_on(left, BOTH, journal_snapshot_every=3) as client:
            again = Story(client)
            assert await again.tell() == expected
        replayed = ["idempotency-replayed" in answer.headers for answer in again.answers]
        assert replayed == [index < number for index in range(len(replayed))]
        same = [one.content == other.content for one, other in zip(story.answers, again.answers, strict=True)]
        assert all(same[:number])
