"""The loop of a run on stand-ins for learner, gateway, task apps: what is saved when something goes wrong."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from shared_schemas.rollouts import Rollout, RolloutFailure, RolloutRequest
from shared_schemas.trajectory import PolicyLogprobs, Sampling
from tests.conftest import ListReporter, rows_of, tiny_job
from tests.trainer_backend.pages.hand_made import COW, TABLE, WOOD, rollout
from trainer_backend import job_parts
from trainer_backend.collect.batch import Batch
from trainer_backend.collect.dispatcher import Keep
from trainer_backend.collect.losses import Losses, losses_in
from trainer_backend.collect.metrics import count_worlds
from trainer_backend.collect.plan import Inference
from trainer_backend.errors import (
    CheckpointError,
    NonFiniteLoss,
    NothingToLearnFrom,
    RunNotWritten,
    SegmentError,
    TaskAppError,
    TooManyLost,
    TrainerError,
    place,
)
from trainer_backend.parts import CreditedEpisode, Progress
from trainer_backend.run.checkpointing import Saving
from trainer_backend.run.iteration_metrics import inference_metrics
from trainer_backend.rundir.checkpoint_paths import BestMark, best_checkpoint, best_mark
from trainer_backend.rundir.files import read_lines
from trainer_backend.rundir.layout import RunDirectory, create_run
from trainer_backend.rundir.rollout_files import read_rollouts
from trainer_backend.rundir.spool import read_ledger
from trainer_backend.train import Run, train, work_left

# None: the rollouts never end.
Answer = Callable[[Sequence[RolloutRequest]], Batch | None]


class Learner:
    """`fails_at` names the iteration whose update raises, after `steps_taken` of its steps."""

    def __init__(self, fails_at: int = -1, steps_taken: int = 0) -> None:
        self.fails_at = fails_at
        self.steps_taken = steps_taken

    def warm_up(self, episodes: object, tell: object) -> dict[str, float]:
        raise AssertionError

    def update(
        self, episodes: Sequence[CreditedEpisode], *, iteration: int, policy_version: int | None = None
    ) -> dict[str, float]:
        if iteration == self.fails_at:
            error = NonFiniteLoss("the loss is nan")
            error.steps_taken = self.steps_taken
            raise error
        return {"optim/steps": 1.0}

    def save(self, folder: Path, progress: Progress) -> None:
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(str(progress.iteration))


UNTRUNCATED = {"truncated_tokens": 0, "lost_mass": 0.0}


class Watched(Learner):
    """Calls `at_update` at the begin of each update."""

    def __init__(self, at_update: Callable[[], object]) -> None:
        super().__init__()
        self._at_update = at_update

    def update(self, *arguments: Any, **keywords: Any) -> dict[str, float]:
        self._at_update()
        return super().update(*arguments, **keywords)


class Server:
    inference = Inference("http://127.0.0.1:1", "tiny/actor", SecretStr("k"))

    def __init__(self) -> None:
        self._looked_at = 0
        self.calls: list[str] = []

    async def publish(self, policy_version: int) -> None:
        self.calls.append(f"publish {policy_version}")

    async def release(self) -> None:
        self.calls.append("release")

    async def resume(self) -> None:
        """It serves all the time."""

    async def while_serving(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await work

    async def totals(self) -> dict[str, float]:
        """Between two looks: 6 requests of 2 prompt tokens, 4 engine steps, 10 sampled tokens."""
        self._looked_at += 1
        each = {"requests": 6, "prompt_tokens": 12, "sampled_tokens": 10, "steps": 4, **UNTRUNCATED}
        return {name: count * self._looked_at for name, count in each.items()}


class Dispatcher:
    """Answers a plan by its stage: "train" or "eval"."""

    def __init__(self, train: Answer, evaluation: Answer) -> None:
        self._train, self._evaluation = train, evaluation
        self.acked: list[str] = []

    async def collect(
        self, requests: Sequence[RolloutRequest], progress: object = None, keep: Keep | None = None
    ) -> Batch:
        if not requests:
            return Batch(())
        is_training = "/train/" in requests[0].rollout_id
        found = (self._train if is_training else self._evaluation)(requests)
        if found is None:
            await asyncio.Event().wait()
        for item in found.rollouts if keep is not None else ():
            keep(item)
        return found

    async def ack(self, run_id: str, rollouts: Sequence[Rollout]) -> None:
        assert all(item.run_id == run_id for item in rollouts)
        self.acked += [item.rollout_id for item in rollouts]


def finished(request: RolloutRequest, unlocked: Any = (WOOD, COW)) -> Rollout:
    """What a task app would send for this request, sampled token and all."""
    played = rollout(request.start.seed, list(unlocked), group=request.group_id, sibling=request.sibling)
    call = PolicyLogprobs(
        prompt_token_ids=(1, 2), token_ids=(3,), logprobs=(-1.0,), finish_reason="stop", versions=((0, 0),)
    )
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=8, seed=0)
    steps = tuple(
        step.model_copy(update={"policy_logprobs": call, "sampling": sampling})
        for step in played.trajectory.steps
    )
    return played.model_copy(
        update={
            "rollout_id": request.rollout_id,
            "run_id": request.run_id,
            "attempt": request.attempt,
            "trajectory": played.trajectory.model_copy(update={"steps": steps}),
        }
    )


def failed(request: RolloutRequest) -> Rollout:
    return finished(request).model_copy(
        update={
            "status": "failed",
            "trajectory": None,
            "failure": RolloutFailure(code="inference_unavailable", detail="connection refused"),
        }
    )


def all_finished(requests: Sequence[RolloutRequest]) -> Batch:
    return Batch(tuple(finished(request) for request in requests))


def all_failed(requests: Sequence[RolloutRequest]) -> Batch:
    count = Counter({"inference_unavailable": 2 * len(requests)})
    return Batch((), tuple(failed(request) for request in requests), count)


def earning(*unlocked: Sequence[Any]) -> Answer:
    """All rollouts of a call unlock the same; the last one of these holds for all further calls."""
    left = list(unlocked)

    def answer(requests: Sequence[RolloutRequest]) -> Batch:
        of_each = left.pop(0) if len(left) > 1 else left[0]
        return Batch(tuple(finished(request, of_each) for request in requests))

    return answer


def losing(count: int) -> Answer:
    """The first `count` rollouts are lost."""
    return lambda requests: Batch(
        tuple(map(finished, requests[count:])), tuple(map(failed, requests[:count]))
    )


def gone(requests: Sequence[RolloutRequest]) -> Batch:
    raise TaskAppError("no app answers")


def from_call(number: int, then: Answer, before: Answer = all_finished) -> Answer:
    """`before` for the first calls, `then` from this call on."""
    calls = 0

    def answer(requests: Sequence[RolloutRequest]) -> Batch | None:
        nonlocal calls
        calls += 1
        return (then if calls >= number else before)(requests)

    return answer


def make_run(
    tmp_path: Path,
    *,
    train: Answer = all_finished,
    evaluation: Answer = all_finished,
    learner: Learner | None = None,
    **overrides: Any,
) -> Run:
    settings = {"checkpoint_every": 100, "recovery_every": 0, "iterations": 4, "step_rewards_mode": "off"}
    job = tiny_job(**{f"training__{key}": value for key, value in settings.items()} | overrides)
    directory: RunDirectory = create_run(job, tmp_path / "run")
    dispatcher: Any = Dispatcher(train, evaluation)
    return Run(
        job_parts.planner(job, "run.1", Server.inference),
        job_parts.credit(job),
        dispatcher,
        Server(),
        saving=Saving(job.training, job.evaluation, directory, learner or Learner()),
        reporter=ListReporter(),
    )


def saved(run: Run) -> list[str]:
    return sorted(path.name for path in run.directory.checkpoints.glob("iteration_*"))


async def test_each_evaluation_finds_its_checkpoint_saved_and_the_best_is_marked_at_last_by_the_next_start(
    tmp_path: Path,
):
    seen: list[list[str]] = []

    class Watching(ListReporter):
        def metrics(self, row: dict[str, Any], line: str) -> None:
            if row["kind"] == "evaluation":
                seen.append(saved(run))

    answers = earning([WOOD, ()], [WOOD, COW], [WOOD, ()])
    run = replace(make_run(tmp_path, evaluation=answers), reporter=Watching())
    progress = await train(run, Progress(), asyncio.Event())
    assert (progress.iteration, work_left(run, progress)) == (4, False)
    assert [names[-1] for names in seen] == ["iteration_0", "iteration_2", "iteration_4"]
    assert best_checkpoint(run.directory.checkpoints).name == "iteration_2"
    for name in ("best", "best.json"):  # as if a kill had come before them
        (run.directory.checkpoints / name).unlink()
    await train(run, progress, asyncio.Event())
    assert (run.directory.checkpoints / "best").resolve().name == "iteration_2"
    assert best_mark(run.directory.checkpoints) is not None


async def test_rows_that_are_lost_leave_the_best_where_it_is_until_an_evaluation_is_better(tmp_path: Path):
    run = make_run(tmp_path, evaluation=earning([WOOD, ()], [WOOD, COW], [WOOD, ()]))
    progress = await train(run, Progress(), asyncio.Event())
    assert run.directory.missing_rows(4) is None
    run.directory.metrics_file.write_text("")
    told = run.directory.missing_rows(4)
    assert told is not None and "has lost the rows of 4 of 4 iterations, the first of iteration 1" in told
    again = replace(run, dispatcher=Dispatcher(run.dispatcher._train, earning([WOOD, ()])))
    await train(again, progress, asyncio.Event())
    assert [row["iteration"] for row in rows_of(run.directory, "evaluation")] == [4]
    assert best_mark(run.directory.checkpoints) == BestMark(run.directory.checkpoints / "iteration_2", 2.0)
    run.directory.metrics_file.write_text("")
    better = replace(run, dispatcher=Dispatcher(run.dispatcher._train, earning([WOOD, COW, TABLE])))
    await train(better, progress, asyncio.Event())
    assert best_checkpoint(run.directory.checkpoints).name == "iteration_4"


async def test_a_row_whose_checkpoint_is_gone_is_not_marked(tmp_path: Path):
    run = make_run(tmp_path, training__iterations=0)
    run.directory.append_metrics(
        {"kind": "evaluation", "iteration": 7, "eval/outcome_reward": 99.0, "rollout/failed": 0.0}
    )
    await train(run, Progress(), asyncio.Event())
    assert best_checkpoint(run.directory.checkpoints).name == "iteration_0"


@pytest.mark.parametrize(
    ("most", "best", "told"),
    [
        (0.25, "iteration_2", "by the 3 of 4 worlds that both finished"),
        (0.2, "iteration_0", "only 3 of 4 worlds"),
    ],
)
async def test_an_evaluation_that_lost_a_world_is_compared_by_the_others_or_says_that_it_is_not(
    tmp_path: Path, most: float, best: str, told: str
):
    evaluation = from_call(2, losing(1), before=earning([WOOD, ()]))
    run = make_run(tmp_path, evaluation=evaluation, training__max_lost_share=most)
    await train(run, Progress(), asyncio.Event())
    rows = rows_of(run.directory, "evaluation")
    assert [row["eval/outcome_reward"] for row in rows] == [1.0, 2.0, 2.0]
    assert [count_worlds(row) for row in rows] == ["4 worlds", "3 of 4 worlds", "3 of 4 worlds"]
    assert best_checkpoint(run.directory.checkpoints).name == best
    (note,) = [line for line in run.reporter.lines if line.startswith("evaluation after iteration 2 ")]
    assert told in note


@pytest.mark.parametrize(
    ("answers", "iteration"),
    [({"train": from_call(4, gone)}, 3), ({"evaluation": from_call(3, gone)}, 4)],
    ids=["collecting", "evaluating"],
)
async def test_an_error_of_the_rollouts_loses_no_finished_iteration(tmp_path, answers, iteration):
    run = make_run(tmp_path, **answers)
    with pytest.raises(TaskAppError, match="no app answers"):
        await train(run, Progress(), asyncio.Event())
    assert saved(run)[-1] == f"iteration_{iteration}"


@pytest.mark.parametrize(("steps_taken", "kept"), [(0, ["iteration_0", "iteration_1"]), (1, ["iteration_0"])])
async def test_an_update_that_broke_half_way_is_not_saved_and_what_came_before_it_is(
    tmp_path: Path, steps_taken: int, kept: list[str]
):
    run = make_run(tmp_path, learner=Learner(fails_at=2, steps_taken=steps_taken))
    with pytest.raises(NonFiniteLoss):
        await train(run, Progress(), asyncio.Event())
    assert saved(run) == kept
    assert not run.directory.rejected_file("iteration_2").exists(), "the error names no rollout"


async def test_a_checkpoint_for_a_resume_alone_stays_until_the_next_one_is_there(tmp_path: Path):
    seen: list[list[str]] = []

    def look() -> None:
        seen.append([name.removeprefix("iteration_") for name in saved(run)])

    run = make_run(
        tmp_path, learner=Watched(look), training__iterations=6, training__recovery_every=1,
        training__checkpoint_every=3, training__keep_checkpoints=1, evaluation__every_n_iters=100,
    )  # fmt: skip
    await train(run, Progress(), asyncio.Event())
    assert seen == [["0"], ["0", "1"], ["0", "2"], ["0", "3"], ["0", "3", "4"], ["0", "3", "5"]]
    assert saved(run) == ["iteration_0", "iteration_6"]


async def test_rollouts_are_only_kept_for_a_start_that_would_have_their_weights_again(tmp_path: Path):
    spools: list[list[str]] = []

    def look() -> None:
        spools.append(list_spools(run))

    run = make_run(tmp_path, learner=Watched(look), training__recovery_every=2, evaluation__every_n_iters=100)
    await train(run, Progress(), asyncio.Event())
    first, third = "iteration_1.spool.jsonl", "iteration_3.spool.jsonl"
    # After 0 and 2 there is a checkpoint, and with it the spools before it are gone.
    assert spools == [[first], [first], [third], [third]]
    assert not list(run.directory.rollouts.glob("*.spool.jsonl"))


@pytest.mark.parametrize("staleness", [0, 1])
async def test_the_servers_memory_is_free_for_the_learner_unless_it_collects_ahead(tmp_path, staleness):
    run = make_run(tmp_path, training__iterations=2, training__max_staleness=staleness)
    await train(run, Progress(0, 0, 0), asyncio.Event())
    between = [] if staleness else ["release"]
    assert run.server.calls == ["publish 0", *between, "publish 1", *between, "publish 2"]


def list_spools(run: Run) -> list[str]:
    return sorted(path.name for path in run.directory.rollouts.glob("iteration_*.spool.jsonl"))


class Slow(Learner):
    """Writes a checkpoint once the rollouts of the next iteration are there, and fails at one of them."""

    def __init__(self, fails_to_save: int = -1) -> None:
        super().__init__()
        self.collected, self.is_saving = threading.Event(), False
        self.fails_to_save = fails_to_save
        self.updates: list[int] = []

    def save(self, folder: Path, progress: Progress) -> None:
        self.is_saving = True
        assert self.collected.wait(60), "nothing was collected meanwhile"
        if progress.iteration == self.fails_to_save:
            raise CheckpointError("no space left on the disk")
        super().save(folder, progress)
        self.is_saving = False

    def update(self, *arguments: Any, iteration: int, **keywords: Any) -> dict[str, float]:
        assert not self.is_saving, "it would change what is being written"
        self.collected.clear()
        self.updates.append(iteration)
        return super().update(*arguments, iteration=iteration, **keywords)


class Meanwhile(Dispatcher):
    """Looks at the spools on disk when all rollouts are kept, and lets a checkpoint be written then."""

    def __init__(self, learner: Slow) -> None:
        super().__init__(all_finished, all_finished)
        self._learner, self.spools = learner, list[list[str]]()

    async def collect(self, *arguments: Any, **keywords: Any) -> Batch:
        found = await super().collect(*arguments, **keywords)
        self.spools.append(sorted(path.name for path in self.folder.glob("*.spool.jsonl")))
        self._learner.collected.set()
        return found

    folder: Path


def slow_run(tmp_path: Path, learner: Slow) -> tuple[Run, Meanwhile]:
    run = make_run(
        tmp_path, learner=learner, training__recovery_every=1, training__iterations=2,
        evaluation__every_n_iters=100,
    )  # fmt: skip
    dispatcher = Meanwhile(learner)
    dispatcher.folder = run.directory.rollouts
    return replace(run, dispatcher=dispatcher), dispatcher


async def test_a_checkpoint_is_written_while_the_next_rollouts_are_collected_and_before_they_are_learned_from(
    tmp_path: Path,
):
    learner = Slow()
    run, dispatcher = slow_run(tmp_path, learner)
    await train(run, Progress(), asyncio.Event())
    assert learner.updates == [1, 2]
    assert saved(run) == ["iteration_0", "iteration_2"]
    # On disk they would be of weights that no checkpoint holds yet. The last look is the evaluation's.
    assert dispatcher.spools[0] == [] and "iteration_2.spool.jsonl" not in dispatcher.spools[-2]
    assert list_spools(run) == [], "all was learned from"


async def test_a_checkpoint_that_cannot_be_written_ends_the_run_before_the_next_update(tmp_path: Path):
    learner = Slow(fails_to_save=1)
    run, _ = slow_run(tmp_path, learner)
    with pytest.raises(CheckpointError, match="no space left"):
        await train(run, Progress(), asyncio.Event())
    assert learner.updates == [1]
    assert saved(run) == ["iteration_0"]
    assert list_spools(run) == ["iteration_1.spool.jsonl"], "what it was learned from is still needed"


async def test_a_checkpoint_that_cannot_be_written_cuts_the_running_collection_short(tmp_path: Path):
    class Full(Learner):
        def save(self, folder: Path, progress: Progress) -> None:
            if progress.iteration == 1:
                raise CheckpointError("no space left on the disk")
            super().save(folder, progress)

    endless = from_call(2, lambda requests: None)
    settings = {"training__recovery_every": 1, "evaluation__every_n_iters": 100}
    run = make_run(tmp_path, train=endless, learner=Full(), **settings)
    with pytest.raises(CheckpointError, match="no space left"):
        await train(run, Progress(), asyncio.Event())


async def test_a_checkpoint_is_whole_before_any_error_leaves_the_run(tmp_path: Path):
    learner = Slow()

    def broken(requests: Sequence[RolloutRequest]) -> Batch:
        learner.collected.set()
        raise RuntimeError("a bug")

    run, dispatcher = slow_run(tmp_path, learner)
    dispatcher._train = from_call(2, broken)
    with pytest.raises(RuntimeError, match="a bug"):
        await train(run, Progress(), asyncio.Event())
    assert saved(run) == ["iteration_0", "iteration_1"] and not learner.is_saving


async def test_spooled_rollouts_that_cannot_be_written_end_the_run(tmp_path: Path):
    learner = Slow()
    run, _ = slow_run(tmp_path, learner)

    def refuse() -> None:
        raise RunNotWritten("the spool cannot be written")

    await run.saving.save(Progress())
    run.saving.once_written(refuse)
    learner.collected.set()
    with pytest.raises(RunNotWritten, match="the spool"):
        await run.saving.settled()


@pytest.mark.parametrize(
    ("stage", "name", "file", "count"),
    [
        ("train", "iteration 1", "iteration_1", 8),
        ("evaluation", "evaluation after iteration 0", "evaluation_0", 4),
    ],
)
async def test_when_every_rollout_fails_the_record_is_kept_and_the_cause_is_told(
    tmp_path: Path, stage: str, name: str, file: str, count: int
):
    run = make_run(tmp_path, **{stage: all_failed})
    with pytest.raises(NothingToLearnFrom, match=f"{name}: {count} of {count} .* connection refused"):
        await train(run, Progress(), asyncio.Event())
    stored = read_rollouts(run.directory.rollouts_file(file))
    assert [item.failure.detail for item in stored] == ["connection refused"] * count


@pytest.mark.parametrize("stage", ["train", "evaluation"])
async def test_a_loss_that_is_no_accident_ends_the_run_saved_and_a_resumed_one_plays_the_lost_again(
    tmp_path: Path, stage: str
):
    keys: dict[str, Any] = {"training__recovery_every": 1, "evaluation__instances": 8}
    run = make_run(tmp_path, **{stage: from_call(2, losing(2))}, **keys)
    name = "iteration 2" if stage == "train" else "evaluation after iteration 2"
    told = f"{name}: 2 of 8 rollouts lost: connection refused"
    with pytest.raises(TooManyLost, match=told):
        await train(run, Progress(), asyncio.Event())
    assert told in run.reporter.lines
    # Its row is for the page and the report; a start that plays the stage again drops it.
    assert losses_in(rows_of(run.directory, "lost")[-1]) == Losses(2, 8, ((2, "connection refused"),))
    done = 1 if stage == "train" else 2
    run.directory.forget_after(done)
    assert not rows_of(run.directory, "lost")
    assert saved(run)[-1] == f"iteration_{done}"
    asked: list[int] = []

    def honest(requests: Sequence[RolloutRequest]) -> Batch:
        asked.append(len(requests))
        return all_finished(requests)

    answers = {"train": all_finished, "evaluation": all_finished, stage: honest}
    dispatcher: Any = Dispatcher(answers["train"], answers["evaluation"])
    resumed = replace(run, dispatcher=dispatcher, reporter=ListReporter())
    progress = await train(resumed, Progress(done, done, done), asyncio.Event())
    assert (progress.iteration, asked[0]) == (4, 2)


async def test_a_loss_within_the_share_is_told_and_stays_in_the_row(tmp_path: Path):
    run = make_run(tmp_path, train=from_call(2, losing(1)), training__iterations=2)
    await train(run, Progress(), asyncio.Event())
    assert "iteration 2: 1 of 8 rollouts lost: connection refused" in run.reporter.lines
    assert [losses_in(row).count for row in rows_of(run.directory, "iteration")] == ["0 of 8", "1 of 8"]


class Rejecting(Learner):
    """Names two rollouts in the error of each of the first `times` updates."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.trained: list[str] = []

    def update(self, episodes: Sequence[CreditedEpisode], **keywords: Any) -> dict[str, float]:
        self.trained = [episode.rollout_id for episode in episodes]
        if self.times:
            self.times -= 1
            error = SegmentError("token id 99", where=place(self.trained[1], 1, 2))
            error.rollout_ids = (self.trained[1], self.trained[4])
            raise error
        return super().update(episodes, **keywords)


def without_logprob(rollout: Rollout) -> Rollout:
    """The rollout with a sampled token whose log-prob is NaN, which no segment may hold."""
    first, *rest = rollout.trajectory.steps
    call = first.policy_logprobs.model_copy(update={"logprobs": (float("nan"),)})
    steps = (first.model_copy(update={"policy_logprobs": call}), *rest)
    return rollout.model_copy(update={"trajectory": rollout.trajectory.model_copy(update={"steps": steps})})


def spoiled(requests: Sequence[RolloutRequest]) -> Batch:
    """All finished, but those that are asked for the first time at places 1 and 4 cannot be credited."""
    return Batch(
        tuple(
            without_logprob(item) if item.attempt == 0 and number in (1, 4) else item
            for number, item in enumerate(all_finished(requests).rollouts)
        )
    )


@pytest.mark.parametrize("rejects", ["credit", "update"])
async def test_what_credit_or_update_rejects_is_set_aside_and_planned_once_more(tmp_path: Path, rejects: str):
    learner = Rejecting(times=int(rejects == "update"))
    answer = spoiled if rejects == "credit" else all_finished
    run = make_run(tmp_path, train=answer, learner=learner, training__iterations=1)
    progress = await train(run, Progress(), asyncio.Event())
    assert progress.iteration == 1
    names = {name.rpartition("/train/")[2] for name in learner.trained}
    assert names == {"1/0/0", "1/0/1:1", "1/0/2", "1/0/3", "1/1/0:1", "1/1/1", "1/1/2", "1/1/3"}
    rejected = read_lines(run.directory.rejected_file("iteration_1"))
    assert [row["rollout"]["rollout_id"][-5:] for row in rejected] == ["1/0/1", "1/1/0"]
    (row,) = rows_of(run.directory, "iteration")
    assert (row["rollout/finished"], row["rollout/failure/rollout_rejected"]) == (8.0, 2.0)
    assert any("2 rollouts cannot be learned from and are set aside" in line for line in run.reporter.lines)


class Unscored(Learner):
    """The first call cannot score one rollout, and so measures none."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[str]] = []

    def score(self, episodes: Mapping[str, Any]) -> dict[str, Any]:
        self.asked.append([name.rpartition("/train/")[2] for name in episodes])
        if len(self.asked) > 1:
            raise NonFiniteLoss("far enough")
        raise SegmentError("token id 99", where=place(list(episodes)[1], 1, 2))


async def test_a_rollout_that_cannot_be_measured_is_set_aside_alone(tmp_path: Path):
    learner = Unscored()
    run = make_run(tmp_path, learner=learner, training__iterations=1, training__kl_reward_coef=0.1)
    with pytest.raises(NonFiniteLoss):
        await train(run, Progress(), asyncio.Event())
    (row,) = read_lines(run.directory.rejected_file("iteration_1"))
    assert row["rollout"]["rollout_id"].endswith("1/0/1") and "token id 99" in row["why"]
    assert len(learner.asked[1]) == 8 and "1/0/1:1" in learner.asked[1]


async def test_a_second_rejection_ends_the_run_and_poisons_no_resumed_one(tmp_path: Path):
    run = make_run(tmp_path, learner=Rejecting(times=2), training__iterations=1, training__recovery_every=1)
    with pytest.raises(SegmentError, match="token id 99"):
        await train(run, Progress(), asyncio.Event())
    assert saved(run) == ["iteration_0"]
    asked: list[str] = []

    def honest(requests: Sequence[RolloutRequest]) -> Batch:
        asked.extend(request.rollout_id.rpartition("/train/")[2] for request in requests)
        return all_finished(requests)

    dispatcher: Any = Dispatcher(honest, all_finished)
    saving = Saving(run.saving._training, run.saving._evaluation, run.directory, Learner())
    progress = await train(replace(run, dispatcher=dispatcher, saving=saving), Progress(), asyncio.Event())
    assert progress.iteration == 1
    assert asked == ["1/0/1", "1/1/0"], "the other six are in the spool"


async def test_a_row_says_what_its_iteration_inferred_and_the_ledger_what_its_update_learned_from(tmp_path):
    run = make_run(tmp_path)
    await train(run, Progress(), asyncio.Event())
    inferred = {
        "inference/requests": 6.0,
        "inference/prompt_tokens": 12.0,
        "inference/sampled_tokens": 10.0,
        "inference/steps": 4.0,
        "inference/mean_running": 2.5,  # 10 tokens in 4 steps
    }
    rows = rows_of(run.directory, "iteration")
    assert len(rows) == 4
    for row in rows:
        assert {name: row[name] for name in row if name.startswith("inference/")} == inferred
    lines = read_ledger(run.directory.path)
    assert [(line.iteration, line.policy_version) for line in lines] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    for line in lines:
        planned = run.planner.training(line.iteration)
        assert line.rollout_ids == tuple(item.rollout_id for item in planned)


def test_the_mass_that_truncation_lost_is_told_as_the_mean_of_a_token_sampled_under_it():
    before = {"sampled_tokens": 50, "steps": 9, "truncated_tokens": 10, "lost_mass": 3.0}
    after = {"sampled_tokens": 90, "steps": 19, "truncated_tokens": 30, "lost_mass": 8.0}
    assert inference_metrics(before, after) == {
        "inference/sampled_tokens": 40.0,
        "inference/steps": 10.0,
        "inference/mean_running": 4.0,
        "inference/lost_mass": 0.25,  # 5 of 20
    }
    assert set(inference_metrics(after, after).values()) == {0.0}, "no model was asked"


async def test_a_stop_in_the_last_evaluation_leaves_work(tmp_path: Path):
    stop = asyncio.Event()

    def stopped(requests: Sequence[RolloutRequest]) -> None:
        stop.set()

    run = make_run(tmp_path, evaluation=from_call(3, stopped))
    progress = await train(run, Progress(), stop)
    assert (progress.iteration, saved(run)[-1]) == (4, "iteration_4")
    assert work_left(run, progress)


async def test_a_stop_ends_a_publish_that_takes_for_ever_and_saves_the_update(tmp_path: Path):
    stop = asyncio.Event()

    class Wedged(Server):
        async def publish(self, policy_version: int) -> None:
            if policy_version == 2:
                asyncio.get_running_loop().call_soon(stop.set)
                await asyncio.Event().wait()

    run = replace(make_run(tmp_path), server=Wedged())
    async with asyncio.timeout(60):
        progress = await train(run, Progress(), stop)
    assert (progress.iteration, progress.policy_version, saved(run)[-1]) == (2, 2, "iteration_2")


async def test_rollouts_that_cannot_be_credited_are_kept_to_look_at(tmp_path: Path):
    run = make_run(tmp_path, training__step_rewards_mode="decision_stepwise")  # which these do not carry
    with pytest.raises(TrainerError, match="no decision_rewards"):
        await train(run, Progress(), asyncio.Event())
    assert len(read_rollouts(run.directory.rollouts_file("iteration_1"))) == 8


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({"optim/certain_frac": 1.0}, "every decision is certain"),
        ({"optim/certain_frac": 0.6}, "the critic warms up"),
        ({}, "the critic warms up"),
    ],
)
async def test_an_iteration_without_a_step_of_the_policy_says_why(tmp_path: Path, metrics, reason):
    class Resting(Learner):
        def update(self, episodes: object, *, iteration: int, policy_version: object = None):
            return {"optim/steps": 0.0, "optim/steps_skipped": 0.0, **metrics}

    run = make_run(tmp_path, learner=Resting(), training__iterations=1)
    progress = await train(run, Progress(), asyncio.Event())
    assert (progress.policy_version, progress.updates) == (0, 0)
    assert f"iteration 1: {reason}, so the policy takes no step" in run.reporter.lines
