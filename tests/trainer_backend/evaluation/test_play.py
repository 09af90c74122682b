import asyncio
import io
import json
import socket
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from shared_schemas.rollouts import RolloutFailure
from tests.conftest import at_the_task_app, tiny_job
from tests.trainer_backend.pages.hand_made import LAST
from trainer_backend.__main__ import app
from trainer_backend.collect.batch import Batch
from trainer_backend.collect.plan import Inference
from trainer_backend.errors import JobError, NothingToLearnFrom, RunDirectoryError
from trainer_backend.evaluation.play import (
    Checkpoint,
    TaskAppPolicy,
    evaluate,
    player_of_flags,
    what_to_evaluate,
)
from trainer_backend.evaluation.result import as_json, evaluation_result, span_width
from trainer_backend.job.load import dump_job, load_job
from trainer_backend.job.training_table import LoraTable
from trainer_backend.rundir.checkpoint_paths import best_checkpoint
from trainer_backend.rundir.layout import create_run
from trainer_backend.terminal.evaluation_tables import tables
from trainer_backend.terminal.templates import job_to_play


def printed(result, width: int = 120) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(tables(result))
    return out.getvalue()


@pytest.fixture
def job_file(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(dump_job(tiny_job()))
    return path


def test_the_figures_of_two_episodes_by_hand():
    # three decisions that unlock wood, cow, table; two of which the second unlocks the cow
    found = evaluation_result("p", Batch(LAST, failures=Counter({"inference_unavailable": 1})))
    assert (found.unique.mean, found.decisions.mean, found.invalid_frac) == (2.0, 2.5, 0.0)
    assert {name: rate.mean for name, rate in found.rates.items()} == {
        "collect_wood": 0.5,
        "eat_cow": 1.0,
        "place_table": 0.5,
    }
    assert found.unique_by_turn == found.ach_by_turn == (0.5, 1.0, 0.5)
    assert found.env_reward.mean == 2.0  # 1 for each of four decisions that unlocked something
    assert found.progress.mean == pytest.approx(200 / 3)  # 3 and 1 of three achievements
    assert found.env_steps.mean == 5.0
    third = found.spans[2]
    assert (third.first, third.last, third.playing, third.unique.mean, third.rewarded) == (3, 3, 1, 0.5, 1.0)
    assert (found.spans[0].playing, found.spans[0].rewarded) == (2, 0.5)
    assert found.endings == {"max_decisions": 2}
    assert found.failures == {"inference_unavailable": 1}


@pytest.mark.parametrize(
    ("turns", "width"), [(1, 1), (12, 1), (13, 2), (50, 5), (120, 10), (121, 20), (10_000, 1_000)]
)
def test_turns_are_told_in_at_most_twelve_spans(turns, width):
    assert span_width(turns) == width


def test_the_result_comes_last_and_begins_with_the_figures_that_papers_compare():
    told = printed(evaluation_result("p", Batch(LAST))).splitlines()
    names = [line.split("  ")[0] for line in told]
    result = names[names.index("Crafter score") :]
    assert result[:4] == ["Crafter score", "environment's reward", "progress", "unique achievements"]
    assert result[-1] == "failures"
    assert names.index("policy") < names.index("achievement") < names.index("Crafter score")
    assert "66.7 %" in told[names.index("progress")] and "of 3 achievements" in told[names.index("progress")]


def test_worlds_that_were_lost_are_told():
    failure = RolloutFailure(code="critical_error", detail="environment.step raised KeyError (plug.py:14)")
    lost = LAST[1].model_copy(update={"status": "failed", "trajectory": None, "failure": failure})
    failures = Counter({"deadline_exceeded": 2, "[odd]": 1})
    found = evaluation_result("runs/[/x]/[best]", Batch(LAST[:1], (lost,), failures))
    assert found.lost == 1
    told = printed(found)
    assert "1, 1 more lost: in no figure" in told
    assert "environment.step raised KeyError (plug.py:14)" in told
    assert "runs/[/x]/[best]" in told and "[odd] 1" in told, "names in brackets are printed as they are"


def test_one_episode_has_no_interval_and_none_is_an_error():
    written = json.loads(as_json(evaluation_result("p", Batch(LAST[:1]))))
    assert written["unique"] == {"mean": 3.0, "low": None, "high": None, "count": 1}
    with pytest.raises(NothingToLearnFrom):
        evaluation_result("p", Batch(()))


def test_a_run_plays_its_best_checkpoint_a_folder_of_it_plays_itself(trained):
    run = trained[0].path
    loaded, player = what_to_evaluate(run, None, None, ["evaluation.instances=3"])
    assert loaded.config.evaluation.instances == 3
    assert player == Checkpoint(best_checkpoint(run / "checkpoints"))
    folder = run / "checkpoints" / "iteration_0"
    assert what_to_evaluate(folder, None, None)[1] == Checkpoint(folder)
    assert what_to_evaluate(run, None, TaskAppPolicy("random"))[1] == TaskAppPolicy("random")


def test_a_scripted_policy_asks_no_server():
    assert player_of_flags(None, None, None, None) is None
    assert player_of_flags("random", None, None, None) == TaskAppPolicy("random")
    with pytest.raises(JobError, match="--policy random is played by the task app alone"):
        player_of_flags("random", "m", "http://h", None)


def test_a_foreign_tokenizer_needs_more_than_the_demos_eight_tokens(job_file):
    player = player_of_flags(None, "m", "http://h", None)
    loaded, found = what_to_evaluate(None, job_file, player)
    assert found is player
    assert any("rollout.max_tokens is 8" in warning for warning in loaded.warnings)
    roomy = ["rollout.max_tokens=128"]
    assert what_to_evaluate(None, job_file, player, roomy)[0].warnings == ()


@pytest.mark.parametrize("env", ["crafter", "dialogue", "cave_of_mine", "gymnasium:FrozenLake-v1"])
def test_an_environments_name_is_enough_for_a_player_that_brings_no_job(tmp_path, monkeypatch, env):
    monkeypatch.chdir(tmp_path)
    player = player_of_flags(None, "m", "http://h", None)
    loaded, found = what_to_evaluate(Path(env), None, player, ["evaluation.instances=3"], job_to_play)
    assert (found, loaded.config.rollout.env_name, loaded.config.evaluation.instances) == (player, env, 3)
    assert loaded.warnings == ()
    assert loaded.config.multi_turn.enable == (env == "dialogue")


def test_a_folder_called_like_an_environment_does_not_take_its_place_in_silence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    player = player_of_flags(None, "m", "http://h", None)
    for name in ("sokoban", "cave_of_mine"):
        (tmp_path / name).mkdir()
    loaded, _ = what_to_evaluate(Path("sokoban"), None, player, [], job_to_play)
    assert loaded.config.rollout.env_name == "sokoban"
    with pytest.raises(JobError, match="give --job"):
        what_to_evaluate(Path("cave_of_mine"), None, player, [], job_to_play)
    (tmp_path / "sokoban").rmdir()
    create_run(tiny_job(), tmp_path / "sokoban")
    loaded, _ = what_to_evaluate(Path("sokoban"), None, player, [], job_to_play)
    assert loaded.config.rollout.env_name == "crafter"
    assert any("sokoban is a run here, whose job is played" in warning for warning in loaded.warnings)


def test_what_cannot_be_evaluated_is_a_sentence(tmp_path, job_file):
    with pytest.raises(JobError, match="give a run or model folder, or --policy"):
        what_to_evaluate(None, job_file, None)
    for folder, player in ((tmp_path, None), (None, TaskAppPolicy("random"))):
        with pytest.raises(JobError, match="give --job"):
            what_to_evaluate(folder, None, player)
    with pytest.raises(RunDirectoryError, match="no checkpoint yet"):
        what_to_evaluate(create_run(tiny_job(), tmp_path / "run").path, None, None)


async def test_a_checkpoint_plays_as_it_did_in_training(trained):
    directory, reporter, _ = trained
    loaded, player = what_to_evaluate(directory.path, None, None)
    told = []
    # playing it needs nothing of its training
    nowhere = loaded.config.model_copy(update={"lora": LoraTable(target_modules=("no_such_layer",))})
    job = at_the_task_app(nowhere)
    found = await evaluate(job, player, lambda done, total: told.append((done, total)))
    iteration = int(player.folder.name.removeprefix("iteration_"))
    row = next(r for r in reporter.rows if r["kind"] == "evaluation" and r["iteration"] == iteration)
    assert found.unique.mean == row["eval/unique_achievements"]
    assert {name: rate.mean for name, rate in found.rates.items()} == row["eval/success_rates"]
    assert told[-1] == (4, 4)


def test_the_log_of_an_evaluation_that_failed_is_there_to_be_read(job_file, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "made"))
    (tmp_path / "made").mkdir()
    job = load_job(job_file, ["rollout.policy_config.max_attempts=1", "evaluation.instances=1"]).config
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: every connection is refused
        closed = Inference(f"http://127.0.0.1:{taken.getsockname()[1]}", "m", None)
        with pytest.raises(NothingToLearnFrom, match=r"log \(.*task_app\.log\) says more") as caught:
            asyncio.run(evaluate(job, closed))
    (log,) = (tmp_path / "made").rglob("task_app.log")
    assert str(log) in str(caught.value) and log.stat().st_size > 0


def test_the_command_plays_a_scripted_policy_and_writes_json(job_file, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    out = tmp_path / "figures.json"
    arguments = ["eval", "--policy", "crafter_teacher", "--job", str(job_file), "--instances", "3"]
    answer = CliRunner().invoke(app, [*arguments, "--json", str(out)], catch_exceptions=False)
    assert answer.exit_code == 0
    assert not list(tmp_path.rglob("task_app.log")), "an evaluation that went well leaves no log"
    assert "unique achievements" in answer.output
    figures = json.loads(out.read_text())
    assert figures["policy"] == "crafter_teacher"
    assert figures["unique"]["count"] == 3
    assert figures["decisions"]["mean"] == tiny_job().rollout.max_turns
    assert figures["invalid_frac"] == 0.0
    assert figures["crafter_score"]["low"] <= figures["crafter_score"]["mean"]
