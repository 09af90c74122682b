"""/branch: children that go on from here, each on its own; all of them, or none."""

from task_app.errors import JournalFailed
from task_app.plugins import default_plug_boards
from task_app.sessions.registry import Sessions
from task_app.sessions.sessions import PolicySession
from tests.task_app.counting import running_app
from tests.task_app.fake_inference import calling, fake_inference
from tests.task_app.playing import ON, TO_THE_TREE, decision, new_env, new_policy, post, refused, step


async def test_children_and_parent_go_on_alike_and_apart():
    async with running_app(default_plug_boards()) as client:
        env_id = await new_env(client, step_rewards=ON)
        await step(client, env_id, *TO_THE_TREE)
        answer = await post(client, "/branch", env_ids=[env_id], num_children=3)
        children = answer["env_branches"][env_id]
        assert answer["policy_branches"] == {}
        assert len({env_id, *children}) == 4
        # The first child walks away before the others move, which does not move them.
        await step(client, children[0], "move_left", "noop")
        others = (env_id, *children[1:])
        one, *rest = [await step(client, other, "move_down", "move_right", "do") for other in others]
        assert rest == [one, one]
        assert (one["info"]["turn"], one["step_idx"]) == (2, 7)
        assert one["metadata"]["decision_rewards"]["ach_delta"] == 1
        assert one["metadata"]["decision_rewards"]["unique_delta"] == 0


async def test_policies_are_bound_to_the_children_of_their_environment_or_to_it():
    async with running_app(default_plug_boards()) as client:
        env_id, other = await new_env(client), await new_env(client, seed=2)
        bound = await new_policy(client, bound_env_id=env_id, config={"seed": 1, "step_rewards": ON})
        alone = await new_policy(client, bound_env_id=other)
        answer = await post(
            client, "/branch", env_ids=[env_id], policy_ids=[bound, alone], num_children=2
        )  # fmt: skip
        children, twins = answer["env_branches"][env_id], answer["policy_branches"][bound]
        calls, _ = await decision(client, bound)
        told = await post(client, "/env/step", env_id=env_id, tool_calls=calls)
        for child, twin in zip(children, twins, strict=True):
            assert (await decision(client, twin))[0] == calls
            assert await post(client, "/env/step", env_id=child, tool_calls=calls) == told
            _, meta = await decision(client, twin)
            assert meta["decision_rewards"] == told["metadata"]["decision_rewards"]
        for twin in answer["policy_branches"][alone]:
            taken = await post(client, "/policy/snapshot", policy_id=twin)
            assert taken["info"]["bound_env_id"] == other


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


async def test_a_policy_whose_environment_is_gone_is_not_branched():
    async with running_app(default_plug_boards()) as client:
        env_id = await new_env(client)
        policy_id = await new_policy(client, bound_env_id=env_id)
        await post(client, "/env/terminate", env_id=env_id)
        answer = await refused(client, "/branch", policy_ids=[policy_id])
        assert answer[:2] == (404, "unknown_id")
        assert env_id in answer[3]


async def test_when_one_child_cannot_be_kept_none_is():
    told: list[str] = []

    def opened(session_id: str, session: PolicySession) -> None:
        told.append(session_id)
        if len(told) == 3:
            raise JournalFailed("the disk is full")

    async with running_app(default_plug_boards()) as client:
        services = client._transport.app.state.services
        services.policies = Sessions("policy", capacity=9, idle_s=99.0, on_new=opened)
        env_id = await new_env(client)
        policy_id = await new_policy(client, bound_env_id=env_id)
        body = {"env_ids": [env_id], "policy_ids": [policy_id], "num_children": 2}
        assert (await refused(client, "/branch", **body))[:2] == (507, "journal_failed")
        assert (len(services.environments), len(services.policies)) == (1, 1)
        await post(client, "/branch", **body)
        assert (len(services.environments), len(services.policies)) == (3, 3)


async def test_branches_of_nothing_are_nothing():
    async with running_app() as client:
        assert await post(client, "/branch") == {"env_branches": {}, "policy_branches": {}}
