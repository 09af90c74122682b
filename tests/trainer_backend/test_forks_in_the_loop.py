"""Continuations that are trained, in the loop of a run on stand-ins: what is planned, kept and rejected."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shared_schemas.replay import ReplayRequest
from shared_schemas.rollouts import Rollout, RolloutRequest
from tests.conftest import rows_of
from tests.trainer_backend.pages.hand_made import COW, WOOD
from tests.trainer_backend.test_branches_in_the_loop import is_branch, played_on
from tests.trainer_backend.test_train import Learner, finished, make_run, without_logprob
from trainer_backend.collect.batch import Batch
from trainer_backend.collect.wire import ReplayDeparts, TaskAppLost
from trainer_backend.core.critic import OfEpisode
from trainer_backend.core.segments import Segment
from trainer_backend.credit.credit import Measured
from trainer_backend.errors import SegmentError, TaskAppError, place
from trainer_backend.parts import CreditedEpisode, Progress
from trainer_backend.rundir.files import read_lines
from trainer_backend.rundir.rollout_files import read_rollouts
from trainer_backend.rundir.spool import read_ledger
from trainer_backend.train import Run, train

# The second decision of two: the first one's continuations are its siblings.
FORKS = {
    "algorithm__train_branches": True,
    "algorithm__fork_rule": "surprise",
    "algorithm__branches_per_episode": 3,
    "training__iterations": 1,
}


class TaskApp:
    """Replays everything; `fails` is raised instead, as often as it says."""

    def __init__(self, fails: Sequence[Exception] = ()) -> None:
        self.fails, self.replayed = list(fails), list[ReplayRequest]()

    async def snapshots(self, record: ReplayRequest) -> dict[int, str]:
        self.replayed.append(record)
        if self.fails:
            raise self.fails.pop()
        return {turn: f"world after {turn}" for turn in record.snapshots}


class Watched(Learner):
    """Remembers what it was trained on; V is 1 at the start and 5 at the second decision."""

    def __init__(self, unvalued: str = "") -> None:
        super().__init__()
        self.trained: dict[str, Any] = {}
        self._unvalued = unvalued

    def values(self, episodes: Mapping[str, Sequence[Segment]]) -> dict[str, OfEpisode]:
        for name in episodes:
            if self._unvalued and name.endswith(self._unvalued):
                raise SegmentError("token id 99", where=place(name, 1, 2))
        return {name: [1.0] if "branch" in name else [1.0, 5.0] for name in episodes}

    def update(self, episodes: Sequence[CreditedEpisode], **keywords: Any) -> dict[str, float]:
        self.trained = {short(item.rollout_id): item for item in episodes}
        return super().update(episodes, **keywords)


def short(name: str) -> str:
    return name.rpartition("/train/")[2]


def started(
    tmp_path: Path,
    *,
    app: TaskApp | None = None,
    spoils: Sequence[str] = (),
    learner: Any = None,
    **keys: Any,
) -> tuple[Run, Watched, list[RolloutRequest]]:
    """A run whose first sibling unlocks something at once, and what it asks for.

    Rollouts whose ids end with one of `spoils` cannot be credited.
    """
    asked: list[RolloutRequest] = []

    def play(request: RolloutRequest) -> Rollout:
        if is_branch(request):
            played = played_on(request)
        else:
            played = finished(request, [WOOD, COW] if request.sibling == 0 else [WOOD, ()])
        return without_logprob(played) if request.rollout_id.endswith(tuple(spoils)) else played

    def answer(requests: Sequence[RolloutRequest]) -> Batch:
        asked.extend(requests)
        return Batch(tuple(map(play, requests)))

    learner = learner or Watched()
    run = make_run(tmp_path, train=answer, learner=learner, **{**FORKS, **keys})
    dispatcher: Any = run.dispatcher
    dispatcher.task_apps = SimpleNamespace(serving=(app or TaskApp(),), refuse_if_none_answers=lambda: None)
    return replace(run, reseedable=True), learner, asked


async def test_each_fork_is_a_group_with_draws_of_its_own_and_is_trained_and_counted_apart(tmp_path: Path):
    app = TaskApp()
    run, learner, asked = started(tmp_path, app=app)
    await train(run, Progress(), asyncio.Event())
    branches = [request for request in asked if is_branch(request)]
    assert len(branches) == 16 and len(app.replayed) == 8
    assert {request.start.snapshot for request in branches} == {"world after 1"}
    draws = {request.group_id: request.start.draws_seed for request in branches}
    assert len(set(draws.values())) == len(draws) == 8 and None not in draws.values()
    # Siblings 0 and 1 of a fork earn 1 and 0. The parent is not compared: the rule read its samples.
    advantages = {name: list(item.advantages) for name, item in learner.trained.items() if "branch" in name}
    assert set(map(tuple, advantages.values())) == {(1.0,), (-1.0,)}
    assert advantages["1/0/0/branch-2/0"] == [1.0]
    (row,) = rows_of(run.directory, "iteration")
    assert (row["forks/rollouts"], row["forks/share"]) == (16.0, 16 / 32)
    # In each group of four a parent earns 2 at its end (its outcome), the others 1; a fork half of one.
    assert row["forks/gain"] == pytest.approx(0.5 - (2 + 1 + 1 + 1) / 4)
    assert row["rollout/finished"] == row["group/count"] * 4 == 8.0
    assert row["episode/decisions"] == 2.0
    (line,) = read_ledger(run.directory.path)
    assert len(line.rollout_ids) == 24


async def test_a_blind_rule_compares_with_the_parent_and_shares_its_draws(tmp_path: Path):
    keys = {"algorithm__fork_rule": "uniform", "algorithm__branch_rollouts": 1}
    run, learner, asked = started(tmp_path, **keys, algorithm__branches_per_episode=8)
    await train(run, Progress(), asyncio.Event())
    assert {request.start.draws_seed for request in asked} == {None}
    # Of four siblings, the first one ends with an outcome of 2 and the others with 1.
    found = [list(learner.trained[f"1/0/{k}/branch-2/0"].advantages) for k in range(4)]
    assert found == [[-1.0], [0.0], [0.0], [0.0]]


async def test_what_has_its_snapshots_already_is_not_replayed(tmp_path: Path):
    app = TaskApp()
    keys = {"algorithm__fork_rule": "uniform", "algorithm__branches_per_episode": 8}
    run, _, asked = started(tmp_path, app=app, **keys)
    dispatcher: Any = run.dispatcher
    play = dispatcher._train

    def with_snapshots(requests: Sequence[RolloutRequest]) -> Batch:
        batch = play(requests)
        return Batch(tuple(map(snapped, batch.rollouts))) if not is_branch(requests[0]) else batch

    dispatcher._train = with_snapshots
    await train(run, Progress(), asyncio.Event())
    later = [request for request in asked if is_branch(request)]
    kept = {request.start.snapshot for request in later if "/1/0/0/" not in request.rollout_id}
    assert len(later) == 16 and kept == {"kept 2"}
    assert len(app.replayed) == 1, "one of eight has lost its snapshot"


def snapped(item: Rollout) -> Rollout:
    """With a snapshot before each decision, but for the first sibling of the first group."""
    if item.rollout_id.endswith("/1/0/0") or item.trajectory is None:
        return item
    steps = [step.model_copy(update={"snapshot": f"kept {step.turn}"}) for step in item.trajectory.steps]
    return item.model_copy(update={"trajectory": item.trajectory.model_copy(update={"steps": tuple(steps)})})


async def test_a_continuation_that_is_rejected_is_played_once_more_and_its_parent_stays(tmp_path: Path):
    run, learner, asked = started(tmp_path, spoils=["1/0/1/branch-2/0"])
    await train(run, Progress(), asyncio.Event())
    assert len(asked) == 8 + 16 + 1
    assert "1/0/1/branch-2/0:1" in learner.trained and "1/0/1/branch-2/0" not in learner.trained
    assert "1/0/1" in learner.trained and len(learner.trained) == 24
    (row,) = read_lines(run.directory.rejected_file("iteration_1"))
    assert row["rollout"]["rollout_id"].endswith("1/0/1/branch-2/0")


async def test_a_parent_that_is_rejected_takes_its_forks_along_and_is_forked_again(tmp_path: Path):
    run, learner, _ = started(tmp_path, spoils=["train/1/0/1"])
    await train(run, Progress(), asyncio.Event())
    of_it = sorted(name for name in learner.trained if name.startswith("1/0/1"))
    assert of_it == ["1/0/1.1/branch-2/0", "1/0/1.1/branch-2/1", "1/0/1:1"]
    assert len(learner.trained) == 24
    assert len(read_lines(run.directory.rejected_file("iteration_1"))) == 3
    stored = read_rollouts(run.directory.rollouts_file("branches_1"))
    assert {short(item.rollout_id) for item in stored} == {
        name for name in learner.trained if "branch" in name
    }


async def test_a_parent_without_values_is_rejected_and_the_others_are_forked_all_the_same(tmp_path: Path):
    keys = {"algorithm__advantage": "gae", "algorithm__fork_rule": "critic"}
    run, learner, _ = started(tmp_path, learner=Watched(unvalued="train/1/0/1"), **keys)
    await train(run, Progress(), asyncio.Event())
    assert len(learner.trained) == 24 and "1/0/1:1" in learner.trained
    assert learner.trained["1/0/0/branch-2/0"].critic is not None


async def test_groups_of_forks_are_never_refilled_and_flat_ones_are_skipped_like_others(tmp_path: Path):
    # The first sibling alone unlocks a cow, so no whole group is flat. Of every fork both earn the same.
    run, learner, asked = started(
        tmp_path, algorithm__gamma=1.0, training__skip_flat_groups=True, training__refill_rounds=2
    )

    def equal(requests: Sequence[RolloutRequest]) -> Batch:
        asked.extend(requests)
        return Batch(
            tuple(
                played_on(item.model_copy(update={"sibling": 1})).model_copy(update={"sibling": item.sibling})
                if is_branch(item)
                else finished(item, [WOOD, COW] if item.sibling == 0 else [WOOD, ()])
                for item in requests
            )
        )

    dispatcher: Any = run.dispatcher
    dispatcher._train = equal
    await train(run, Progress(), asyncio.Event())
    (row,) = rows_of(run.directory, "iteration")
    assert (row["group/flat"], row["group/refilled"], row["forks/share"]) == (0.0, 0.0, 0.0)
    assert (row["forks/count"], row["forks/flat"]) == (8.0, 8.0)
    assert len(asked) == 24 and len(learner.trained) == 8


def test_forks_have_no_share_of_an_update_without_decisions(tmp_path: Path):
    run, _, _ = started(tmp_path, training__skip_flat_groups=True)
    played = [finished(request, [WOOD, ()]) for request in run.planner.training(1)]
    found = run.credit.credit(played, Measured(branches={}))
    assert (found.episodes, found.metrics["forks/share"]) == ([], 0.0)


@pytest.mark.parametrize("how", ["departs", "is lost"])
async def test_a_replay_that_departs_ends_the_run_and_a_lost_one_costs_its_forks(tmp_path: Path, how: str):
    fails: list[Exception] = [TaskAppLost("gone")] * 2
    if how == "departs":
        fails = [ReplayDeparts("another episode at decision 1")]
    run, learner, _ = started(tmp_path, app=TaskApp(fails))
    if how == "departs":
        with pytest.raises(TaskAppError, match="played in another environment"):
            await train(run, Progress(), asyncio.Event())
        assert len(read_rollouts(run.directory.rollouts_file("iteration_1"))) == 8
        return
    await train(run, Progress(), asyncio.Event())
    assert len(learner.trained) == 8 + 14
    lines: list[str] = run.reporter.lines  # type: ignore[attr-defined]
    assert "no task app can be reached to replay 1 episodes; nothing plays on from them" in lines
