"""What a job asks for: pure, the same every time, and never a held-out world in training."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from shared_schemas.rollouts import Rollout, RolloutRequest
from shared_schemas.trajectory import ObservationData, StepData, StepInfo
from tests.trainer_backend.collect.scripted_task_app import answer_to
from trainer_backend import job_parts
from trainer_backend.collect import plan as plan_module
from trainer_backend.collect.plan import Inference, Planner, digest_tasks, retried
from trainer_backend.collect.sources import make_origin
from trainer_backend.collect.trial import try_job
from trainer_backend.core.allocation import ConstantSchedule
from trainer_backend.core.policies import ACTOR
from trainer_backend.core.seeds import (
    HELD_OUT_FROM,
    cycled_worlds,
    derived_seed,
    evaluation_worlds,
    other_worlds,
    training_world,
)
from trainer_backend.data.rows import Row
from trainer_backend.job.load import parse_job


def planner(**tables: dict[str, object]) -> Planner:
    document = {
        "model": {"preset": "tiny-0.3m"},
        "rollout": {"episodes_per_batch": 6},
        "training": {"group_size": 3},
        "warmup": {"episodes": 4},
        **tables,
    }
    inference = Inference("http://127.0.0.1:1", "job/actor", SecretStr("key"))
    return job_parts.planner(parse_job(document, where="test").config, "run", inference)


def test_siblings_share_a_world_and_nothing_else_of_their_seeds():
    requests = planner().training(1)
    assert [request.group_id for request in requests] == ["train/1/0"] * 3 + ["train/1/1"] * 3
    worlds = [request.start.seed for request in requests]
    assert worlds[0] == worlds[1] == worlds[2] != worlds[3] == worlds[4] == worlds[5]
    assert len({request.policy.seed for request in requests}) == 6
    assert len({request.rollout_id for request in requests}) == 6


@pytest.mark.parametrize("seeds", [(), (7, 8, 9)])
def test_the_first_requests_are_the_same_whether_made_alone_or_with_their_stage(seeds: tuple[int, ...]):
    plan = planner(rollout={"episodes_per_batch": 6, "seeds": seeds})
    assert plan.first_training() == plan.training(1)[0]
    assert plan.evaluation("0", most=1) == plan.evaluation("0")[:1]
    twice = plan.evaluation("0", repeats=2)
    assert twice[::2] == plan.evaluation("0"), "the first time is as without repeats"
    assert [one.start for one in twice[1::2]] == [one.start for one in twice[::2]]
    assert len({one.policy.seed for one in twice}) == len({one.rollout_id for one in twice})
    scripted = plan.evaluation("0", policy_name="random", repeats=3, most=1)
    assert len({one.policy.seed for one in scripted}) == 3
    assert plan.warmup(most=1) == plan.warmup()[:1]


async def test_a_trial_makes_as_few_requests_of_the_largest_job_as_of_a_small_one(monkeypatch):
    made: list[str] = []

    def counted(**fields: Any) -> RolloutRequest:
        made.append(fields["rollout_id"])
        return RolloutRequest(**fields)

    monkeypatch.setattr(plan_module, "RolloutRequest", counted)
    plan = planner(
        rollout={"episodes_per_batch": 1_000_000},
        training={"group_size": 100_000},
        warmup={"episodes": 1_000_000},
        evaluation={"instances": 1_000_000},
    )
    no_app: Any = SimpleNamespace(serving=(), refuse_if_none_answers=lambda: None)
    await try_job(plan, no_app, from_scratch=True)
    assert len(made) == 4


@given(st.integers(0, 2**31 - 1), st.integers(0, 1000), st.integers(0, 1000))
def test_training_worlds_never_meet_the_held_out_ones(job_seed: int, iteration: int, group: int):
    world = training_world(job_seed, "train", iteration, group, held_out=())
    assert 0 <= world < HELD_OUT_FROM
    assert min(evaluation_worlds(5)) >= HELD_OUT_FROM


def test_explicit_evaluation_worlds_are_avoided_by_training():
    first = training_world(0, "train", 1, 0, held_out=())
    assert training_world(0, "train", 1, 0, held_out=(first,)) != first
    plan = planner(evaluation={"seeds": [first, 5]})
    assert [request.start.seed for request in plan.evaluation("0")] == [first, 5]
    assert first not in {request.start.seed for request in plan.training(1)}


def test_the_key_goes_with_the_model_and_neither_to_the_teacher_nor_to_another_url():
    plan = planner()
    assert {request.policy.inference_key for request in plan.training(1)} == {SecretStr("key")}
    assert {request.policy.inference_key for request in plan.warmup()} == {None}
    config = {"inference_url": "http://other:1"}  # a job file with it is refused
    rollout = plan.players.rollout.model_copy(update={"policy_config": config})
    plan = replace(plan, players=replace(plan.players, rollout=rollout))
    assert {request.policy.inference_key for request in plan.training(1)} == {None}


def test_reward_switches_and_the_pattern_that_ends_an_episode_travel_with_every_stage():
    rollout = {"episodes_per_batch": 6, "termination_regex": r"done\.$", "termination_target": "text"}
    rewards = {"group_size": 3, "step_rewards_enabled": True, "step_rewards_mode": "decision_stepwise"}
    plan = planner(rollout=rollout, training=rewards)
    played = [*plan.training(1), plan.evaluation("0")[0]]
    assert all(request.step_rewards.emits_decision_rewards for request in played)
    for limits in (request.limits for request in (*played, plan.warmup()[0])):
        assert (limits.termination_regex, limits.termination_target) == (r"done\.$", "text")
    without = planner().training(1)[0]
    assert not without.step_rewards.emits_decision_rewards and without.limits.termination_regex is None


def test_a_retry_keeps_every_seed_and_takes_another_id():
    first = planner().training(1)[0]
    second = retried(first)
    third = retried(second)
    assert (second.rollout_id, third.rollout_id) == (first.rollout_id + ":1", first.rollout_id + ":2")
    assert second.model_copy(update={"rollout_id": first.rollout_id, "attempt": 0}) == first


def worlds(requests) -> list[int]:
    """One a group, in order."""
    return [request.start.seed for request in requests if request.sibling == 0]


def test_a_refill_asks_for_as_many_groups_as_it_is_told_on_worlds_of_its_round():
    plan = planner()
    first, second = plan.refill(2, 1, groups=2), plan.refill(2, 2, groups=1)
    assert [request.group_id for request in first] == ["refill-1/2/0"] * 3 + ["refill-1/2/1"] * 3
    assert first == planner().refill(2, 1, groups=2)
    asked = [*worlds(plan.training(2)), *worlds(first), *worlds(second), *worlds(plan.refill(3, 1, groups=2))]
    assert len(set(asked)) == len(asked) == 7
    seeds = [request.policy.seed for request in (*plan.training(2), *first, *second)]
    assert len(set(seeds)) == len(seeds)


def test_a_fixed_set_of_worlds_is_gone_through_in_shuffled_epochs():
    plan = planner(rollout={"episodes_per_batch": 6, "seeds": [7, 8, 9]})  # two groups an iteration
    played = [world for iteration in (1, 2, 3) for world in worlds(plan.training(iteration))]
    assert sorted(played[:3]) == sorted(played[3:]) == [7, 8, 9]
    assert played[:3] != played[3:]
    other = planner(rollout={"episodes_per_batch": 6, "seeds": [9, 7, 8]})  # the order given does not matter
    assert played[:2] == worlds(other.training(1))
    settings = {"episodes_per_batch": 18, "seeds": list(range(99))}
    assert worlds(planner(rollout=settings).training(1)) != worlds(
        planner(rollout=settings, job={"seed": 7}).training(1)
    )


def test_the_warm_up_and_the_refills_keep_to_the_fixed_set():
    plan = planner(rollout={"episodes_per_batch": 6, "seeds": [7, 8]})
    asked = [*plan.warmup(), *plan.prompts(5), *plan.refill(1, 1, groups=2)]
    assert {request.start.seed for request in asked} == {7, 8}
    assert sorted(worlds(plan.warmup())) == [7, 7, 8, 8]


def test_a_refill_of_a_fixed_set_asks_for_worlds_that_the_iteration_has_not_played():
    plan = planner(rollout={"episodes_per_batch": 6, "seeds": [1, 2, 3, 4, 5, 6, 7]})  # two of seven a time
    for iteration in range(1, 30):
        asked = worlds(plan.training(iteration))
        asked += worlds(plan.refill(iteration, 1, groups=2))
        asked += worlds(plan.refill(iteration, 2, groups=2, refilled=2))
        assert len(set(asked)) == 6, "no world twice while others are left"
        asked += worlds(plan.refill(iteration, 3, groups=2, refilled=4))
        assert set(asked) == {1, 2, 3, 4, 5, 6, 7}
        assert asked[-1] in asked[:2], "and then those of the plan again"


def test_an_evaluation_may_be_greedy_and_says_its_own_temperature_or_that_of_the_rollouts():
    told = {
        name: planner(evaluation=table).evaluation("0")[0].policy.config["temperature"]
        for name, table in {"greedy": {"temperature": 0}, "own": {"temperature": 0.5}, "absent": {}}.items()
    }
    assert told == {"greedy": 0.0, "own": 0.5, "absent": 1.0}


def test_evaluations_set_the_same_tasks_for_any_player_and_in_any_order():
    def digest(label="0", **tables):
        return digest_tasks(planner(**tables).evaluation(label)[::-1])

    same = digest_tasks(planner().evaluation("2"))
    assert digest(rollout={"episodes_per_batch": 6, "timeout_s": 9.0}) == same, "no task"
    assert digest() == digest("1") == digest(evaluation={"temperature": 0}) == same
    assert (
        digest(evaluation={"instances": 3})
        != same
        != digest(rollout={"episodes_per_batch": 6, "max_turns": 7})
    )


def parent(request: RolloutRequest, turns: int, *, invalid: int = 0) -> Rollout:
    """What comes back of a request: `turns` decisions, the first `invalid` of them refused."""
    steps = tuple(
        StepData(
            turn=turn, observation_data=ObservationData(), action_taken={},
            snapshot=f"world {turn}" if turn in request.snapshot_turns else None,
            step_info=StepInfo(invalid_reason="no" if turn <= invalid else None),
        )
        for turn in range(1, turns + 1)
    )  # fmt: skip
    return answer_to(request, steps=steps)


BRANCH = {"algorithm": {"advantage": "branch", "branches_per_episode": 3, "branch_rollouts": 2}}


def test_branches_have_what_is_left_of_their_parents_limits_and_draws_of_their_own():
    limits = {"max_turns": 4, "max_invalid_decisions": 3, "invalid_action_penalty": -0.5}
    job = planner(rollout={"episodes_per_batch": 3, **limits}, **BRANCH)
    first, second, _ = job.training(1)
    assert first.snapshot_turns == (2, 3, 4), "all but the first, whose branches are the siblings"
    requests = job.branches([parent(first, 3, invalid=2), parent(retried(second), 2)])
    assert [request.rollout_id for request in requests] == [
        "run/train/1/0/0/branch-2/0", "run/train/1/0/0/branch-2/1",
        "run/train/1/0/0/branch-3/0", "run/train/1/0/0/branch-3/1",
        "run/train/1/0/1.1/branch-2/0", "run/train/1/0/1.1/branch-2/1",
    ]  # fmt: skip
    assert [request.start.snapshot for request in requests[::2]] == ["world 2", "world 3", "world 2"]
    assert [request.start.parent_turn for request in requests[::2]] == [1, 2, 1]
    assert [request.limits.max_decisions for request in requests[::2]] == [3, 2, 3]
    assert [request.limits.max_invalid_decisions for request in requests[::2]] == [2, 1, 3]
    assert {request.limits.invalid_action_penalty for request in [*requests, first]} == {-0.5}
    assert len({request.policy.seed for request in [*requests, first, second]}) == 8
    assert requests == job.branches([parent(first, 3, invalid=2), parent(retried(second), 2)])
    assert len({retried(request).rollout_id for request in requests}) == 6


def test_only_what_is_branched_has_snapshots_without_siblings_also_of_its_first_decision():
    alone = planner(rollout={"episodes_per_batch": 1, "max_turns": 3}, training={"group_size": 1}, **BRANCH)
    assert [request.snapshot_turns for request in alone.training(1)] == [(1, 2, 3)]
    requests = planner().training(1)
    assert {request.snapshot_turns for request in requests} == {()}
    assert planner().branches([parent(requests[0], 3)]) == []


def test_a_rule_that_reads_no_sample_has_its_snapshots_taken_while_an_episode_is_played():
    def of(rule: str) -> Planner:
        keys = {"train_branches": True, "fork_rule": rule, "branches_per_episode": 3}
        return planner(rollout={"episodes_per_batch": 3, "max_turns": 6}, algorithm=keys)

    uniform, requests = of("uniform"), of("uniform").training(1)
    turns = [request.snapshot_turns for request in requests]
    assert all(len(of_one) == 3 and min(of_one) >= 2 for of_one in turns) and len(set(turns)) > 1
    played = [parent(request, 6) for request in requests]
    assert turns == [uniform.fork_turns(item) for item in played]
    assert uniform.branches(played) == [], "`forks` makes what is trained"
    assert {request.snapshot_turns for request in of("surprise").training(1)} == {()}


def test_a_branch_has_what_its_parent_had_left_of_its_time():
    job = planner(rollout={"episodes_per_batch": 3, "max_turns": 4, "timeout_s": 10.0}, **BRANCH)
    slow = parent(job.training(1)[0], 3)
    info = slow.trajectory.steps[0].step_info.model_copy(update={"policy_s": 3.0, "environment_s": 0.75})
    steps = tuple(step.model_copy(update={"step_info": info}) for step in slow.trajectory.steps)
    slow = slow.model_copy(update={"trajectory": slow.trajectory.model_copy(update={"steps": steps})})
    # one decision of 3.75 s before the second turn, two before the third
    assert [request.limits.timeout_s for request in job.branches([slow])[::2]] == [6.25, 2.5]
    hasty = planner(rollout={"episodes_per_batch": 3, "max_turns": 4, "timeout_s": 7.75}, **BRANCH)
    assert [request.limits.timeout_s for request in hasty.branches([slow])[::2]] == [4.0, 1.0]
    # a limit of less than a second stays what it is
    shortest = planner(rollout={"episodes_per_batch": 3, "max_turns": 4, "timeout_s": 0.5}, **BRANCH)
    assert [request.limits.timeout_s for request in shortest.branches([slow])[::2]] == [0.5, 0.5]


# Golden numbers. One that changes gives every user other worlds, rows or samples for the same job: their runs
# can no longer be repeated or continued. So a change here needs a decision, and a line in the changelog.


def test_golden_seeds_are_the_same_on_every_machine_and_in_every_version():
    assert derived_seed(7, "a", 2) == 698815748
    assert derived_seed(7, "a", 2, below=10**6) == 496418
    first = training_world(7, "train", 2, 1, held_out=())
    assert (first, training_world(7, "train", 2, 1, held_out=(first,))) == (396273301, 521530986)
    assert cycled_worlds(7, "train", [1, 2, 3, 4, 5], range(3, 12)) == [4, 2, 4, 5, 2, 1, 3, 4, 2]
    assert other_worlds(7, ["a", "b", "c", "d", "e"], iteration=2, played=["c"]) == ["e", "a", "b", "d", "c"]
    assert list(evaluation_worlds(2)) == [2**30, 2**30 + 1]
    assert make_origin(Row("x", "a question")).seed == 1068427759
    schedule = ConstantSchedule(alpha=0.5, seed=7)
    drawn = schedule.choices(3, [("train", group, 0) for group in range(8)])
    assert [policy == ACTOR for policy in drawn] == [False, False, False, True, True, True, True, False]


def test_golden_seeds_of_a_plan():
    plan = planner(
        job={"seed": 7},
        rollout={"episodes_per_batch": 4, "max_turns": 9},
        training={"group_size": 2},
        warmup={"episodes": 2},
        evaluation={"instances": 1},
        **BRANCH,
    )
    training = plan.training(2)
    stages = {
        "training": training,
        "refill": plan.refill(2, 1, groups=1),
        "warm-up": plan.warmup(),
        "prompts": plan.prompts(1),
        "evaluation": plan.evaluation("0", repeats=2),
        "evaluation of a policy of the task app": plan.evaluation("0", policy_name="random", repeats=2),
    }
    worlds_and_draws = {
        stage: [(request.start.seed, request.policy.seed) for request in requests]
        for stage, requests in stages.items()
    }
    assert worlds_and_draws == {
        "training": [
            (797044645, 549889795), (797044645, 142514251), (396273301, 1450416642), (396273301, 163972971),
        ],
        "refill": [(875963861, 1805870601), (875963861, 1561444396)],
        "warm-up": [(98203654, 820682032), (858500893, 661702939)],
        "prompts": [(689022284, 989906713)],
        "evaluation": [(2**30, 1477965523), (2**30, 796017994)],
        "evaluation of a policy of the task app": [(2**30, 1487676309), (2**30, 2121249825)],
    }  # fmt: skip
    assert [request.snapshot_turns for request in training] == [(4, 6, 9), (2, 3, 4), (5, 7, 9), (6, 7, 8)]
    branches = plan.branches([parent(training[1], 9)])
    assert [request.policy.seed for request in branches] == [
        733949701, 919426449, 350948174, 1750152796, 1582361112, 186979964,
    ]  # fmt: skip


def test_a_digest_of_tasks_is_the_one_that_stored_runs_have():
    # of 04b0d1a; another one would call every stored evaluation one of other tasks
    assert digest_tasks(planner(evaluation={"instances": 2}).evaluation("0")) == "28c486649709e40d"
