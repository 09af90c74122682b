"""A mixture in the loop of a run: who samples what, what its rows tell, and what ends it."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared_schemas.rollouts import Rollout, RolloutRequest
from tests.conftest import rows_of
from tests.trainer_backend.pages.hand_made import COW, TABLE, WOOD
from tests.trainer_backend.test_train import Learner, all_finished, failed, finished, make_run
from trainer_backend.collect.batch import Batch
from trainer_backend.collect.sources import name_sampler
from trainer_backend.core.policies import ACTOR
from trainer_backend.errors import NothingToLearnFrom, SegmentError
from trainer_backend.parts import CreditedEpisode, Progress
from trainer_backend.run.checkpointing import Saving
from trainer_backend.rundir.rollout_files import read_rollouts
from trainer_backend.train import Run, train

TWO = {"rollout_only": [{"name": "teacher", "model_path": "t"}, {"name": "weak", "model_path": "w"}]}
PLAYED = {"teacher": [WOOD, COW, TABLE], "weak": [()], ACTOR: [WOOD, ()]}


def schedule(**keys: Any) -> dict[str, Any]:
    return {f"rollout_allocation_schedule__{key}": value for key, value in keys.items()}


def sampled(request: RolloutRequest) -> Rollout:
    """What its policy would have done: the teacher unlocks three in three decisions, the actor one in two."""
    rollout = finished(request, PLAYED[name_sampler(request)])
    assert rollout.trajectory is not None
    named = rollout.trajectory.model_copy(update={"model": request.policy.config["model"]})
    return rollout.model_copy(update={"trajectory": named})


def all_sampled(requests: Sequence[RolloutRequest]) -> Batch:
    return Batch(tuple(map(sampled, requests)))


def mixed_run(
    tmp_path: Path, answer: Callable[[Sequence[RolloutRequest]], Batch] = all_sampled, **keys: Any
) -> Run:
    settings = {"rollout_only__name": "teacher", "rollout_only__model_path": "t", **keys}
    return make_run(tmp_path, train=answer, evaluation=all_finished, **settings)


async def row_of(run: Run) -> dict[str, Any]:
    """The row of a run of one iteration."""
    await train(run, Progress(), asyncio.Event())
    (row,) = rows_of(run.directory, "iteration")
    return row


async def test_an_iteration_of_the_fixed_policy_tells_nothing_of_the_actor(tmp_path: Path):
    row = await row_of(mixed_run(tmp_path, **schedule(alpha=0.0), training__iterations=1))
    rooms = {name.partition("/")[0] for name in row}
    assert not rooms & {"decision", "reward", "stop", "user_reward", "interaction"}
    assert {name for name in row if name.startswith("episode/")} == {"episode/outcome_definition"}
    assert {name: value for name, value in row.items() if name.startswith(("mixture/", "rollout/"))} == {
        "rollout/policy_choice": 0.0, "rollout/using_actor": 0.0, "rollout/using_fixed": 1.0,
        "rollout/finished": 8.0, "rollout/failed": 0.0,
        "mixture/alpha": 0.0,
        "mixture/actor/episodes": 0.0, "mixture/actor/failed": 0.0,
        "mixture/teacher/episodes": 8.0, "mixture/teacher/failed": 0.0,
        "mixture/teacher/decisions": 3.0, "mixture/teacher/outcome_reward": 3.0,
        "mixture/teacher/reward": 3.0, "mixture/teacher/unique_achievements": 3.0,
    }  # fmt: skip
    assert row["perf/decisions_per_s"] > 0


async def test_by_the_rollout_the_actors_curves_are_of_its_own_rollouts(tmp_path: Path):
    row = await row_of(mixed_run(tmp_path, **schedule(alpha=0.5, unit="rollout"), training__iterations=1))
    own, others = row["mixture/actor/episodes"], row["mixture/teacher/episodes"]
    assert own + others == 8
    assert own and others
    assert row["rollout/policy_choice"] == own / 8
    assert (row["rollout/using_actor"], row["rollout/using_fixed"]) == (1.0, 1.0)
    assert (row["episode/count"], row["episode/outcome_reward"], row["decision/count"]) == (own, 1.0, 2 * own)
    assert (row["reward/mean"], row["decision/unique_by_turn"]) == (1.0, [1.0, 0.0])


async def test_a_job_without_fixed_policies_tells_nothing_of_a_mixture(tmp_path: Path):
    row = await row_of(make_run(tmp_path, training__iterations=1))
    assert not [name for name in row if name.startswith(("mixture/", "actor/"))]
    assert not {"rollout/policy_choice", "rollout/using_actor", "rollout/using_fixed"} & row.keys()


class Telling(Learner):
    """Its updates tell how much the teacher's samples still count: less each time."""

    def update(
        self, episodes: Sequence[CreditedEpisode], *, iteration: int, policy_version: int | None = None
    ) -> dict[str, float]:
        policies = {episode.policy for episode in episodes}
        told = {f"mixture/{policy}/counted_share": 1 / iteration for policy in policies}
        return super().update(episodes, iteration=iteration) | told


@pytest.mark.parametrize(
    "keys",
    [
        schedule(type="adaptive", alpha_0=0.5, window=2),
        schedule(type="adaptive", alpha_0=0.3, unit="rollout"),
        schedule(type="step", switch_steps=[3, 5]),
        schedule(alpha=0.5, selection="reward", unit="group") | TWO,
    ],
    ids=["adaptive", "adaptive by the rollout", "step", "by reward"],
)
async def test_a_run_that_is_resumed_chooses_as_it_would_have(tmp_path: Path, keys: dict[str, Any]):
    async def chosen_in(name: str, *ends: int) -> tuple[list[str], list[float]]:
        """Who was asked in 6 iterations, with a new start after each end; and each alpha."""
        asked: list[str] = []

        def answer(requests: Sequence[RolloutRequest]) -> Batch:
            asked.extend(name_sampler(request) for request in requests)
            return all_sampled(requests)

        run = mixed_run(tmp_path / name, answer, learner=Telling(), **keys)
        progress, held_out = Progress(), run.planner.players.held_out
        for end in (*ends, 6):
            table = run.planner.table.model_copy(update={"iterations": end})
            planner = replace(run.planner, run_id=f"run.{end}", table=table)
            saving = Saving(table, held_out, run.directory, run.learner)
            progress = await train(replace(run, planner=planner, saving=saving), progress, asyncio.Event())
        return asked, [row["mixture/alpha"] for row in rows_of(run.directory, "iteration")]

    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = await chosen_in("whole")
    assert await chosen_in("parts", 1, 4) == whole
    assert set(whole[0]) == {ACTOR, *(["teacher", "weak"] if "rollout_only" in keys else ["teacher"])}


def dead_teacher(requests: Sequence[RolloutRequest]) -> Batch:
    """Its rollouts fail twice each; the actor's are finished."""
    alive = [request for request in requests if name_sampler(request) == ACTOR]
    lost = [request for request in requests if name_sampler(request) != ACTOR]
    again = [request.model_copy(update={"rollout_id": f"{request.rollout_id}:1"}) for request in lost]
    codes = Counter({"inference_unavailable": 2 * len(lost)})
    return Batch(tuple(map(sampled, alive)), tuple(map(failed, again)), codes)


@pytest.mark.parametrize("unit", ["iteration", "group", "rollout"])
async def test_a_fixed_policy_that_dies_ends_the_run_and_is_not_left_out(tmp_path: Path, unit: str):
    """By the iteration, the default, none of the third's rollouts was finished at all."""
    calls = 0

    def answer(requests: Sequence[RolloutRequest]) -> Batch:
        nonlocal calls
        calls += 1
        return (all_sampled if calls < 3 else dead_teacher)(requests)

    keys = (
        schedule(type="step", switch_steps=[1, 3]) if unit == "iteration" else schedule(alpha=0.5, unit=unit)
    )
    run = mixed_run(tmp_path, answer, **keys)
    with pytest.raises(NothingToLearnFrom) as caught:
        await train(run, Progress(), asyncio.Event())
    lost = [item for item in read_rollouts(run.directory.rollouts_file("iteration_3")) if item.failure]
    assert str(caught.value) == (
        f"[rollout_only] 'teacher' (t): none of its {len(lost)} rollouts was finished, "
        f"{len(lost)} x inference_unavailable: connection refused. Nothing is played in its place; a run "
        "that is resumed goes on where it ended."
    )
    assert len(rows_of(run.directory, "iteration")) == 2
    assert (run.directory.checkpoints / "iteration_2").exists()


@pytest.mark.parametrize("readable", [0, 2])
async def test_a_server_whose_model_writes_no_calls_ends_the_run_with_the_reason(tmp_path, readable):
    """The first iteration is the teacher's: 8 episodes of 3 decisions; 22 of 24 are below the bound."""

    def unreadable(rollout: Rollout, number: int) -> Rollout:
        trajectory = rollout.trajectory
        assert trajectory is not None
        info = trajectory.steps[1].step_info.model_copy(update={"invalid_reason": "no tool call"})
        steps = [
            step if step.turn == 1 and number < readable else step.model_copy(update={"step_info": info})
            for step in trajectory.steps
        ]
        return rollout.model_copy(
            update={"trajectory": trajectory.model_copy(update={"steps": tuple(steps)})}
        )

    def answer(requests: Sequence[RolloutRequest]) -> Batch:
        return Batch(tuple(unreadable(sampled(item), n) for n, item in enumerate(requests)))

    remote = {"rollout_only": [{"name": "teacher", "inference_url": "http://gpu:1", "model": "theirs"}]}
    named = {"model__preset": None, "model__path": "m", **remote, **schedule(alpha=0.0)}
    run = mixed_run(tmp_path, answer, **named, training__iterations=1)
    if readable:
        await train(run, Progress(), asyncio.Event())
        return
    with pytest.raises(NothingToLearnFrom) as caught:
        await train(run, Progress(), asyncio.Event())
    assert str(caught.value).startswith(
        "[rollout_only] 'teacher' (theirs at http://gpu:1): 24 of its 24 decisions were no call that could "
        "be carried out, 24 x 'no tool call'. Its ids are read in the actor's tool-call format"
    )
    assert len(read_rollouts(run.directory.rollouts_file("iteration_1"))) == 8, "they can be looked at"


async def test_a_fixed_policy_that_loses_some_rollouts_goes_on_and_they_are_counted(tmp_path: Path):
    def answer(requests: Sequence[RolloutRequest]) -> Batch:
        return Batch(tuple(map(sampled, requests[1:])), (failed(requests[0]),))

    row = await row_of(mixed_run(tmp_path, answer, **schedule(alpha=0.0), training__iterations=1))
    assert (row["mixture/teacher/episodes"], row["mixture/teacher/failed"]) == (7.0, 1.0)


@pytest.mark.parametrize("model", ["", "large", "vendor/large", "tiny/actor"])
async def test_a_rollout_that_does_not_tell_the_fixed_policy_that_was_asked_is_not_the_actors(
    tmp_path: Path, model: str
):
    def answer(requests: Sequence[RolloutRequest]) -> Batch:
        found = [sampled(request) for request in requests]
        told = [item.trajectory.model_copy(update={"model": model}) for item in found if item.trajectory]
        pairs = zip(found, told, strict=True)
        return Batch(tuple(item.model_copy(update={"trajectory": new}) for item, new in pairs))

    run = mixed_run(tmp_path, answer, **schedule(alpha=0.0), training__iterations=1)
    asked = (
        rf"train/1/0/0:1: 'teacher' was asked to sample it, and its model is {model!r}, which is the model of"
    )
    with pytest.raises(SegmentError, match=asked):
        await train(run, Progress(), asyncio.Event())
    assert len(read_rollouts(run.directory.rollouts_file("iteration_1"))) == 8, "they can be looked at"
    own = mixed_run(tmp_path / "own", answer, **schedule(alpha=1.0), training__iterations=1)
    await train(own, Progress(), asyncio.Event())
