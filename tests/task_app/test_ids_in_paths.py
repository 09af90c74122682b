"""POST /env/{env_id}/step and the others with the id in the path: what the routes without it do."""

import pytest

from task_app.plugins import default_plug_boards
from tests.task_app.counting import running_app
from tests.task_app.playing import act, decision, new_env, new_policy, post, refused

ENV, POLICY = ("step", "reset", "snapshot", "terminate"), ("step", "snapshot", "terminate")
PATHS = [*(("env", act) for act in ENV), *(("policy", act) for act in POLICY)]
MORE = {
    ("env", "step"): {"tool_calls": act("noop")},
    ("policy", "step"): {"observation": {"text": "x"}},
}


async def made(client):
    return {
        "env": await new_env(client),
        "policy": await new_policy(client, env={"env_name": "crafter"}, config={"seed": 1}),
    }


@pytest.mark.parametrize(("kind", "what"), PATHS)
async def test_the_id_may_stand_in_the_path_and_again_in_the_body_but_not_another_one(kind, what):
    async with running_app(default_plug_boards()) as client:
        ids = await made(client)
        path, key, more = f"/{kind}/{ids[kind]}/{what}", f"{kind}_id", MORE.get((kind, what), {})
        told = await refused(client, path, **more, **{key: f"{kind}_other"})
        assert told[:3] == (422, "invalid_request", key)
        assert f"'{kind}_other'" in told[3], "found"
        assert ids[kind] in told[3], "allowed"
        await post(client, path, **more, **{key: ids[kind]})
        gone = await client.post(path, json=more)
        assert gone.status_code == (404 if what == "terminate" else 200)


async def test_the_answers_are_those_of_the_routes_without_an_id_in_the_path():
    async with running_app(default_plug_boards()) as client:
        one, other = await made(client), await made(client)
        for _ in range(2):
            by_path = await post(client, f"/env/{one['env']}/step", **MORE["env", "step"])
            assert by_path == await post(client, "/env/step", env_id=other["env"], **MORE["env", "step"])
        reset = await post(client, f"/env/{one['env']}/reset", seed=5)
        assert reset == await post(client, "/env/reset", env_id=other["env"], seed=5)
        for _ in range(2):
            by_path = await post(client, f"/policy/{one['policy']}/step", **MORE["policy", "step"])
            by_path["meta"].pop("policy_s")
            expected = await decision(client, other["policy"], **MORE["policy", "step"])
            assert (by_path["tool_calls"], by_path["meta"]) == expected


async def test_what_needs_no_body_is_carried_out_without_one():
    async with running_app(default_plug_boards()) as client:
        ids = await made(client)
        for kind, what in (
            ("env", "reset"),
            ("env", "snapshot"),
            ("policy", "snapshot"),
            ("env", "terminate"),
        ):
            assert (await client.post(f"/{kind}/{ids[kind]}/{what}")).status_code == 200


async def test_a_misspelt_key_is_refused_there_too():
    async with running_app(default_plug_boards()) as client:
        ids = await made(client)
        told = await refused(client, f"/env/{ids['env']}/reset", sed=7)
    assert told[0] == 422
    assert "Did you mean 'seed'" in told[3]


@pytest.mark.parametrize("body", [b"", b"null", b"{}"])
async def test_a_body_that_says_nothing_may_be_absent_null_or_empty(body):
    async with running_app(default_plug_boards()) as client:
        env_id = await new_env(client)
        for path in (f"/env/{env_id}/reset", f"/env/{env_id}/snapshot", "/openenv/crafter/reset"):
            answer = await client.post(path, content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == 200, answer.text
