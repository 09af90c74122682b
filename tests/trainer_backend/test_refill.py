"""Flat groups in the loop of a run: skipped, replaced within bounds, and never lost."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from shared_schemas.rollouts import RolloutRequest
from tests.conftest import rows_of
from tests.trainer_backend.pages.hand_made import COW, WOOD
from tests.trainer_backend.test_train import Learner, all_finished, failed, finished, gone, make_run
from trainer_backend.collect.batch import Batch
from trainer_backend.core.critic import CriticTargets, OfEpisode
from trainer_backend.core.segments import Segment
from trainer_backend.errors import TaskAppError
from trainer_backend.parts import CreditedEpisode, Progress
from trainer_backend.rundir.rollout_files import finished_rows, read_rollouts
from trainer_backend.train import Run, train

SKIP = {"training__skip_flat_groups": True, "training__iterations": 1, "algorithm__advantage": "grpo"}
REFILL = {**SKIP, "training__refill_rounds": 2}


class Watched(Learner):
    """Remembers which groups it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.trained: list[str] = []
        self.asked: list[list[str]] = []
        self.critics: list[CriticTargets | None] = []

    def values(self, episodes: Mapping[str, Sequence[Segment]]) -> dict[str, OfEpisode]:
        """Right about the first round, whose episodes earn 0 and then 2 with gamma 1/2; 0 for all others."""
        self.asked.append(sorted({name.rsplit("/", 1)[0] for name in episodes}))
        return {name: [1.0, 2.0] if "/train/" in name else [0.0, 0.0] for name in episodes}

    def update(
        self, episodes: Sequence[CreditedEpisode], *, iteration: int, policy_version: int | None = None
    ) -> dict[str, float]:
        self.critics = [item.critic for item in episodes]
        self.trained += sorted({item.rollout_id.split("/", 1)[1].rsplit("/", 1)[0] for item in episodes})
        return super().update(episodes, iteration=iteration)


def with_spread(*groups: str):
    """The first sibling of these groups unlocks more than the others; in other groups all are equal."""

    def answer(requests: Sequence[RolloutRequest]) -> Batch:
        def of(request: RolloutRequest) -> list[Any]:
            rich = request.group_id in groups and request.sibling == 0
            return [WOOD, COW] if rich else [WOOD, ()]

        return Batch(tuple(finished(request, of(request)) for request in requests))

    return answer


def watched_run(
    tmp_path: Path, answer: Any, settings: dict[str, Any]
) -> tuple[Run, Watched, list[list[str]]]:
    """A run of one iteration, its learner, and the groups that each plan of it asked for."""
    learner, asked = Watched(), []

    def answering(requests: Sequence[RolloutRequest]) -> Batch | None:
        if requests[0].group_id.startswith("eval"):
            return all_finished(requests)
        asked.append(sorted({request.group_id for request in requests}))
        return answer(requests)

    return (
        make_run(tmp_path, learner=learner, train=answering, evaluation=answering, **settings),
        learner,
        asked,
    )


def iteration_row(run: Run) -> dict[str, Any]:
    (row,) = rows_of(run.directory, "iteration")
    return row


async def test_a_flat_group_is_stored_and_let_go_but_not_trained(tmp_path: Path):
    run, learner, asked = watched_run(tmp_path, with_spread("train/1/1"), SKIP)
    await train(run, Progress(), asyncio.Event())
    assert asked == [["train/1/0", "train/1/1"]]
    assert learner.trained == ["train/1/1"]
    assert (learner.asked, learner.critics) == ([], [None] * 4), "without a critic"
    stored = read_rollouts(run.directory.rollouts_file("iteration_1"))
    assert len(stored) == 8
    assert {item.rollout_id for item in stored} <= set(run.dispatcher.acked)
    row = iteration_row(run)
    assert (row["group/flat"], row["group/refilled"], row["episode/count"]) == (1, 0, 8)


async def test_without_the_switch_everything_is_trained_and_the_flat_ones_are_counted(tmp_path: Path):
    off = {"training__iterations": 1, "algorithm__advantage": "grpo"}
    run, learner, _ = watched_run(tmp_path, with_spread("train/1/1"), off)
    await train(run, Progress(), asyncio.Event())
    assert learner.trained == ["train/1/0", "train/1/1"]
    assert iteration_row(run)["group/flat"] == 1


async def test_a_refill_asks_for_as_many_groups_as_were_flat_until_none_is(tmp_path: Path):
    run, learner, asked = watched_run(tmp_path, with_spread("refill-1/1/0", "refill-2/1/0"), REFILL)
    await train(run, Progress(), asyncio.Event())
    assert asked == [["train/1/0", "train/1/1"], ["refill-1/1/0", "refill-1/1/1"], ["refill-2/1/0"]]
    assert learner.trained == ["refill-1/1/0", "refill-2/1/0"]
    row = iteration_row(run)
    assert (row["group/flat"], row["group/refilled"], row["episode/count"]) == (3, 3, 20)
    assert len(read_rollouts(run.directory.rollouts_file("iteration_1"))) == 20
    assert len([name for name in run.dispatcher.acked if "/eval" not in name]) == 20


async def test_the_refill_is_bounded_and_with_nothing_to_learn_no_step_is_taken(tmp_path: Path):
    run, learner, asked = watched_run(tmp_path, with_spread(), REFILL)
    progress = await train(run, Progress(), asyncio.Event())
    assert [len(groups) for groups in asked] == [2, 2, 2]
    assert learner.trained == []
    assert progress == Progress(iteration=1, policy_version=0, updates=0)
    row = iteration_row(run)
    assert (row["optim/steps"], row["policy/version"], row["group/flat"]) == (0, 0, 6)
    assert run.reporter.lines == ["iteration 1: every group is flat, so no step is taken"]


def in_states(key):
    """The first sibling of each group unlocks more; `key` names the state of a sibling's decision t."""

    def answer(requests: Sequence[RolloutRequest]) -> Batch:
        played = []
        for request, rollout in zip(
            requests, with_spread("train/1/0", "train/1/1")(requests).rollouts, strict=True
        ):
            steps = []
            for t, step in enumerate(rollout.trajectory.steps):
                keys = {"default": key(request.sibling, t)}
                seen = step.observation_data.model_copy(update={"state_keys": keys})
                steps.append(step.model_copy(update={"observation_data": seen}))
            episode = rollout.trajectory.model_copy(update={"steps": tuple(steps)})
            played.append(rollout.model_copy(update={"trajectory": episode}))
        return Batch(tuple(played))

    return answer


@pytest.mark.parametrize("name", ["gigpo", "g2po", "graphgpo", "gagpo"])
async def test_states_that_never_repeat_are_told(tmp_path: Path, name: str):
    table = {"training__iterations": 1, "algorithm__advantage": name}
    apart, _, _ = watched_run(tmp_path / "apart", in_states(lambda i, t: f"{i * t}.{t}"), table)
    await train(apart, Progress(), asyncio.Event())
    (told,) = apart.reporter.lines
    assert told.startswith(
        f"iteration 1: no state was met twice after the start, so algorithm.advantage = '{name}'"
    )
    met, _, _ = watched_run(tmp_path / "met", in_states(lambda i, t: str(t)), table)
    await train(met, Progress(), asyncio.Event())
    assert met.reporter.lines == []


async def test_with_a_critic_each_round_is_scored_once_and_what_it_was_right_about_is_flat(tmp_path: Path):
    critic = {**REFILL, "algorithm__advantage": "gae", "algorithm__gamma": 0.5}
    run, learner, _ = watched_run(tmp_path, all_finished, critic)
    await train(run, Progress(), asyncio.Event())
    assert learner.asked == [
        ["run.1/train/1/0", "run.1/train/1/1"],
        ["run.1/refill-1/1/0", "run.1/refill-1/1/1"],
    ]
    assert learner.trained == ["refill-1/1/0", "refill-1/1/1"]
    # lambda 0.95: the last earned 2 and its value was 0; the one before is worth 1/2 * 0.95 * 2
    assert learner.critics == [CriticTargets([0.0, 0.0], [0.95, 2.0])] * 8
    (row, *_) = finished_rows(run.directory.rollouts_file("iteration_1"), ["decisions"])
    assert [decision["value"] for decision in row["decisions"]] == [1.0, 2.0]


async def test_a_group_that_failed_is_not_flat_and_not_replaced(tmp_path: Path):
    def lossy(requests: Sequence[RolloutRequest]) -> Batch:
        lost = [request for request in requests if request.group_id == "train/1/0"]
        rest = with_spread("train/1/1")([request for request in requests if request not in lost])
        return Batch(rest.rollouts, tuple(failed(request) for request in lost))

    run, _, asked = watched_run(tmp_path, lossy, REFILL | {"training__max_lost_share": 0.5})
    await train(run, Progress(), asyncio.Event())
    assert len(asked) == 1
    assert iteration_row(run)["group/flat"] == 0


@pytest.mark.parametrize("ends", ["stopped", "gone"])
async def test_what_was_collected_before_a_refill_that_never_came_is_on_disk(tmp_path: Path, ends: str):
    stop = asyncio.Event()

    def answer(requests: Sequence[RolloutRequest]) -> Batch | None:
        if requests[0].group_id.startswith("train/"):
            return with_spread()(requests)
        stop.set()
        return gone(requests) if ends == "gone" else None

    run, _, _ = watched_run(tmp_path, answer, REFILL)
    if ends == "gone":
        with pytest.raises(TaskAppError):
            await train(run, Progress(), asyncio.Event())
    else:
        assert (await train(run, Progress(), stop)).iteration == 0
    stored = read_rollouts(run.directory.rollouts_file("iteration_1"))
    assert sorted({item.group_id for item in stored}) == ["train/1/0", "train/1/1"]
    assert {item.rollout_id for item in stored} <= set(run.dispatcher.acked)
