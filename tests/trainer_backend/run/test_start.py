"""How a run begins, and begins again: real task app, real model, a real signal."""

import asyncio
import json
import os
import random
import shutil
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from service_kit.errors import PortTaken
from shared_schemas.rollouts import Rollout, RolloutRequest
from shared_schemas.trajectory import Trajectory
from tests.conftest import ListReporter, at_the_task_app, rows_of, tiny_job, train_job
from tests.trainer_backend.rundir.test_whole_files import Disk
from tests.trainer_backend.test_train import finished
from trainer_backend import job_parts, learner_parts
from trainer_backend.collect.batch import Batch
from trainer_backend.collect.plan import Planner
from trainer_backend.data.dataset import DataSet
from trainer_backend.data.rows import Row
from trainer_backend.errors import CheckpointError, DataError, LearnerLost, TaskAppError
from trainer_backend.job.schema import JobConfig
from trainer_backend.learner.calls import LEARNER_KEY
from trainer_backend.learner.factory import LocalFactory
from trainer_backend.parts import Progress
from trainer_backend.run.beginning import Beginning, ModelSetup, Stopped, can_finish
from trainer_backend.run.fixed_setup import FixedSetup
from trainer_backend.run.reporters import RecordingReporter
from trainer_backend.run.stopping import STOPPING
from trainer_backend.rundir.checkpoint_paths import latest_checkpoint
from trainer_backend.rundir.layout import RunDirectory, create_run, open_run
from trainer_backend.rundir.rollout_files import read_rollouts
from trainer_backend.rundir.spool import copy_others_aside, plan_digest, plan_id, request_digests
from trainer_backend.rundir.state import read_log, read_status
from trainer_backend.start import Ended, restart_on_loss, run_job
from trainer_backend.terminal.train_command import single_run


class Impatient(ListReporter):
    """Sends Ctrl-C at a line that begins so, and when the warm-up has made its first step."""

    def __init__(self, line: str = "never") -> None:
        super().__init__()
        self.line = line

    def say(self, text: str) -> None:
        super().say(text)
        if text.startswith(self.line):
            os.kill(os.getpid(), signal.SIGINT)

    def stage(self, name: str, done: int, total: int) -> None:
        super().stage(name, done, total)
        if (name, done) == ("warm-up", 1):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory):
    """A run that was stopped in its warm-up."""
    job = tiny_job(training__iterations=0, evaluation__instances=1, warmup__epochs=1000)
    directory, reporter = create_run(job, tmp_path_factory.mktemp("stopped") / "run"), Impatient()
    with pytest.raises(Stopped, match="in the warm-up"):
        asyncio.run(run_job(at_the_task_app(job), directory, reporter, resume=False))
    return directory, reporter


def test_ctrl_c_ends_the_warm_up_within_a_few_steps(stopped):
    _, reporter = stopped
    stage, done, total = reporter.stages[-1]
    assert stage == "warm-up" and done < total / 10


def test_what_the_teacher_played_is_used_again_and_has_its_row_again(stopped):
    directory, _ = stopped
    (before,) = rows_of(directory, "teacher")
    stored = read_rollouts(directory.rollouts_file("warmup"))
    job = tiny_job(training__iterations=0, evaluation__instances=1, warmup__epochs=1, rollout__max_tokens=3)
    again, reporter, progress = train_job(job, directory.path, resume=directory)
    assert progress.iteration == 0
    assert not any(name == "collect teacher" for name, _, _ in reporter.stages)
    again_stored = read_rollouts(directory.rollouts_file("warmup"))
    assert [item.trajectory for item in again_stored] == [item.trajectory for item in stored]
    (evaluated,) = read_rollouts(directory.rollouts_file("evaluation_0"))
    assert evaluated.run_id != stored[0].run_id, "what a killed start left at a task app is not met again"
    (after,) = rows_of(again, "teacher")
    played = {name: before[name] for name in before if name == "time/collect_s" or name.startswith("app/")}
    assert {**after, **played} == {**before, "recovery/rollouts_reused": len(stored)}
    (warmup,) = rows_of(again, "warmup")
    assert warmup["warmup/steps"] > 0
    longest = (
        f"longest answer has {warmup['warmup/answer_tokens_max']:.0f} tokens, and rollout.max_tokens (3)"
    )
    assert any(longest in line for line in reporter.lines), "the policy cannot say what it imitates"


@pytest.mark.parametrize(("tool_choice", "most"), [("auto", 4), ("required", 5)])
def test_the_policy_samples_neither_a_stop_token_that_is_cut_nor_the_beginning_of_a_forced_call(
    tool_choice: str, most: int
):
    rollout = tiny_job(rollout__max_tokens=3, rollout__policy_config={"tool_choice": tool_choice}).rollout
    assert can_finish(most, rollout)
    assert not can_finish(most + 1, rollout)


def test_a_flipped_bit_in_the_weights_is_told_before_anything_starts_with_the_checkpoint_to_go_on_from(
    trained: tuple[RunDirectory, Any, Any], tmp_path: Path
):
    run = open_run(shutil.copytree(trained[0].path, tmp_path / "run"))
    newest = run.checkpoints / "iteration_2"
    weights = newest / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)

    def told() -> str:
        with pytest.raises(CheckpointError) as caught:
            asyncio.run(run_job(tiny_job(), run, ListReporter(), resume=True))
        return str(caught.value)

    assert told().startswith(f"{newest}: the checkpoint is damaged: model.safetensors has the crc32 ")
    assert f"iteration_1 is whole. To go on from there: `mv {newest} " in told()
    (newest / "state.json").unlink()  # a folder that has lost this is not passed over for the one before
    (newest / "digests.json").unlink()
    assert "iteration_2: the checkpoint is damaged: digests.json is missing" in told()
    newest.rename(f"{newest}_damaged")
    assert latest_checkpoint(run.checkpoints) == run.checkpoints / "iteration_1"


def make_beginning(
    job: JobConfig, directory: RunDirectory, planner: Planner, dispatcher: Any, reporter: ListReporter
) -> Beginning:
    setup = ModelSetup(job.model, job.inference, learner_parts.local_learners(job), FixedSetup(), job.rollout)
    return Beginning(
        directory, planner, setup, dispatcher=dispatcher, reporter=reporter, stop=asyncio.Event()
    )


DIALOGUE: dict[str, Any] = {
    "data": {"path": "a.jsonl", "held_out_share": 0.5, "interaction": "gsm8k"},
    "multi_turn": {"enable": True},
    "rollout__env_name": "dialogue",
    "rollout__env_config": {},
}


async def test_rows_none_of_which_fits_a_named_model_end_the_run_before_anything_is_played(
    tmp_path: Path, model_folders: dict[str, Path]
):
    model = {"path": str(model_folders["qwen3"]), "device": "cpu"}
    job, rows = tiny_job(**DIALOGUE, model=model, warmup=None), (Row("a", "wood 2 " * 200),)
    directory, reporter = create_run(job, tmp_path / "run"), ListReporter()
    planner = job_parts.trial_planner(job, "run.1", DataSet(rows, rows))
    beginning = make_beginning(job, directory, planner, None, reporter)
    with pytest.raises(DataError, match=r"^data.path: 1 of 1 training rows do not fit the model: a \("):
        await beginning.load(resume=False)


async def test_what_will_be_slow_is_noted_and_the_memory_plan_is_only_said(tmp_path: Path, monkeypatch):
    said = "memory: enough\nno kernels\nno bfloat16"
    monkeypatch.setattr(LocalFactory, "plan_memory", lambda *_: said)
    job, reporter = tiny_job(), ListReporter()
    directory = create_run(job, tmp_path / "run")
    beginning = make_beginning(job, directory, job_parts.planner(job, "run.1"), None, reporter)
    await beginning.load(resume=False)
    assert reporter.lines == ["memory: enough", "no kernels", "no bfloat16"]
    assert reporter.notes == reporter.lines[1:]


class Starts:
    """Starts of a run before its first checkpoint, each up to its warm-up.

    It is their dispatcher too, which plays so many of each plan, and is killed where that is not all.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self.directory, self.reporter = directory, ListReporter()
        self.most, self.asked = 0, list[int]()

    async def collect(
        self, requests: Sequence[RolloutRequest], progress: object, keep: Callable[[Rollout], None]
    ) -> Batch:
        self.asked.append(len(requests))
        played = tuple(finished(request) for request in requests[: self.most])
        for item in played:
            keep(item)
        if len(played) < len(requests):
            raise TaskAppError("killed")
        return Batch(played)

    async def ack(self, run_id: str, rollouts: Sequence[Rollout]) -> None: ...

    def beginning(self, job: JobConfig) -> Beginning:
        planner = job_parts.planner(job, f"{self.directory.run_id}.{len(self.asked)}")
        return make_beginning(job, self.directory, planner, self, self.reporter)

    async def again(self, *, most: int | None = None, **overrides: Any) -> list[Trajectory] | None:
        """What the teacher has played; None where the start was killed before that."""
        job, self.most = tiny_job(**overrides), self.most if most is None else most
        beginning = self.beginning(job)
        for _ in range(2):  # a start that was killed after it has changed nothing for the next one
            if line := beginning._keep_stored():
                self.reporter.say(line)
        self.directory.go_back_to(-1, self.reporter.say)
        self.directory.replace_job(job)
        try:
            return await beginning._play("teacher", beginning._planner.warmup())
        except TaskAppError:
            return None

    def as_an_earlier_version_left_it(self, plan: Sequence[RolloutRequest] | None = None) -> Path:
        """Take out what earlier versions did not write; the spool of a plan has one digest of it."""
        path, stored = self.directory.spool_file("warmup"), self.directory.rollouts_file("warmup")
        if plan is None:
            path.unlink()
        else:
            header = json.dumps({"plan": plan_digest(plan, ()), "policy_version": 0})
            lines = path.read_text().splitlines(keepends=True)[1:]
            path.write_text("".join((f"{header}\n", *lines)))
            stored.unlink()
        return stored


@pytest.fixture
def starts(tmp_path: Path) -> Starts:
    return Starts(create_run(tiny_job(), tmp_path / "run"))


async def test_the_teachers_episodes_of_earlier_starts_are_kept_until_the_warm_up_is_saved(starts: Starts):
    for episodes, most, number in ((8, 5, 8), (8, 8, 3), (10, 10, 2), (4, 0, 0), (9, 0, 0)):
        played = await starts.again(warmup__episodes=episodes, most=most)
        assert starts.asked[-1] == number
        assert played is None if most < number else len(played) == episodes
    directory = starts.directory
    assert rows_of(directory, "teacher")[-1]["recovery/rollouts_reused"] == 9
    told: list[str] = []
    copy_others_aside(directory.spool_file("warmup"), played, told.append)
    assert told == [
        "1 rollouts of warmup.spool.jsonl were collected for another plan; they are left in "
        "warmup.unused-1.jsonl, unused"
    ]
    directory.remove_spools(0)
    assert not list(directory.rollouts.glob("*.spool.jsonl"))


async def test_the_games_are_on_the_disk_before_the_file_that_says_that_all_are_there(starts, monkeypatch):
    disk = Disk(starts.directory.rollouts, monkeypatch)
    await starts.again(warmup__episodes=4, most=4)
    rename = disk.heard.index("rename .warmup.parquet.tmp to warmup.parquet")
    assert disk.heard[rename - 3 : rename - 1] == ["flush warmup.spool.jsonl", "flush ."]


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_changes_between_starts_no_game_is_played_twice_and_the_file_has_the_plans_games(
    starts: Starts, seed: int
):
    draws, directory = random.Random(seed), starts.directory
    spool, known = directory.spool_file("warmup"), set[str]()
    for _ in range(8):
        changes = {"warmup__episodes": draws.randint(1, 6), "job__seed": draws.randint(1, 2)}
        plan = request_digests(job_parts.planner(tiny_job(**changes), "run").warmup(), ())
        missing = [digest for digest in plan.values() if digest not in known]
        most = draws.randint(0, 6)
        before = spool.stat().st_size if spool.exists() else 0
        played = await starts.again(most=most, **changes)
        assert starts.asked[-1] == len(missing)
        kept = missing[:most]
        if played is not None:
            assert len(played) == len(plan)
            stored = read_rollouts(directory.rollouts_file("warmup"))
            assert [plan_id(one.rollout_id) for one in stored] == list(plan)
        elif kept:  # the kill cuts at any byte of what this start has written
            text = spool.read_bytes()
            cut = draws.randint(before, len(text))
            spool.write_bytes(text[:cut])
            kept = kept[: max(len(kept) - text[cut:].count(b"\n"), 0)]
        known.update(kept)
    assert not list(directory.rollouts.glob("*unused*"))


@pytest.mark.parametrize("is_spool", [False, True], ids=["stored", "spooled"])
@pytest.mark.parametrize(("episodes", "number"), [(6, 2), (4, 0), (3, 0)])
async def test_games_of_an_earlier_version_are_not_played_again_with_other_numbers_of_episodes(
    starts: Starts, episodes: int, number: int, is_spool: bool
):
    four = tiny_job(warmup__episodes=4)
    await starts.again(warmup__episodes=4, most=6)
    starts.as_an_earlier_version_left_it(job_parts.planner(four, "run").warmup() if is_spool else None)
    assert len(await starts.again(warmup__episodes=episodes)) == episodes
    assert starts.asked[-1] == number
    await starts.again(warmup__episodes=4)
    assert starts.asked[-1] == 0


@pytest.mark.parametrize(
    "doubt",
    [{}, {"job__seed": 2}, DIALOGUE, {"cluster": {}}, None],
    ids=["another start", "other worlds", "data", "cluster", "damage"],
)
async def test_a_stored_stage_is_set_aside_where_its_requests_are_not_known(starts, doubt):
    directory = starts.directory
    await starts.again(warmup__episodes=4, most=6)
    stored = starts.as_an_earlier_version_left_it()
    if doubt == {}:  # of an earlier version: its row has no time, since it played nothing
        directory.go_back_to(-1, starts.reporter.say)
        directory.append_metrics({"kind": "teacher", "iteration": 0})
    elif doubt is not None:
        directory.replace_job(tiny_job(warmup__episodes=4, **doubt))
    else:
        stored.write_bytes(b"PAR1 but no more")
    left = stored.read_bytes()
    await starts.again(warmup__episodes=4)
    assert starts.asked == [4, 4]
    aside = directory.rollouts / "warmup.parquet.unused-1"
    assert aside.read_bytes() == left
    assert any(
        f"warmup.parquet is left as {aside.name}, and what it" in line for line in starts.reporter.lines
    )


async def test_games_of_a_stage_that_a_start_does_not_play_are_set_aside_with_a_word(starts: Starts):
    assert await starts.again(warmup__episodes=4, most=3) is None
    beginning = starts.beginning(tiny_job().model_copy(update={"warmup": None}))
    beginning._leave_spools("teacher", "prompts")
    beginning._leave_spools("teacher", "prompts")
    starts.directory.remove_spools(0)
    lines = starts.reporter.lines
    told = [line for line in lines if "for a stage that this start does not play" in line]
    assert len(told) == 1 and told[0].startswith("3 rollouts of warmup.spool.jsonl")
    assert [path.name for path in starts.directory.rollouts.iterdir()] == ["warmup.unused-1.jsonl"]


def test_a_resume_tells_that_a_warm_up_which_is_done_is_not_changed(trained):
    path = trained[0].path
    assert single_run(None, None, path, ["training.iterations=9"]).loaded.warnings == ()
    (warning,) = single_run(None, None, path, ["warmup.episodes=99"]).loaded.warnings
    assert warning.startswith("[warmup] has changed")


def test_every_start_has_ids_of_its_own_at_the_task_app(trained):
    directory, _, _ = trained
    (rollout, *_) = read_rollouts(directory.rollouts_file("iteration_1"))
    assert rollout.run_id.startswith(directory.run_id + ".")
    assert rollout.rollout_id.startswith(rollout.run_id + "/train/1/")


def test_a_ctrl_c_before_anything_is_played_is_answered_and_heeded(tmp_path: Path):
    job, reporter = tiny_job(), Impatient("task app:")
    with pytest.raises(Stopped, match="before anything was played"):
        directory = create_run(job, tmp_path / "run")
        asyncio.run(run_job(at_the_task_app(job), directory, reporter, resume=False))
    assert (reporter.lines[-1], reporter.stages) == (STOPPING, [])
    state = read_status(tmp_path / "run").state
    assert state is not None
    reason = "stopped by Ctrl-C before anything was played; nothing new to save"
    assert (state.state, state.detail) == ("stopped", reason)
    assert read_log(tmp_path / "run", last=1)[0][0].text == reason


def test_a_ctrl_c_is_heeded_while_a_learner_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(LEARNER_KEY, "key")
    with socket.socket() as unserved:
        unserved.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unserved.getsockname()[1]}"
        job = tiny_job(cluster={"launcher": "external", "wait_s": 3600.0}, learner={"url": url})
        directory, reporter = create_run(job, tmp_path / "run"), Impatient("waiting for the learner")
        with pytest.raises(Stopped, match="before the learner was there"):
            asyncio.run(run_job(job, directory, reporter, resume=False))
    assert reporter.lines[2:] == [STOPPING]


def test_a_taken_gateway_port_is_told_before_anything_is_started(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        job = tiny_job(services__gateway_port=taken.getsockname()[1])
        directory, reporter = create_run(job, tmp_path / "run"), ListReporter()
        with pytest.raises(PortTaken):
            asyncio.run(run_job(job, directory, reporter, resume=False))
    assert (reporter.lines, reporter.stages) == ([f"run directory: {directory.path}"], [])
    assert not (directory.path / "task_app.log").exists()


@pytest.mark.parametrize(
    ("losses", "most", "stopped", "starts"),
    [
        (2, 3, False, [False, True, True]),
        (9, 1, False, [False, True, False]),  # the last is the error
        (9, 0, False, [False, False]),
        (9, 3, True, [False, False]),
    ],
)
async def test_a_run_that_loses_its_learner_resumes_so_often_and_not_after_a_stop(
    tmp_path: Path, losses: int, most: int, stopped: bool, starts: list[bool]
):
    resumed: list[bool] = []
    stop, reporter = asyncio.Event(), ListReporter()

    async def start(resume: bool) -> Ended:
        resumed.append(resume)
        if len(resumed) > losses:
            return Ended(Progress(), stopped="")
        if stopped:
            stop.set()
        raise LearnerLost("the learner's process has ended")

    with RecordingReporter.opened(create_run(tiny_job(), tmp_path / "run"), reporter) as recording:
        recording.runs_as("tiny.1")
        try:
            await restart_on_loss(start, recording, stop, most=most, resume=False)
        except LearnerLost:
            resumed.append(False)
        assert recording.resumes == len(reporter.lines) == resumed.count(True)
        assert recording.left_behind == ("tiny.1" if True in resumed else "")
    assert resumed == starts
