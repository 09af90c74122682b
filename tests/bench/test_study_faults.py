"""The studies of faults and of load: their judges find nothing in a sound run, and name what was lost."""

import argparse
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from bench import study_faults, study_soak
from bench.fault_installation import KINDS, OF_A_JOB, children, holders
from bench.fault_watch import Kept, Seen, drawn_faults, judge_run, judge_store
from shared_schemas.rollouts import Rollout
from task_app.environments.crafter.environment import CrafterConfig, CrafterEnvironment
from task_app.plugins import EnvironmentPlugin, PlugBoards, default_plug_boards
from task_app.protocols import ToolRequest
from tests.task_app.counting import KEY
from tests.task_app.served import served_app
from trainer_backend.rundir.layout import RunDirectory, open_run
from trainer_backend.rundir.rollout_files import read_rollouts, write_rollouts
from trainer_backend.rundir.spool import LEDGER_FILE, plan_id
from trainer_backend.store import jobs
from trainer_backend.store.database import open_store
from trainer_backend.store.rows import Job
from trainer_backend.store.sync import sync_run

ITERATIONS = 2


@pytest.fixture
def run(trained, tmp_path: Path) -> RunDirectory:
    """A copy of the trained run, to be harmed."""
    shutil.copytree(trained[0].path, tmp_path / "run")
    return open_run(tmp_path / "run")


def without_last_line(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def with_last_line_twice(path: Path) -> None:
    path.write_text(path.read_text() + path.read_text().splitlines(keepends=True)[-1])


def without_a_rollout(run: RunDirectory) -> None:
    file = run.rollouts_file("iteration_1")
    kept = read_rollouts(file)[1:]
    write_rollouts(file, kept)


def in_another_world(run: RunDirectory) -> None:
    file = run.rollouts_file("evaluation_0")
    first, *others = read_rollouts(file)
    elsewhere = first.trajectory.model_copy(update={"seed": first.trajectory.seed + 1})
    found = [first.model_copy(update={"trajectory": elsewhere}), *others]
    write_rollouts(file, found)


def sampled_by(rollout: Rollout, version: int) -> Rollout:
    """The rollout with its first decision sampled by this version of the policy."""
    first, *others = rollout.trajectory.steps
    call = first.policy_logprobs.model_copy(update={"versions": ((0, version),)})
    steps = (first.model_copy(update={"policy_logprobs": call}), *others)
    return rollout.model_copy(update={"trajectory": rollout.trajectory.model_copy(update={"steps": steps})})


def of_older_weights(run: RunDirectory) -> None:
    file = run.rollouts_file("iteration_2")
    first, *others = read_rollouts(file)
    write_rollouts(file, [sampled_by(first, 0), *others])


def test_a_run_that_nothing_was_done_to_is_the_one_that_was_planned(trained):
    seen = Seen()
    judge_run(trained[0], ITERATIONS, seen)
    assert (seen.wrong, seen.counts["starts"], seen.counts["trained"]) == ([], 1, 2 * 8)


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda run: without_last_line(run.path / LEDGER_FILE), "one line of the ledger an iteration"),
        (lambda run: with_last_line_twice(run.path / LEDGER_FILE), "no rollout twice in the ledger"),
        (lambda run: with_last_line_twice(run.path / "metrics.jsonl"), "both evaluations"),
        (without_a_rollout, "iteration_1: planned"),
        (in_another_world, "evaluation_0: seed of the world"),
        (of_older_weights, "iteration_2: tokens [0, 1] versions old"),
    ],
)
def test_what_was_lost_or_doubled_is_named(run, harm, told):
    harm(run)
    seen = Seen()
    judge_run(run, ITERATIONS, seen)
    assert told in seen.wrong


def test_what_a_kill_found_may_be_missing_only_if_no_checkpoint_held_its_weights_and_it_was_set_aside(run):
    stored = read_rollouts(run.rollouts_file("iteration_2"))[0]
    other = sampled_by(stored, 3)

    def wrong(rollout: Rollout, *, saved_version: int, weights_lost: bool = True) -> list[str]:
        seen = Seen()
        seen.kept[plan_id(stored.rollout_id)].append(Kept(rollout, saved_version, weights_lost))
        judge_run(run, ITERATIONS, seen)
        assert seen.counts["set_aside"] == aside.exists()
        return seen.wrong

    aside = run.rollouts / "iteration_2.unused-1.jsonl"
    assert wrong(stored, saved_version=1) == []  # version 1 has sampled it
    assert wrong(stored, saved_version=0) == ["iteration_2: nothing of weights that were lost"]
    assert wrong(stored, saved_version=0, weights_lost=False) == []
    assert wrong(other, saved_version=2) == ["iteration_2: kept, or set aside"]
    aside.write_text(f"{{}}\n{other.model_dump_json(exclude_unset=True)}\n")
    assert wrong(other, saved_version=2) == []
    assert wrong(other, saved_version=3) == ["iteration_2: kept, or of weights that no checkpoint held"]


def test_processes_of_a_job_are_told_by_their_command_and_by_the_files_that_they_write(tmp_path: Path):
    body = "import sys; print(flush=True); sys.stdin.read()"
    with (tmp_path / "log").open("w") as log:
        child = subprocess.Popen(
            (sys.executable, "-c", body, OF_A_JOB["learner"]),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip
    with child:
        assert child.stdout is not None
        child.stdout.readline()  # it runs
        pid = psutil.Process().pid
        assert [process.pid for process in children(pid, OF_A_JOB["learner"])] == [child.pid]
        assert children(pid, OF_A_JOB["gateway"]) == []
        assert holders(tmp_path) == {child.pid}
    assert (children(pid, OF_A_JOB["learner"]), holders(tmp_path)) == ([], set())


def test_the_store_is_held_against_the_run_directory(run: RunDirectory, tmp_path: Path):
    store = open_store(f"sqlite:///{tmp_path}/store.db")
    job, _ = jobs.create(store, Job(name="tiny", config="", home="bench", run_dir=str(run.path)))
    sync_run(store, job.id, run)
    seen = Seen()
    judge_store(run, store, job.id, seen)
    assert seen.wrong == []
    without_a_rollout(run)
    judge_store(run, store, job.id, seen)
    store.close()
    assert seen.wrong == ["the store's rollouts"]


def test_every_kind_is_killed_once_and_at_a_point_that_the_seed_draws():
    drawn = [drawn_faults(random.Random(seed), KINDS, iterations=6, iteration_s=2.0) for seed in (1, 1, 2)]
    assert [sorted(fault.kind for fault in faults) for faults in drawn] == [sorted(KINDS)] * 3
    assert drawn[0] == drawn[1] != drawn[2]
    kinds = (*KINDS, *OF_A_JOB)
    assert {fault.kind for fault in study_faults.choose_faults(kinds, 0)} == set(kinds)


def test_a_job_that_is_not_as_it_would_have_been_fails_the_study(tmp_path: Path, capsys):
    job = {
        "counts": {"trained": 16}, "kept": 3, "kills": {"job": 1}, "losses": {}, "answers_s": {},
        "recovery_s": {"job": [2.0, 21.0]}, "wrong": [],
    }  # fmt: skip
    results = tmp_path / "faults.json"
    for wrong, code in (([], 0), (["the store's ledger"], 1)):
        results.write_text(json.dumps({"jobs": {"0": {**job, "wrong": wrong}}}))
        # What is there is not run again.
        assert study_faults.main(["--seeds", "0", "--out", str(tmp_path), "--results", str(results)]) == code
        told = json.loads(capsys.readouterr().out)
    assert told["from_kill_to_first_new_rollout_s"] == {"job": {"count": 2, "median": 11.5, "longest": 21.0}}
    assert told["of_those_above_20_s"] == 1


NOTHING = [ToolRequest("interact_many", {"actions": ["noop"]})]


class Forgetful(CrafterEnvironment):
    """Does nothing in its third decision."""

    decisions = 0

    def step(self, calls, *, invalid_reason=None):
        self.decisions += 1
        return super().step(NOTHING if self.decisions == 3 else calls, invalid_reason=invalid_reason)


async def tally(boards, monkeypatch, *, seconds):
    monkeypatch.setenv("ENVIRONMENT_API_KEY", KEY)
    async with served_app(boards) as (client, _):
        url = str(client.base_url)
        options = argparse.Namespace(client=url, seed=1, seconds=seconds)
        return await study_soak.play_sessions(options)


async def test_clients_that_hang_up_and_ask_twice_find_no_step_lost_or_doubled(monkeypatch):
    found = await tally(default_plug_boards(), monkeypatch, seconds=1.0)
    assert found.wrong == []
    assert found.counts["steps"] > 0


async def test_clients_find_what_an_environment_lost(monkeypatch):
    ours = default_plug_boards()
    crafter = EnvironmentPlugin(CrafterConfig, Forgetful)
    boards = PlugBoards({**ours.environments, "crafter": crafter}, ours.policies)
    # They stop at the first finding, which is long before.
    found = await tally(boards, monkeypatch, seconds=60.0)
    assert "differs from the same environment in this process" in found.wrong[0]


def judged(**harm):
    found = study_soak.Found(memory=[(float(second), 100) for second in range(9)])
    left = {"at_the_end": 5, "after_idle_expiry": 0, "new_sessions_that_fit": 400}
    if "wrong" in harm:
        found.wrong.append(harm["wrong"])
    if "memory" in harm:
        found.memory[6:] = [(float(second), harm["memory"]) for second in (6, 7, 8)]
    left |= harm.get("left", {})
    return study_soak.results(9.0, found, [1.0, 2.0, 3.0], left)


def test_what_was_lost_or_leaked_or_grew_does_not_hold():
    untouched = judged()
    assert untouched["step_ms"] == {"p50": 2.0, "p99": 3.0, "steps": 3}
    assert list(untouched["holds"].values()) == [True] * 3
    for harm, broken in (
        ({"wrong": "a step was lost"}, "no step lost or doubled, no answer differs"),
        ({"left": {"after_idle_expiry": 1}}, "no session leaked"),
        ({"left": {"new_sessions_that_fit": 399}}, "no session leaked"),
        ({"memory": 111}, "memory flat"),
    ):
        assert [name for name, holds in judged(**harm)["holds"].items() if not holds] == [broken]
