"""A rollout that fails is recorded with its code, and never touches another."""

from task_app.errors import PolicyUnavailable
from tests.task_app.counting import PlannedPolicy, add, boards, rollout, running_app
from tests.task_app.fake_inference import calling, completion, fake_inference, raw, status
from tests.task_app.rollout_client import accept, wait_for_all


async def test_one_misbehaving_rollout_is_recorded_and_the_others_finish():
    plug_boards = boards(
        broken=lambda: PlannedPolicy(ZeroDivisionError("oh")),
        down=lambda: PlannedPolicy(add("a"), PolicyUnavailable("gone")),
    )
    async with running_app(plug_boards) as client:
        await accept(
            client,
            rollout("broken", policy={"policy_name": "broken"}),
            rollout("down", policy={"policy_name": "down"}),
            rollout("boom", policy={"policy_name": "planned", "config": {"names": ["boom"]}}),
            rollout("good"),
        )
        found = await wait_for_all(client, 4)
    failures = {name: one.failure for name, one in found.items() if one.failure}
    assert {name: failure.code for name, failure in failures.items()} == {
        "broken": "critical_error",
        "down": "inference_unavailable",
        "boom": "critical_error",
    }
    assert failures["down"].decisions_done == 1
    assert found["good"].status == "finished"
    assert all(one.trajectory is None for name, one in found.items() if name != "good")


async def test_failures_of_the_inference_server_are_recorded_with_their_code():
    def asking(rollout_id, url, **config):
        config = {"inference_url": url, "model": "m", "max_attempts": 1, **config}
        return rollout(rollout_id, policy={"policy_name": "openai", "config": config})

    async with fake_inference() as down:
        no_server = down.url
    talk = completion({"content": "I will think about it."})
    async with (
        fake_inference(silent=True) as slow,
        fake_inference(raw("<html>")) as nonsense,
        fake_inference(talk) as talker,
        running_app() as client,
    ):
        await accept(
            client,
            asking("down", no_server),
            asking("slow", slow.url, request_timeout_s=0.05),
            {**asking("late", slow.url), "limits": {"timeout_s": 0.1}},
            asking("nonsense", nonsense.url),
            {**asking("talker", talker.url), "limits": {"max_invalid_decisions": 3}},
        )
        found = await wait_for_all(client, 5)
    codes = {name: one.failure.code for name, one in found.items() if one.failure}
    assert codes == {
        "down": "inference_unavailable",
        "slow": "inference_unavailable",
        "late": "deadline_exceeded",
        "nonsense": "inference_protocol",
    }
    talked = found["talker"].trajectory
    assert talked is not None
    assert (talked.stop_reason, len(talked.steps)) == ("invalid_action", 3)


async def test_an_outage_that_meets_the_deadline_fails_and_an_answer_ends_the_outage():
    def asking(rollout_id, url):
        config = {"inference_url": url, "model": "m", "max_attempts": 100}
        return rollout(
            rollout_id,
            env={"env_name": "counting", "config": {"length": 1_000_000}},
            policy={"policy_name": "openai", "config": config},
            limits={"timeout_s": 1.0, "max_decisions": 10_000},
        )

    async with (
        fake_inference(calling("a"), status(503, {})) as out,
        fake_inference(status(503, {}), calling("a")) as back,
        running_app() as client,
    ):
        await accept(client, asking("out", out.url), asking("back", back.url))
        found = await wait_for_all(client, 2)
    failure = found["out"].failure
    assert failure is not None
    assert (failure.code, failure.decisions_done) == ("inference_unavailable", 1)
    assert "status 503" in failure.detail
    answered = found["back"].trajectory
    assert answered is not None
    assert answered.stop_reason == "deadline"
