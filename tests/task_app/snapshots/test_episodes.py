"""Where rollouts begin, and snapshots that an episode takes of itself for others to play on from."""

import asyncio

import pytest

from shared_schemas.rollouts import EnvSpec
from task_app.environments.crafter.environment import CrafterConfig, CrafterEnvironment
from task_app.errors import CriticalError, DeadlineExceeded
from task_app.plugins import EnvironmentPlugin, PlugBoards, default_plug_boards
from task_app.protocols import Environment, Observation
from task_app.rollouts.assembly import SnapshotTaker
from task_app.snapshots.envelope import from_text, open_envelope, seal, to_text
from task_app.snapshots.starts import Worlds
from tests.task_app.counting import CountingConfig, CountingEnvironment, running_app
from tests.task_app.counting import rollout as counted
from tests.task_app.playing import ON, TO_THE_TREE, new_env, new_policy, post, refused, step
from tests.task_app.rollout_client import play
from tests.task_app.slow import Gates, SlowEnvironment

SEEDED = {"seed": 17}


def find_step(found, turn):
    return found["trajectory"]["steps"][turn - 1]


async def test_the_steps_that_were_asked_for_carry_the_world_before_them(real):
    plain, kept = await played(real, rollout("plain", SEEDED), rollout("kept", SEEDED, snapshot_turns=[2, 5]))
    taken = {step["turn"]: step.pop("snapshot") for step in kept["trajectory"]["steps"]}
    assert {turn for turn, text in taken.items() if text} == {2, 5}
    assert all(step.pop("snapshot") is None for step in plain["trajectory"]["steps"])
    assert kept["trajectory"] == plain["trajectory"], "looking changes nothing"


async def test_an_episode_from_such_a_snapshot_begins_in_what_its_parent_saw_there(real):
    [parent] = await played(real, rollout("parent", SEEDED, snapshot_turns=[4]))
    start = {"snapshot": find_step(parent, 4)["snapshot"], "parent_rollout_id": "parent", "parent_turn": 3}
    [branch] = await played(real, rollout("branch", start, limits={"max_decisions": 2}))
    before, seen = find_step(parent, 4)["observation_data"], find_step(branch, 1)["observation_data"]
    assert seen == before, "its messages too, with the history of three decisions"
    restored = await post(real, "/env/restore", snapshot=find_step(parent, 4)["snapshot"])
    env_steps = sum(len(step["env_rewards"]) for step in parent["trajectory"]["steps"][:3])
    assert (restored["step_idx"], restored["info"]["seed"]) == (env_steps, 17)


async def test_an_environment_that_cannot_be_kept_refuses_with_the_place(client):
    told = await refused(client, "/rollouts", rollouts=[counted("a", snapshot_turns=[1])])
    assert told[:3] == (422, "not_restorable", "rollouts.0.snapshot_turns")


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
async def test_turns_that_are_named_twice_or_never_reached_are_refused_with_the_place(real, turns, told):
    body = {"rollouts": [rollout("a", SEEDED, snapshot_turns=turns)]}
    status, _, where, sentence = await refused(real, "/rollouts", **body)
    assert (status, where) == (422, "rollouts.0.snapshot_turns")
    assert told in sentence


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


SPEC = EnvSpec(env_name="crafter", config={})


def rollout(rollout_id, start, **changes):
    return {
        "rollout_id": rollout_id,
        "run_id": "r",
        "start": start,
        "env": {"env_name": "crafter"},
        "policy": {"policy_name": "random", "config": {"seed": 4, "max_actions": 3}},
        "step_rewards": ON,
        "limits": {"max_decisions": 5},
        **changes,
    }


async def played(client, *requests):
    """The trajectories, without what a clock makes different."""
    ended = {name: one.model_dump(mode="json") for name, one in (await play(client, *requests)).items()}
    for found in ended.values():
        if found["trajectory"] is not None:
            found["trajectory"]["wall_s"] = 0
            for taken in found["trajectory"]["steps"]:
                taken["step_info"] |= {"policy_s": 0, "environment_s": 0}
    return [ended[request["rollout_id"]] for request in requests]


async def test_a_rollout_goes_on_from_a_snapshot(real):
    env_id = await new_env(real)
    await step(real, env_id, *TO_THE_TREE)
    before = await step(real, env_id, "fly")
    policy_id = await new_policy(real, bound_env_id=env_id)
    prompt = await post(real, "/policy/step", policy_id=policy_id, dry_run=True)
    taken = await post(real, "/env/snapshot", env_id=env_id)
    start = {"snapshot": taken["snapshot"], "parent_rollout_id": "p/1", "parent_turn": 2}
    one, two = await played(real, rollout("a", start), rollout("b", start))
    assert one["status"] == "finished", one
    trajectory = one["trajectory"]
    assert trajectory == two["trajectory"]
    assert (trajectory["parent_rollout_id"], trajectory["parent_turn"]) == ("p/1", 2)
    assert trajectory["seed"] == 17
    first = trajectory["steps"][0]
    shown = [message["content"] for message in first["observation_data"]["messages"]]
    assert shown == [message["content"] for message in prompt["meta"]["messages"]]
    assert "fly" in shown[1], "its history went along"
    counts = before["observation"]["achievements_counts"]
    assert first["observation_data"]["achievements_counts"] == counts
    # Turns and limits are the rollout's own; what was unlocked before the start is not unlocked again.
    assert [taken["turn"] for taken in trajectory["steps"]] == [1, 2, 3, 4, 5]
    assert trajectory["stop_reason"] == "max_decisions"
    records = [taken["metadata"]["decision_rewards"] for taken in trajectory["steps"]]
    unlocked = {name for record in records for name in record["unique"]}
    assert "collect_wood" not in unlocked
    assert trajectory["outcome_reward"] == 1 + len(unlocked)
    # The same calls by hand are paid the same.
    for decided in trajectory["steps"]:
        told = await post(real, "/env/step", env_id=env_id, tool_calls=decided["tool_calls"])
        assert told["env_rewards"] == decided["env_rewards"]


async def test_a_start_that_is_none_is_refused_with_its_place(real):
    env_id = await new_env(real, length=3)
    text = (await post(real, "/env/snapshot", env_id=env_id))["snapshot"]
    policy_id = await new_policy(real)
    policy = (await post(real, "/policy/snapshot", policy_id=policy_id))["snapshot"]
    await step(real, env_id, "noop", "noop", "noop")
    over = (await post(real, "/env/snapshot", env_id=env_id))["snapshot"]
    same = {"env_name": "crafter", "config": {"length": 3}}
    for start, env, where, told in (
        ({}, same, "rollouts.0.start", "give either seed or snapshot"),
        ({"seed": 1, "snapshot": text}, same, "rollouts.0.start", "give either seed or snapshot"),
        ({"seed": 1, "parent_turn": 3}, same, "rollouts.0.start", "a parent goes with a snapshot"),
        ({"snapshots": text}, same, "rollouts.0.start.snapshots", "Did you mean 'snapshot'?"),
        ({"snapshot": text[:-8]}, same, "rollouts.0.start.snapshot", "cut short"),
        ({"snapshot": policy}, same, "rollouts.0.start.snapshot", "kind 'policy'"),
        ({"snapshot": over}, same, "rollouts.0.start.snapshot", "has ended"),
        (
            {"snapshot": text}, {"env_name": "crafter"}, "rollouts.0.start.snapshot",
            "is of 'crafter' with {'length': 3}, the rollout is to play 'crafter' with {'length': 10000}",
        ),
        (
            {"snapshot": text}, {"env_name": "count"}, "rollouts.0.env.env_name", "unknown environment",
        ),
    ):  # fmt: skip
        body = {"rollouts": [rollout("a", start, env=env)]}
        status, _, found, sentence = await refused(real, "/rollouts", **body)
        assert (status, found) == (422, where), sentence
        assert told in sentence


async def test_a_snapshot_of_another_environment_is_refused():
    both = {
        **default_plug_boards().environments,
        "twin": EnvironmentPlugin(CrafterConfig, CrafterEnvironment),
    }
    boards = PlugBoards(both, default_plug_boards().policies)
    async with running_app(boards) as client:
        taken = await post(client, "/env/snapshot", env_id=await new_env(client))
        body = rollout("a", {"snapshot": taken["snapshot"]}, env={"env_name": "twin"})
        _, code, _, told = await refused(client, "/rollouts", rollouts=[body])
    assert code == "snapshot_refused"
    assert "is of environment 'crafter', the rollout is to play environment 'twin'" in told


class Worn(CrafterEnvironment):
    """Crafter that writes down which of its worlds were generated, and may be told to fail."""

    def __init__(self, made: list[int], failures: list[Exception] | None = None) -> None:
        super().__init__()
        self._made, self._failures = made, failures or []

    def reset(self, seed: int) -> Observation:
        self._made.append(seed)
        if self._failures:
            raise self._failures.pop()
        return super().reset(seed)


async def begun(worlds: Worlds, environment: Environment, seed: int) -> Observation:
    return (await worlds.start(SPEC, seed).begin(environment))[0]


async def test_siblings_share_one_generated_world_and_then_part():
    made: list[int] = []
    worlds, siblings = Worlds(), [Worn(made) for _ in range(8)]
    seen = await asyncio.gather(*(begun(worlds, sibling, 3) for sibling in siblings))
    await begun(worlds, Worn(made), 4)
    assert made == [3, 4]
    assert seen == [CrafterEnvironment().reset(3)] * 8
    siblings[0].step([])
    assert siblings[1].outcome_reward() == siblings[0].outcome_reward() == 0.0
    ends = [[sibling.step([]).observation for _ in range(20)][-1] for sibling in siblings[1:]]
    assert ends == [ends[0]] * 7


async def test_when_the_first_sibling_fails_the_next_one_makes_the_world():
    made: list[int] = []
    failures: list[Exception] = [OSError("no more dice")]
    worlds, siblings = Worlds(), [Worn(made, failures) for _ in range(3)]
    first, *others = await asyncio.gather(
        *(begun(worlds, sibling, 3) for sibling in siblings), return_exceptions=True
    )
    assert isinstance(first, CriticalError)
    assert others == [CrafterEnvironment().reset(3)] * 2
    assert made == [3, 3]


async def test_an_environment_that_cannot_be_restored_is_reset_every_time():
    worlds, one, two = Worlds(), CountingEnvironment(), CountingEnvironment()
    assert await begun(worlds, one, 3) == await begun(worlds, two, 3) == CountingEnvironment().reset(3)


async def test_a_group_plays_as_if_every_sibling_had_made_its_own_world():
    group = [
        rollout(f"g/{sibling}", {"seed": 9}, policy={"policy_name": "random", "config": {"seed": sibling}})
        for sibling in range(4)
    ]
    async with running_app(default_plug_boards(), max_concurrent_rollouts=4) as client:
        together = await played(client, *group)
    apart = []
    for one in group:
        async with running_app(default_plug_boards()) as client:
            apart += await played(client, one)
    assert [found["trajectory"] for found in together] == [found["trajectory"] for found in apart]
    assert len({str(found["trajectory"]["steps"]) for found in together}) == 4


async def test_a_moment_that_its_environment_does_not_take_fails_the_rollout_and_says_so(real):
    taken = await post(real, "/env/snapshot", env_id=await new_env(real))
    data = from_text(taken["snapshot"], where="snapshot")
    head, state = open_envelope("environment", data, at_most_bytes=10**6)
    torn = to_text(seal("environment", head, state[:-1], at_most_bytes=10**6))
    (ended,) = await played(real, rollout("a", {"snapshot": torn}))
    assert ended["status"] == "failed"
    assert ended["failure"]["code"] == "snapshot_refused"
    assert "6591 bytes after its first line" in ended["failure"]["detail"]
