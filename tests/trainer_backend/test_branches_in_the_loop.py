"""Parents and branches in the loop of a run and in its files: what is kept, and what recredit makes of it."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared_schemas.rollouts import Rollout, RolloutRequest, Start
from tests.trainer_backend.pages.hand_made import COW, WOOD
from tests.trainer_backend.test_train import finished, make_run
from trainer_backend.collect.batch import Batch
from trainer_backend.core.kl_reward import ScoredTokens
from trainer_backend.credit.credit import Measured
from trainer_backend.credit.recredit import recredited, stored_iterations, stored_measured
from trainer_backend.errors import RewardError, TaskAppError
from trainer_backend.parts import Progress
from trainer_backend.rundir.rollout_files import read_rollouts
from trainer_backend.train import Run, train

# All turns but the first; the episodes have two decisions.
BRANCH = {"algorithm__advantage": "branch", "algorithm__branches_per_episode": 7}


def is_branch(request: RolloutRequest) -> bool:
    return request.start.snapshot is not None


def parent(request: RolloutRequest) -> Rollout:
    """The second decision has a snapshot."""
    played = finished(request)
    first, second = played.trajectory.steps
    steps = (first, second.model_copy(update={"snapshot": "the world"}))
    return played.model_copy(update={"trajectory": played.trajectory.model_copy(update={"steps": steps})})


def played_on(request: RolloutRequest) -> Rollout:
    """One decision, which earned what siblings 0 and 1 of the branch are worth: 1 and 0."""
    start = request.start
    seeded = request.model_copy(update={"start": Start(seed=1)})
    played = finished(seeded, [WOOD if request.sibling == 0 else ()])
    left = {"parent_rollout_id": start.parent_rollout_id, "parent_turn": start.parent_turn}
    return played.model_copy(update={"trajectory": played.trajectory.model_copy(update=left)})


def answered(requests: Sequence[RolloutRequest]) -> Batch:
    return Batch(tuple(played_on(item) if is_branch(item) else parent(item) for item in requests))


@pytest.mark.parametrize("how", ["fails", "is stopped"])
async def test_parents_are_kept_when_collecting_their_branches(tmp_path: Path, how: str):
    stop = asyncio.Event()

    def answer(requests: Sequence[RolloutRequest]) -> Batch | None:
        if not is_branch(requests[0]):
            return answered(requests)
        if how == "fails":
            raise TaskAppError("no app answers")
        stop.set()
        return None

    run = make_run(tmp_path, train=answer, **BRANCH)
    if how == "fails":
        with pytest.raises(TaskAppError, match="no app answers"):
            await train(run, Progress(), stop)
    else:
        assert (await train(run, Progress(), stop)).iteration == 0
    assert len(read_rollouts(run.directory.rollouts_file("iteration_1"))) == 8


async def trained(tmp_path: Path, first: Any = None, **settings: Any) -> Run:
    """Two iterations; `first` answers the plan of the first one."""
    calls = 0

    def answer(requests: Sequence[RolloutRequest]) -> Batch:
        nonlocal calls
        calls += 1
        return (first if first and calls == 1 else answered)(requests)

    run = make_run(tmp_path, train=answer, training__iterations=2, **BRANCH, **settings)
    await train(run, Progress(), asyncio.Event())
    return run


def bare(requests: Sequence[RolloutRequest]) -> Batch:
    return Batch(tuple(finished(item) for item in requests))


def again(run: Run) -> Any:
    """`branch` and `stepwise` of what is stored."""
    stored, measured = stored_iterations(run.directory, []), stored_measured(run.directory, [])
    return recredited(run.credit, stored, ["stepwise", "branch"], measured)


async def test_an_iteration_in_which_no_chosen_decision_was_reached_is_recredited_next_to_one_with_branches(
    tmp_path: Path,
):
    run = await trained(tmp_path, bare)
    assert read_rollouts(run.directory.rollouts_file("branches_1")) == []
    found = again(run)
    assert not found.refused
    measured = [any(map(len, credit.branch_returns_T)) for credit in found.credits["branch"]]
    assert measured == [False] * 8 + [True] * 8
    assert [item.advantages_T for item in found.credits["branch"]][:8] == [
        item.advantages_T for item in found.credits["stepwise"]
    ][:8]


async def test_an_iteration_whose_branches_are_missing_is_refused_by_name_and_not_taken_for_stepwise(
    tmp_path: Path,
):
    run = await trained(tmp_path)
    run.directory.rollouts_file("branches_2").unlink()
    found = again(run)
    assert found.refused.keys() == {"branch"}
    assert "train/2/0/0: no branches were played" in found.refused["branch"]
    assert len(found.credits["stepwise"]) == 16


async def test_what_is_wrong_with_branches_refuses_their_estimator_alone(tmp_path: Path):
    run = await trained(tmp_path)
    stored, measured = stored_iterations(run.directory, []), stored_measured(run.directory, [])
    table = {"step_rewards_enabled": True, "step_rewards_mode": "decision_stepwise"}
    rewards = replace(run.credit.rewards, table=run.planner.table.model_copy(update=table))
    credit = replace(run.credit, rewards=rewards)

    def without_counters(branch: Rollout) -> Rollout:
        steps = tuple(
            step.model_copy(update={"metadata": type(step.metadata)()}) for step in branch.trajectory.steps
        )
        return branch.model_copy(update={"trajectory": branch.trajectory.model_copy(update={"steps": steps})})

    (name, by_turn), *_ = (measured[0].branches or {}).items()
    broken = {turn: [without_counters(item) for item in found] for turn, found in by_turn.items()}
    first = Measured(branches={**(measured[0].branches or {}), name: broken})
    found = recredited(credit, stored, ["stepwise", "branch"], [first, measured[1]])
    assert found.refused.keys() == {"branch"} and "no decision_rewards" in found.refused["branch"]
    assert len(found.credits["stepwise"]) == 16


def scored(rollout: Rollout, nats: float) -> ScoredTokens:
    rows = [[-1.0] for _ in rollout.trajectory.steps]
    return ScoredTokens(rows, [[-1.0 - nats] for _ in rows])


@pytest.mark.parametrize("coef", [1e-4, 1.0])
def test_groups_that_earned_the_same_are_flat_whatever_their_decisions_paid_for_kl(tmp_path, coef):
    run = make_run(
        tmp_path, algorithm__advantage="grpo", training__kl_reward_coef=coef, training__skip_flat_groups=True
    )
    requests = run.planner.training(1)
    spread = requests[0].group_id
    rollouts = [
        finished(item, [WOOD, COW] if item.group_id == spread and item.sibling == 0 else [WOOD, ()])
        for item in requests
    ]
    measured = Measured(scored={item.rollout_id: scored(item, 0.1 * n) for n, item in enumerate(rollouts)})
    found = run.credit.credit(rollouts, measured)
    others = list(dict.fromkeys(item.group_id for item in requests if item.group_id != spread))
    assert found.flat == others
    assert found.metrics["group/flat"] == len(others) > 0
    trained_on = {item.rollout_id for item in found.episodes}
    assert trained_on == {item.rollout_id for item in rollouts if item.group_id == spread}


def test_log_probs_of_another_number_of_decisions_are_refused_by_name(tmp_path: Path):
    run = make_run(tmp_path, training__kl_reward_coef=0.1)
    rollouts = [finished(item) for item in run.planner.training(1)]
    of_all = {item.rollout_id: scored(item, 0.5) for item in rollouts}
    short = {rollouts[1].rollout_id: ScoredTokens([[-1.0]], [[-1.0]])}
    with pytest.raises(RewardError, match=r"train/1/0/1.*log-probs of 1 decisions, but the rollout has 2"):
        run.credit.credit(rollouts, Measured(scored=of_all | short))
