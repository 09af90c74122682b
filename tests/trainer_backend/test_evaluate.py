import io
import json
from collections import Counter

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.conftest import tiny_job
from tests.trainer_backend.report.hand_made import LAST
from trainer_backend.__main__ import app
from trainer_backend.collect.collector import Collection
from trainer_backend.errors import JobError, NothingToLearnFrom, RunDirectoryError
from trainer_backend.evaluate import Checkpoint, Scripted, evaluate, what_to_evaluate
from trainer_backend.evaluation_result import as_json, evaluated, tables
from trainer_backend.job import dump_job
from trainer_backend.rundir.layout import create_run


@pytest.fixture
def job_file(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(dump_job(tiny_job()))
    return path


def test_the_figures_of_two_episodes_by_hand():
    # three decisions that unlock wood, cow, table; two of which the second unlocks the cow
    found = evaluated("p", Collection(LAST, failures=Counter({"inference_unavailable": 1})))
    assert (found.unique.mean, found.decisions.mean, found.invalid_frac) == (2.0, 2.5, 0.0)
    assert {name: rate.mean for name, rate in found.rates.items()} == {
        "collect_wood": 0.5,
        "eat_cow": 1.0,
        "place_table": 0.5,
    }
    assert found.unique_by_turn == (0.5, 1.0, 0.5)
    assert found.endings == {"max_decisions": 2}
    assert found.failures == {"inference_unavailable": 1}


def test_a_name_in_brackets_is_printed_as_it_is():
    out = io.StringIO()
    found = evaluated("runs/[/x]/[best]", Collection(LAST, failures=Counter({"[odd]": 1})))
    Console(file=out, width=100).print(tables(found))
    assert "runs/[/x]/[best]" in out.getvalue()
    assert "[odd] 1" in out.getvalue()


def test_one_episode_has_no_interval_and_none_is_an_error():
    written = json.loads(as_json(evaluated("p", Collection(LAST[:1]))))
    assert written["unique"] == {"mean": 3.0, "low": None, "high": None, "count": 1}
    with pytest.raises(NothingToLearnFrom):
        evaluated("p", Collection(()))


def test_a_run_plays_its_best_checkpoint_a_folder_of_it_plays_itself(trained):
    run = trained[0].path
    loaded, player = what_to_evaluate(run, None, None, ["evaluation.instances=3"])
    assert loaded.config.evaluation.instances == 3
    assert player == Checkpoint(run / "checkpoints" / (run / "checkpoints" / "best").read_text())
    folder = run / "checkpoints" / "iteration_0"
    assert what_to_evaluate(folder, None, None)[1] == Checkpoint(folder)
    assert what_to_evaluate(run, None, Scripted("random"))[1] == Scripted("random")


def test_what_cannot_be_evaluated_is_a_sentence(tmp_path, job_file):
    with pytest.raises(JobError, match="give a run or model folder, or --policy"):
        what_to_evaluate(None, job_file, None)
    with pytest.raises(JobError, match="give --job"):
        what_to_evaluate(tmp_path, None, None)
    with pytest.raises(JobError, match="give --job"):
        what_to_evaluate(None, None, Scripted("random"))
    with pytest.raises(RunDirectoryError, match="no checkpoint yet"):
        what_to_evaluate(create_run(tiny_job(), tmp_path / "run").path, None, None)


async def test_a_checkpoint_plays_as_it_did_in_training(trained):
    directory, reporter, _ = trained
    loaded, player = what_to_evaluate(directory.path, None, None)
    told = []
    found = await evaluate(loaded.config, player, lambda done, total: told.append((done, total)))
    iteration = int(player.folder.name.removeprefix("iteration_"))
    row = next(r for r in reporter.rows if r["kind"] == "evaluation" and r["iteration"] == iteration)
    assert found.unique.mean == row["eval/unique_achievements"]
    assert {name: rate.mean for name, rate in found.rates.items()} == row["eval/success_rates"]
    assert told[-1] == (4, 4)


def test_the_command_plays_a_scripted_policy_and_writes_json(job_file, tmp_path):
    out = tmp_path / "figures.json"
    arguments = ["eval", "--policy", "crafter_teacher", "--job", str(job_file), "--instances", "3"]
    answer = CliRunner().invoke(app, [*arguments, "--json", str(out)], catch_exceptions=False)
    assert answer.exit_code == 0
    assert "unique achievements" in answer.output
    figures = json.loads(out.read_text())
    assert figures["policy"] == "crafter_teacher"
    assert figures["unique"]["count"] == 3
    assert figures["decisions"]["mean"] == tiny_job().rollout.max_turns
    assert figures["invalid_frac"] == 0.0
