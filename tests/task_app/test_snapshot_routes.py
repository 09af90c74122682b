"""Snapshots and branches of sessions: the same future, anywhere; all children, or none."""

import base64
import json

import pytest

from task_app.errors import JournalFailed
from task_app.plugins import default_plug_boards
from task_app.sessions.registry import Sessions
from task_app.sessions.sessions import PolicySession
from task_app.snapshots.envelope import open_envelope, seal, to_text
from tests.task_app.counting import boards, running_app
from tests.task_app.fake_inference import calling, fake_inference, tokens
from tests.task_app.playing import ON, act, decision, new_env, new_policy, post, refused, step

MOST = 1 << 20


async def test_the_answer_has_the_fields_that_others_know_and_says_what_path_is(real):
    made = await post(real, "/env/create", env_name="crafter", rl_run_id="run-7")
    taken = await post(real, "/env/snapshot", env_id=made["env_id"])
    again = await post(real, "/env/restore", snapshot=taken["snapshot"])
    retaken = await post(real, "/env/snapshot", env_id=again["env_id"])
    assert taken["path"] is None
    assert "path is null" in taken["notes"][0]
    assert taken["rl_run_id"] == retaken["rl_run_id"] == "run-7"
    assert taken["size"] == len(taken["snapshot"]) * 3 // 4 - taken["snapshot"].count("=")
    assert taken["size"] < 6_000
    assert retaken["snapshot"] == taken["snapshot"], "equal sessions have equal snapshots"


async def test_only_so_many_are_held_by_id_and_a_value_is_never_too_old():
    async with running_app(default_plug_boards(), max_snapshots_held=1) as client:
        env_id = await new_env(client)
        first, second = [await post(client, "/env/snapshot", env_id=env_id) for _ in range(2)]
        status, code, where, told = await refused(client, "/env/restore", snapshot_id=first["snapshot_id"])
        assert (status, code, where) == (404, "unknown_id", "snapshot_id")
        assert "only 1 are held" in told
        await post(client, "/env/restore", snapshot_id=second["snapshot_id"])
        await post(client, "/env/restore", snapshot=first["snapshot"])
    async with running_app(default_plug_boards(), max_snapshots_bytes=1_024) as client:
        taken = await post(client, "/env/snapshot", env_id=await new_env(client))
        assert taken["snapshot_id"] is None
        assert taken["notes"][1] == "snapshot_id is null: it is too large to be held"


def changed(snapshot: bytes, **head) -> str:
    """The snapshot with other facts in its head, and a good checksum."""
    before, state = open_envelope("environment", snapshot, at_most_bytes=MOST)
    return to_text(seal("environment", {**before, **head}, state, at_most_bytes=MOST))


async def test_what_cannot_be_restored_is_refused_in_words(real):
    text = (await post(real, "/env/snapshot", env_id=await new_env(real)))["snapshot"]
    policy = (await post(real, "/policy/snapshot", policy_id=await new_policy(real)))["snapshot"]
    data = base64.b64decode(text)
    long = {"env_name": "crafter", "config": {"length": 7}}
    for body, code, told in (
        ({}, "invalid_request", "give either snapshot or snapshot_id"),
        ({"snapshot": text, "snapshot_id": "s"}, "invalid_request", "give either"),
        ({"snapshto": text}, "invalid_request", "Did you mean 'snapshot'?"),
        ({"snapshot": "*"}, "snapshot_refused", "not base64"),
        ({"snapshot": text[:400]}, "snapshot_refused", "cut short"),
        ({"snapshot": to_text(data[:-9])}, "snapshot_refused", "cut short"),
        ({"snapshot": policy}, "snapshot_refused", "/policy/restore takes it"),
        ({"snapshot": changed(data, turn=-1)}, "snapshot_refused", "snapshot.turn"),
        ({"snapshot": changed(data, seed="x")}, "snapshot_refused", "snapshot.seed"),
        ({"snapshot": changed(data, turns=1)}, "snapshot_refused", "Did you mean 'turn'?"),
        ({"snapshot": changed(data, env={"env_name": "maze"})}, "unknown_name", "known: babyai, "),
        ({"snapshot": changed(data, env=long)}, "snapshot_refused", "config.length is 7"),
    ):
        status, found, where, sentence = await refused(real, "/env/restore", **body)
        assert (status, found) == (422, code), sentence
        assert told in sentence
        assert where is not None
    assert (await refused(real, "/policy/restore", snapshot=text))[3].endswith("/env/restore takes it")


async def test_another_task_app_without_the_environment_says_so():
    async with running_app(default_plug_boards()) as client:
        text = (await post(client, "/env/snapshot", env_id=await new_env(client)))["snapshot"]
    async with running_app() as client:
        answer = await refused(client, "/env/restore", snapshot=text)
    assert answer[:3] == (422, "unknown_name", "snapshot.env.env_name")


async def test_a_plug_in_that_cannot_tell_its_state_is_named(client):
    made = await post(client, "/env/create", env_name="counting")
    for path, body in (
        ("/env/snapshot", {"env_id": made["env_id"]}),
        ("/branch", {"env_ids": [made["env_id"]]}),
        ("/policy/snapshot", {"policy_id": await new_policy(client, "planned")}),
    ):
        status, code, _, told = await refused(client, path, **body)
        assert (status, code) == (422, "not_restorable")
        assert "has no snapshot() and restore()" in told


@pytest.mark.parametrize(
    ("name", "config"),
    [("random", {"seed": 3}), ("crafter_teacher", {"memory": True, "epsilon": 0.5}), ("crafter_teacher", {})],
)
async def test_a_restored_policy_decides_like_the_original(name, config):
    async def played(client, policy_id, env_id):
        told = []
        for _ in range(6):
            calls, meta = await decision(client, policy_id)
            told.append((calls, meta, await post(client, "/env/step", env_id=env_id, tool_calls=calls)))
        return told

    async with running_app(default_plug_boards()) as client:
        env_id = await new_env(client)
        policy_id = await new_policy(client, name, bound_env_id=env_id, config={**config, "step_rewards": ON})
        await played(client, policy_id, env_id)
        env = await post(client, "/env/snapshot", env_id=env_id)
        policy = await post(client, "/policy/snapshot", policy_id=policy_id)
        assert policy["info"] == {"policy_name": name, "turn": 6, "bound_env_id": env_id}
        original = await played(client, policy_id, env_id)
    async with running_app(default_plug_boards()) as client:
        twin = (await post(client, "/env/restore", snapshot=env["snapshot"]))["env_id"]
        told = await refused(client, "/policy/restore", snapshot=policy["snapshot"])
        assert told[:3] == (404, "unknown_id", "bound_env_id")
        made = await post(client, "/policy/restore", snapshot=policy["snapshot"], bound_env_id=twin)
        assert (made["turn"], made["bound_env_id"]) == (6, twin)
        assert await played(client, made["policy_id"], twin) == original
    assert original[0][1]["turn"] == 7
    assert original[0][1]["decision_rewards"]["turn"] == 6


async def test_a_restored_policy_brings_its_switches_to_its_environment(real):
    env_id, other, third = [await new_env(real) for _ in range(3)]
    policy_id = await new_policy(real, bound_env_id=env_id, config={"step_rewards": ON})
    taken = await post(real, "/policy/snapshot", policy_id=policy_id)
    assert "decision_rewards" not in (await step(real, other, "noop"))["metadata"]
    await post(real, "/policy/restore", snapshot=taken["snapshot"], bound_env_id=other)
    assert "decision_rewards" in (await step(real, other, "noop"))["metadata"]
    sparse = {"enabled": True, "mode": "env_sparse"}
    await new_policy(real, bound_env_id=third, config={"step_rewards": sparse})
    body = {"snapshot": taken["snapshot"], "bound_env_id": third}
    assert (await refused(real, "/policy/restore", **body))[:2] == (422, "invalid_request")


@pytest.mark.parametrize("seeded", [{"config": {"seed": 9}}, {"seed": 9}])
async def test_a_model_goes_on_with_its_next_seed_and_no_key_is_in_its_snapshot(seeded):
    key = "a-secret-inference-key"
    first = tokens([1, 2], 0, [3])
    messages = [{"role": "user", "content": "?"}]
    async with fake_inference(calling("a", **first)) as server, running_app(boards()) as client:
        config = {"inference_url": server.url, "model": "m"} | seeded.get("config", {})
        body = {"config": config, "inference_key": key}
        policy_id = await new_policy(client, "openai", **{**seeded, **body})
        await decision(client, policy_id, observation={"messages": messages})
        taken = await post(client, "/policy/snapshot", policy_id=policy_id)
        await decision(client, policy_id, observation={"messages": messages})
        body = {"snapshot": taken["snapshot"], "inference_key": "another-inference-key"}
        twin = (await post(client, "/policy/restore", **body))["policy_id"]
        await decision(client, twin, observation={"messages": messages})
        asked = list(zip(server.bodies, server.headers, strict=True))
    head, _ = open_envelope("policy", base64.b64decode(taken["snapshot"]), at_most_bytes=MOST)
    assert key not in json.dumps(head)
    (one, _), (two, old), (three, new) = asked
    assert one["seed"] != two["seed"] == three["seed"], "the second decision's seed, both times"
    assert three["return_token_ids"] is True, "its conversation is new to the gateway"
    assert old["x-turnwise-rollout"] != new["x-turnwise-rollout"]
    assert (old["authorization"], new["authorization"]) == (f"Bearer {key}", "Bearer another-inference-key")


async def test_an_unbound_policy_keeps_the_environment_that_words_its_prompts(real):
    env = {"env_name": "crafter", "config": {"max_actions": 3}}
    policy_id = await new_policy(real, env=env, config={"seed": 1})
    taken = await post(real, "/policy/snapshot", policy_id=policy_id)
    twin = (await post(real, "/policy/restore", snapshot_id=taken["snapshot_id"]))["policy_id"]
    seen = {"observation": {"text": "you see grass", "data": {}}}
    assert await decision(real, twin, **seen) == await decision(real, policy_id, **seen)
    assert await decision(real, twin, dry_run=True, **seen) == await decision(
        real, policy_id, dry_run=True, **seen
    )


async def test_a_session_that_ended_is_restored_ended(real):
    env_id = await new_env(real, length=2)
    assert (await step(real, env_id, "noop", "noop"))["done"]
    taken = await post(real, "/env/snapshot", env_id=env_id)
    made = await post(real, "/env/restore", snapshot=taken["snapshot"])
    assert made["info"]["done"] is True
    body = {"env_id": made["env_id"], "tool_calls": act("noop")}
    assert (await refused(real, "/env/step", **body))[:2] == (409, "episode_over")
    await post(real, "/env/reset", env_id=made["env_id"])
    assert not (await step(real, made["env_id"], "noop"))["done"]


async def test_policies_are_bound_to_the_children_of_their_environment_or_to_it(real):
    env_id, other = await new_env(real), await new_env(real, seed=2)
    policies = [await new_policy(real, bound_env_id=bound) for bound in (env_id, other)]
    made = await post(real, "/branch", env_ids=[env_id], policy_ids=policies, num_children=2)
    twins = [[*made["policy_branches"][policy]] for policy in policies]
    taken = [[await post(real, "/policy/snapshot", policy_id=one) for one in pair] for pair in twins]
    bound = [[one["info"]["bound_env_id"] for one in pair] for pair in taken]
    assert bound == [made["env_branches"][env_id], [other, other]]


async def test_the_child_of_a_model_asks_with_the_key_of_its_parent_in_a_conversation_of_its_own():
    messages = [{"role": "user", "content": "?"}]
    async with fake_inference(calling("a")) as server, running_app() as client:
        config = {"inference_url": server.url, "model": "m", "seed": 9}
        key = "a-secret-inference-key"
        policy_id = await new_policy(client, "openai", config=config, inference_key=key)
        answer = await post(client, "/branch", policy_ids=[policy_id])
        (child,) = answer["policy_branches"][policy_id]
        for asked in (policy_id, child):
            await decision(client, asked, observation={"messages": messages})
        first, second = server.headers
    assert server.bodies[0]["seed"] == server.bodies[1]["seed"]
    assert first["authorization"] == second["authorization"] == f"Bearer {key}"
    assert first["x-turnwise-rollout"] != second["x-turnwise-rollout"]


async def test_what_cannot_be_branched_is_told_and_nothing_is_made():
    async with running_app(default_plug_boards(), max_sessions=5) as client:
        env_id = await new_env(client)
        policy_id = await new_policy(client)
        for body, status, code, where, told in (
            ({"env_ids": [env_id, "env_x", "env_y"]}, 404, "unknown_id", "env_ids", "env_x, env_y"),
            ({"env_ids": [env_id], "policy_ids": ["p"]}, 404, "unknown_id", "policy_ids", "no session 'p'"),
            ({"env_ids": [env_id, env_id]}, 422, "invalid_request", "env_ids", "is named twice"),
            (
                {"env_ids": [env_id], "num_children": 11},
                422, "invalid_request", "num_children", "num_children is 11, max_branches 10",
            ),
            ({"env_ids": [env_id], "num_children": 0}, 422, "invalid_request", "num_children", "0"),
            ({"env_idz": [env_id]}, 422, "invalid_request", "env_idz", "Did you mean 'env_ids'?"),
            (
                {"env_ids": [env_id], "num_children": 5},
                429, "capacity_reached", None, "1 are open, and 5 more do not fit",
            ),
            (
                {"env_ids": [env_id], "policy_ids": [policy_id], "num_children": 5},
                429, "capacity_reached", None, "5 more do not fit",
            ),
        ):  # fmt: skip
            answer = await refused(client, "/branch", **body)
            assert answer[:3] == (status, code, where), answer
            assert told in answer[3]
        # Four places were free, and are: nothing that was refused made anything.
        answer = await post(client, "/branch", env_ids=[env_id], policy_ids=[policy_id], num_children=4)
        assert len(answer["env_branches"][env_id]) == len(answer["policy_branches"][policy_id]) == 4


async def test_a_policy_whose_environment_is_gone_is_not_branched(real):
    env_id = await new_env(real)
    policy_id = await new_policy(real, bound_env_id=env_id)
    await post(real, "/env/terminate", env_id=env_id)
    answer = await refused(real, "/branch", policy_ids=[policy_id])
    assert answer[:2] == (404, "unknown_id")
    assert env_id in answer[3]


async def test_when_one_child_cannot_be_kept_none_is(real):
    told: list[str] = []

    def opened(session_id: str, session: PolicySession) -> None:
        told.append(session_id)
        if len(told) == 3:
            raise JournalFailed("the disk is full")

    services = real._transport.app.state.services
    services.policies = Sessions("policy", capacity=9, idle_s=99.0, on_new=opened)
    env_id = await new_env(real)
    policy_id = await new_policy(real, bound_env_id=env_id)
    body = {"env_ids": [env_id], "policy_ids": [policy_id], "num_children": 2}
    assert (await refused(real, "/branch", **body))[:2] == (507, "journal_failed")
    assert (len(services.environments), len(services.policies)) == (1, 1)
    await post(real, "/branch", **body)
    assert (len(services.environments), len(services.policies)) == (3, 3)
