"""Snapshots that an episode takes of itself: others play on from before a decision."""

import asyncio

import pytest

from shared_schemas.rollouts import EnvSpec
from task_app.errors import DeadlineExceeded
from task_app.plugins import default_plug_boards
from task_app.rollouts.assembly import SnapshotTaker
from tests.task_app.counting import CountingConfig, boards, running_app
from tests.task_app.counting import rollout as counted
from tests.task_app.playing import post
from tests.task_app.rollout_client import accept
from tests.task_app.slow import Gates, SlowEnvironment
from tests.task_app.snapshots.test_starts import played, rollout

SEEDED = {"seed": 17}


def find_step(found, turn):
    return found["trajectory"]["steps"][turn - 1]


async def test_the_steps_that_were_asked_for_carry_the_world_before_them():
    async with running_app(default_plug_boards()) as client:
        plain, kept = await played(
            client, rollout("plain", SEEDED), rollout("kept", SEEDED, snapshot_turns=[2, 5])
        )
        taken = {step["turn"]: step.pop("snapshot") for step in kept["trajectory"]["steps"]}
        assert {turn for turn, text in taken.items() if text} == {2, 5}
        assert all(step.pop("snapshot") is None for step in plain["trajectory"]["steps"])
        assert kept["trajectory"] == plain["trajectory"], "looking changes nothing"


async def test_an_episode_from_such_a_snapshot_begins_in_what_its_parent_saw_there():
    async with running_app(default_plug_boards()) as client:
        [parent] = await played(client, rollout("parent", SEEDED, snapshot_turns=[4]))
        start = {
            "snapshot": find_step(parent, 4)["snapshot"],
            "parent_rollout_id": "parent",
            "parent_turn": 3,
        }
        [branch] = await played(client, rollout("branch", start, limits={"max_decisions": 2}))
        before, seen = find_step(parent, 4)["observation_data"], find_step(branch, 1)["observation_data"]
        assert seen == before, "its messages too, with the history of three decisions"
        # The parent's own calls bring the parent's own future, by hand.
        restored = await post(client, "/env/restore", snapshot=find_step(parent, 4)["snapshot"])
        assert (restored["step_idx"], restored["info"]["seed"]) == (
            sum(len(step["env_rewards"]) for step in parent["trajectory"]["steps"][:3]), 17,
        )  # fmt: skip
        for turn in (4, 5):
            decided = find_step(parent, turn)
            told = await post(
                client, "/env/step", env_id=restored["env_id"], tool_calls=decided["tool_calls"]
            )
            assert told["env_rewards"] == decided["env_rewards"]
            assert (
                told["metadata"]["decision_rewards"]["unique"]
                == decided["metadata"]["decision_rewards"]["unique"]
            )


async def test_an_environment_that_cannot_be_kept_refuses_with_the_place():
    async with running_app(boards()) as client:
        answer = await accept(client, {**counted("a"), "snapshot_turns": [1]})
        assert (answer.status_code, answer.json()["code"]) == (422, "not_restorable")
        assert answer.json()["where"] == "rollouts.0.snapshot_turns"


async def test_a_snapshot_that_would_not_be_taken_back_fails_its_rollout_by_name():
    async with running_app(default_plug_boards(), max_snapshot_bytes=1_024) as client:
        [found] = await played(client, rollout("a", SEEDED, snapshot_turns=[1]))
        assert (found["status"], found["failure"]["code"]) == ("failed", "snapshot_refused")


@pytest.mark.parametrize(
    ("turns", "told"),
    [
        ([5, 5], "turn 5 is named more than once; each is kept once"),
        ([2, 7], "turn 7 is above limits.max_decisions, 5, and the one after: it is never reached"),
    ],
)
async def test_turns_that_are_named_twice_or_never_reached_are_refused_with_the_place(turns, told):
    async with running_app(default_plug_boards()) as client:
        answer = await accept(client, rollout("a", SEEDED, snapshot_turns=turns))
    assert (answer.status_code, answer.json()["where"]) == (422, "rollouts.0.snapshot_turns")
    assert told in answer.json()["detail"]


class SlowToKeep(SlowEnvironment):
    """A snapshot that waits for the test; without `quick_step`."""

    def snapshot(self):
        self._gates.wait(self._gates.step)
        return b"the world"

    def restore(self, state):
        raise NotImplementedError


def keeping(*, timeout_s):
    spec = EnvSpec(env_name="slow")
    return SnapshotTaker(
        frozenset({1}), spec, 7, None, at_most_bytes=10_000, timeout_s=timeout_s, threads=None
    )


async def test_the_service_goes_on_while_a_slow_snapshot_is_taken():
    gates = Gates()
    taking = asyncio.create_task(keeping(timeout_s=20)(SlowToKeep(CountingConfig(), gates), (), ()))
    await asyncio.to_thread(gates.entered.wait, 20)
    gates.step.set()
    assert await taking


async def test_a_snapshot_that_does_not_return_in_time_is_a_deadline():
    gates = Gates()
    with pytest.raises(DeadlineExceeded, match="did not return within limits"):
        await keeping(timeout_s=0.05)(SlowToKeep(CountingConfig(), gates), (), ())
    gates.step.set()
