"""Who is asked for which rollout of a mixture, and that nothing else about a plan depends on it."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from pydantic import SecretStr

from shared_schemas.rollouts import RolloutRequest
from trainer_backend import job_parts
from trainer_backend.collect.plan import Inference, Planner
from trainer_backend.collect.sources import name_sampler
from trainer_backend.core.mixture_history import Past
from trainer_backend.job.load import parse_job

GATEWAY = Inference("http://127.0.0.1:1", "job/actor", SecretStr("key"))
ONE = {"name": "teacher", "model_path": "t"}
TWO = [ONE, {"name": "far", "inference_url": "http://far:8000/v1", "model": "some/Model"}]


def make_plan(schedule: dict[str, Any] | None, only: Any = ONE, **tables: Any) -> Planner:
    document = {
        "model": {"path": "m"},
        "rollout": {"episodes_per_batch": 24, "allow_truncated_sampling": True},
        "training": {"group_size": 4},
        **tables,
    }
    if schedule is not None:
        document |= {"rollout_only": only, "rollout_allocation_schedule": schedule}
    job = parse_job(document, where="test").config
    return job_parts.planner(job, "run", GATEWAY)


def after(plan: Planner, history: list[Past]) -> Planner:
    return replace(plan, allocation=replace(plan.allocation, history=history))


def constant(alpha: float, **keys: Any) -> dict[str, Any]:
    return {"type": "constant", "alpha": alpha, **keys}


def chosen(requests: list[RolloutRequest]) -> list[list[str]]:
    """By group."""
    groups: dict[str, list[str]] = {}
    for request in requests:
        groups.setdefault(request.group_id, []).append(name_sampler(request))
    return list(groups.values())


def test_by_the_iteration_one_policy_samples_all_of_it_and_what_is_refilled():
    plan = make_plan(constant(0.5))
    found = set()
    for iteration in range(1, 13):
        requests = [*plan.training(iteration), *plan.refill(iteration, 1, 3)]
        (policy,) = {name_sampler(request) for request in requests}
        found.add(policy)
    assert found == {"actor", "teacher"}
    assert plan.first_training() == plan.training(1)[0], "also when it is made alone"


@pytest.mark.parametrize("unit", ["group", "rollout"])
def test_by_the_group_siblings_share_their_policy_and_a_refilled_group_draws_for_itself(unit: str):
    plan = make_plan(constant(0.5, unit=unit))
    rounds = [plan.training(1), plan.refill(1, 1, 6), plan.refill(1, 2, 6)]
    drawn = [chosen(requests) for requests in rounds]
    assert drawn[0] != drawn[1] != drawn[2] != drawn[0]
    assert [chosen(plan.refill(1, 2, 6)), chosen(plan.training(1))] == [drawn[2], drawn[0]]
    assert plan.first_training() == plan.training(1)[0]
    groups = [set(group) for part in drawn for group in part]
    assert set().union(*groups) == {"actor", "teacher"}
    assert all(len(group) == 1 for group in groups) == (unit == "group")


def test_a_thousand_rollouts_of_several_policies_are_shared_out():
    plan = make_plan(constant(0.6, unit="rollout"), only=[{**ONE, "weight": 3.0}, TWO[1]])
    found = Counter(name_sampler(item) for iteration in range(1, 43) for item in plan.training(iteration))
    assert found.total() == 1_008
    for policy, share in {"actor": 0.6, "teacher": 0.3, "far": 0.1}.items():
        assert abs(found[policy] - 1_008 * share) <= 5 * (1_008 * share * (1 - share)) ** 0.5


def test_nothing_but_the_policy_of_a_request_depends_on_the_mixture():
    plain, mixed = make_plan(None).training(3), make_plan(constant(0.5, unit="rollout")).training(3)
    for own, other in zip(plain, mixed, strict=True):
        if name_sampler(other) == "actor":
            assert other == own
        assert other.model_copy(update={"policy": own.policy}) == own
        assert other.policy.config == {**own.policy.config, "model": other.policy.config["model"]}


def test_a_fixed_policy_is_asked_with_its_own_sampling():
    request = make_plan(constant(0.0), only={**ONE, "temperature": 0.8, "top_k": 40}).training(1)[0]
    asked = {"model": "job/teacher", "temperature": 0.8, "top_p": 1.0, "top_k": 40}
    assert request.policy.config.items() >= asked.items()


def test_evaluation_warm_up_and_prompts_are_the_actors_and_the_teachers():
    mixed, plain = (make_plan(schedule, warmup={"episodes": 2}) for schedule in (constant(0.0), None))
    assert mixed.evaluation("0") == plain.evaluation("0")
    assert mixed.warmup() == plain.warmup()
    assert mixed.prompts(2) == plain.prompts(2)


def test_a_plan_that_was_not_told_where_a_fixed_policy_is_asked_cannot_ask_it():
    plan = make_plan(constant(0.0))
    plan = replace(plan, players=replace(plan.players, servers={"actor": GATEWAY}))
    with pytest.raises(ValueError, match="needs the fixed policy 'teacher', and no inference server"):
        plan.training(1)


def test_adaptive_looks_at_what_earlier_iterations_told():
    adaptive = {"type": "adaptive", "alpha_0": 0.5, "unit": "rollout"}
    plan = make_plan(adaptive)
    assert plan.allocation.looks_back
    worse = Past(1, {"actor": 4, "teacher": 4}, {"actor": 5.0, "teacher": 1.0}, {"teacher": 1.0})
    assert {name_sampler(item) for item in plan.training(2)} == {"actor", "teacher"}
    assert {name_sampler(item) for item in after(plan, [worse]).training(2)} == {"actor"}


def test_by_reward_the_better_one_samples_what_the_actor_does_not():
    plan = make_plan(constant(0.0, selection="reward"), only=TWO)
    assert plan.allocation.looks_back
    assert not make_plan(constant(0.0), only=TWO).allocation.looks_back
    history = [Past(1, {"teacher": 24}, {"teacher": 1.0}), Past(2, {"far": 24}, {"far": 3.0})]
    for iteration, policy in ((1, "teacher"), (2, "far"), (3, "far")):
        requests = after(plan, history).training(iteration)
        assert {name_sampler(request) for request in requests} == {policy}
