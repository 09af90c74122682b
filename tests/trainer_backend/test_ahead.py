"""Collecting ahead of the learner, in virtual time: what is asked when, and how old its tokens are."""

import asyncio
import dataclasses
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared_schemas.rollouts import Rollout, RolloutRequest
from tests.conftest import ListReporter, tiny_job
from tests.trainer_backend.test_train import Learner, Server, finished
from tests.virtual_time import in_virtual_time
from trainer_backend import job_parts
from trainer_backend.collect.batch import Batch
from trainer_backend.collect.dispatcher import Keep
from trainer_backend.errors import RunNotWritten, SamplerMismatch, TaskAppError
from trainer_backend.parts import CreditedEpisode, Progress
from trainer_backend.run.checkpointing import Saving
from trainer_backend.run.timeline import Timeline
from trainer_backend.rundir.layout import RunDirectory, create_run
from trainer_backend.rundir.spool import Spool, plan_id, read_ledger
from trainer_backend.train import Run, train


class Services(Server):
    """Task apps with `places`, a gateway and a learner: decisions and updates take virtual seconds.

    Args:
        decision_s: of one decision.
        update_s: of an update with its publish.
    """

    def __init__(self, places: int, decision_s: Callable[[], float], update_s: Callable[[], float]) -> None:
        super().__init__()
        self.version = 0
        self._free, self._waiting = places, list[tuple[int, int, asyncio.Future[None]]]()
        self._decision_s, self._update_s = decision_s, update_s
        self.asked_at = dict[int, int]()
        self.played, self.cancelled = list[str](), list[str]()
        self.start, self.fails_at = 1, -1

    async def publish(self, policy_version: int) -> None:
        if policy_version > self.version:
            await asyncio.sleep(self._update_s())
        self.version = policy_version

    async def collect(
        self, requests: Sequence[RolloutRequest], progress: object = None, keep: Keep | None = None
    ) -> Batch:
        if not requests:
            return Batch(())
        iteration = requests[0].iteration
        if "/train/" in requests[0].rollout_id:
            self.asked_at[iteration] = self.version
        if iteration == self.fails_at:
            raise TaskAppError("gone")
        rollouts = await asyncio.gather(*(self._play(request, keep) for request in requests))
        return Batch(tuple(rollouts))

    async def ack(self, run_id: str, rollouts: Sequence[Rollout]) -> None: ...

    async def _play(self, request: RolloutRequest, keep: Keep | None) -> Rollout:
        await self._place(request.iteration)
        try:
            rollout = finished(request)
            steps = []
            for step in rollout.trajectory.steps:
                tokens: Any = step.policy_logprobs
                call = tokens.model_copy(
                    update={"versions": ((0, self.version),), "logprobs": (-float(self.start),)}
                )
                await asyncio.sleep(self._decision_s())
                steps.append(step.model_copy(update={"policy_logprobs": call}))
        except asyncio.CancelledError:
            self.cancelled.append(plan_id(request.rollout_id))
            raise
        finally:
            self._leave()
        trajectory = rollout.trajectory.model_copy(update={"steps": tuple(steps)})
        rollout = rollout.model_copy(update={"trajectory": trajectory})
        if keep is not None:
            keep(rollout)
        self.played.append(plan_id(request.rollout_id))
        return rollout

    async def _place(self, rank: int) -> None:
        if not self._free:
            future = asyncio.get_running_loop().create_future()
            self._waiting.append((rank, len(self._waiting), future))
            await future
        else:
            self._free -= 1

    def _leave(self) -> None:
        waiting = [item for item in self._waiting if not item[2].done()]
        if waiting:
            first = min(waiting, key=lambda item: item[:2])
            self._waiting = [item for item in waiting if item is not first]
            first[2].set_result(None)
        else:
            self._free += 1


class Noting(Learner):
    """Notes what it learned from, by plan, and how old its tokens were."""

    def __init__(self, services: Services) -> None:
        super().__init__()
        self._services = services
        self.learned = list[list[str]]()
        self.behind = Counter[int]()
        self.versions = dict[float, set[int]]()  # by the start that played

    def update(
        self, episodes: Sequence[CreditedEpisode], *, iteration: int, policy_version: int | None = None
    ) -> dict[str, float]:
        assert policy_version in (None, self._services.version)
        self.learned.append(sorted(plan_id(item.rollout_id) for item in episodes))
        for segment in (part for item in episodes for part in item.segments):
            for version, logprob in zip(segment.versions.tolist(), segment.logprobs.tolist(), strict=True):
                self.behind[self._services.version - version] += 1
                self.versions.setdefault(-logprob, set()).add(version)
        return super().update(episodes, iteration=iteration)


def make_run(folder: Path, services: Services, learner: Learner, **settings: Any) -> Run:
    job = tiny_job(
        **{"training__group_size": 2, "rollout__episodes_per_batch": 4, "training__step_rewards_mode": "off",
           "evaluation__instances": 2, **settings},
    )  # fmt: skip
    directory = RunDirectory(folder, "tiny") if (folder / "run.json").exists() else create_run(job, folder)
    return Run(
        job_parts.planner(job, "r", Server.inference), job_parts.credit(job), services, services,  # type: ignore[arg-type]
        saving=Saving(job.training, job.evaluation, directory, learner), reporter=ListReporter(),  # type: ignore[arg-type]
    )  # fmt: skip


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    staleness=st.integers(0, 3), places=st.integers(1, 9), seed=st.integers(0, 999),
    update_s=st.sampled_from([0.0, 1.0, 30.0]), evaluate=st.sampled_from([2, 100]),
)  # fmt: skip
def test_no_token_is_older_than_the_bound_and_every_batch_is_its_plan(
    tmp_path_factory: pytest.TempPathFactory,
    staleness: int,
    places: int,
    seed: int,
    update_s: float,
    evaluate: int,
):
    draw = random.Random(seed)
    services = Services(places, lambda: draw.lognormvariate(0.0, 1.0), lambda: update_s * draw.random())
    learner = Noting(services)
    run = make_run(
        tmp_path_factory.mktemp("run"), services, learner, training__max_staleness=staleness,
        training__iterations=6, evaluation__every_n_iters=evaluate,
    )  # fmt: skip
    in_virtual_time(train(run, Progress(), asyncio.Event()))
    assert max(learner.behind) <= staleness and min(learner.behind) >= 0
    plans = [sorted(plan_id(item.rollout_id) for item in run.planner.training(k)) for k in range(1, 7)]
    assert learner.learned == plans, "nothing dropped, nothing twice, in order"
    assert services.asked_at == {k: max(k - 1 - staleness, 0) for k in range(1, 7)}


def test_where_collecting_and_updating_take_as_long_one_hides_the_other(tmp_path: Path):
    seconds = {}
    for staleness in (0, 1):
        services = Services(4, lambda: 5.0, lambda: 10.0)  # 2 decisions a rollout, all at once: 10 s
        run = make_run(
            tmp_path / str(staleness), services, Noting(services), training__max_staleness=staleness,
            training__iterations=10, evaluation__every_n_iters=100,
        )  # fmt: skip
        _, seconds[staleness] = in_virtual_time(train(run, Progress(), asyncio.Event()))
    evaluations = 2 * 10.0
    assert seconds[0] == 10 * (10.0 + 10.0) + evaluations
    assert seconds[1] == 11 * 10.0 + evaluations


def test_an_error_ahead_ends_the_run_in_its_turn_and_what_else_was_asked_for_is_cancelled(tmp_path: Path):
    services = Services(4, lambda: 5.0, lambda: 10.0)
    services.fails_at = 3
    run = make_run(
        tmp_path / "run", services, Noting(services), training__max_staleness=2, training__iterations=9,
        evaluation__every_n_iters=100,
    )  # fmt: skip
    with pytest.raises(TaskAppError, match="gone"):
        in_virtual_time(train(run, Progress(), asyncio.Event()))
    assert run.saving.is_saved(2), "two iterations were learned from"
    assert {name.split("/")[1] for name in services.cancelled} == {"5"}, "all of 4 had been played"


class NoRoom(Run):
    """A run whose disk is full when iteration 4 begins."""

    def iteration_spool(
        self, number: int, requests: Sequence[RolloutRequest], progress: Progress
    ) -> Spool | None:
        if number == 4:
            raise RunNotWritten("no space left")
        return super().iteration_spool(number, requests, progress)


def test_an_error_of_what_is_begun_early_loses_no_finished_iteration(tmp_path: Path):
    services = Services(4, lambda: 1.0, lambda: 1.0)
    run = make_run(
        tmp_path / "run", services, Noting(services), training__max_staleness=1, training__iterations=9,
        training__recovery_every=0, evaluation__every_n_iters=100,
    )  # fmt: skip
    run = NoRoom(**{field.name: getattr(run, field.name) for field in dataclasses.fields(run)})
    with pytest.raises(RunNotWritten, match="no space left"):
        in_virtual_time(train(run, Progress(), asyncio.Event()))
    assert run.saving.is_saved(2)


def test_tokens_that_are_older_than_the_bound_are_refused(tmp_path: Path):
    services = Services(4, lambda: 1.0, lambda: 1.0)
    run = make_run(
        tmp_path / "run", services, Learner(), training__max_staleness=1, training__iterations=9,
        evaluation__every_n_iters=100,
    )  # fmt: skip

    async def publish(version: int) -> None:  # a server that never loads anything
        return

    services.publish = publish  # type: ignore[method-assign]
    with pytest.raises(SamplerMismatch, match=r"2 versions behind, and training\.max_staleness is 1"):
        in_virtual_time(train(run, Progress(), asyncio.Event()))
    assert [entry.iteration for entry in read_ledger(run.directory.path)] == [1, 2]


@pytest.mark.parametrize("killed_at", [35.0, 50.0, 60.0, 73.0, 88.0])
def test_a_resumed_run_uses_what_saved_weights_have_played_and_asks_for_the_rest(tmp_path, killed_at):
    draw = random.Random(7)
    keys = {"training__max_staleness": 1, "training__iterations": 9, "training__checkpoint_every": 2,
            "training__recovery_every": 0, "evaluation__every_n_iters": 100}  # fmt: skip
    first = Services(3, lambda: draw.uniform(2.0, 6.0), lambda: 8.0)
    run = make_run(tmp_path / "run", first, Noting(first), **keys)

    async def killed() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(killed_at):
                await train(run, Progress(), asyncio.Event())

    in_virtual_time(killed())
    checkpoint = max(run.directory.checkpoints.glob("iteration_*"), key=lambda path: path.name)
    saved = int((checkpoint / "state.json").read_text())
    assert 0 < saved < 8
    second = Services(3, lambda: draw.uniform(2.0, 6.0), lambda: 8.0)
    second.version, second.start = saved, 2
    learner, reporter = Noting(second), ListReporter()
    again = make_run(tmp_path / "run", second, learner, **keys)
    again.directory.go_back_to(saved, reporter.say, policy_version=saved)
    in_virtual_time(train(again, Progress(saved, saved, saved), asyncio.Event()))
    plans = [sorted(plan_id(item.rollout_id) for item in run.planner.training(k)) for k in range(1, 10)]
    assert learner.learned == plans[saved:]
    assert [entry.iteration for entry in read_ledger(again.directory.path)] == list(range(1, 10))
    assert max(learner.behind) <= 1
    assert max(learner.versions.get(1.0, {0})) <= saved, "later weights of the first start are lost"
    usable = [
        json.loads(line)
        for path in run.directory.rollouts.glob("*.unused-*.jsonl")
        for line in path.read_text().splitlines()[1:]
    ]
    played_twice = set(first.played) & set(second.played)
    assert played_twice <= {plan_id(row["rollout_id"]) for row in usable}, "nothing is lost"


def test_who_waited_is_counted_and_work_that_had_to_wait_is_told_from_when_it_need_not():
    now = 0.0
    timeline = Timeline(clock=lambda: now)
    with timeline.working("collect") as first:  # 0 to 10
        now = 4.0
        with timeline.working("collect") as second, timeline.working("learn"):  # 4 to 6, both lanes
            now = 6.0
        ahead = timeline.working("collect")
        third = ahead.__enter__()
        now = 10.0
    with timeline.working("learn"):  # 10 to 13, while the third runs
        now = 13.0
    ahead.__exit__(None, None, None)
    with timeline.working("learn"):
        now = 20.0
    assert [(span.start, span.end) for span in (first, second, third)] == [(0, 10), (4, 6), (10, 13)]
    # collecting alone 0 to 4 and 6 to 10, both 4 to 6 and 10 to 13, learning alone 13 to 20
    assert timeline.waits() == {
        "time/wait_collect_s": 8.0, "time/wait_learner_s": 7.0, "perf/overlap": 5.0 / 20.0,
    }  # fmt: skip
    assert timeline.waits()["perf/overlap"] == 0.0
