"""A figure that misses its target fails its script, so that `make bench` and CI notice."""

import ast
import re
from pathlib import Path

import pytest

from bench import (
    crafter_engine,
    dashboard_pages,
    iteration_cost,
    logprob_exactness,
    remote_latency,
    state_keys_speed,
)
from bench.demo_iteration import JOB, QUICK, Played, played_in
from bench.kit import ROOT
from shared_schemas.trajectory import StopReason
from tests.conftest import at_the_task_app
from trainer_backend.job.load import load_job
from trainer_backend.rundir.layout import open_run

Printed = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def iteration(tmp_path_factory: pytest.TempPathFactory, services: str) -> tuple[Played, Path]:
    """An iteration of 40 decisions, really played, and its run directory, where one script alone writes,
    which adds checkpoints.
    """
    folder = tmp_path_factory.mktemp("iteration") / "run"
    return played_in(folder, (*QUICK, services)), folder


def test_log_probs_that_differ_too_much_fail(capsys: Printed):
    assert logprob_exactness.main(["--requests", "1", "--limit", "0", "--presets", "tiny-0.3m"]) == 1
    assert "TOO LARGE" in capsys.readouterr().out


def test_state_keys_that_take_too_long_fail(capsys: Printed):
    assert state_keys_speed.main(["--decisions", "60", "--limit", "0"]) == 1
    printed = capsys.readouterr().out
    assert "TOO SLOW" in printed and "text_history" in printed


def test_what_a_remote_policy_adds_to_its_latency_is_held_against_that(
    capsys: Printed, monkeypatch: pytest.MonkeyPatch
):
    job_at = remote_latency.job_at
    monkeypatch.setattr(remote_latency, "job_at", lambda *words: at_the_task_app(job_at(*words)))
    size = ["--latency-ms", "5", "--episodes", "4", "--decisions", "2"]
    assert remote_latency.main([*size, "--limit", "0"]) == 1
    printed = capsys.readouterr().out
    assert "8 decisions of 4 episodes" in printed and "MISSED" in printed


def test_credit_is_held_against_an_iteration_that_was_really_played(iteration, capsys: Printed):
    found, _ = iteration
    demo = load_job(JOB).config
    assert (found.job.algorithm, found.job.training.critic) == (demo.algorithm, demo.training.critic)
    assert found.job.training.group_size == demo.training.group_size
    assert iteration_cost.decisions(found.rollouts) == 40
    assert iteration_cost.report_credit(found, limit=0.0) == 1
    printed = capsys.readouterr().out
    assert "of that rewards and advantages" in printed
    whole, share = re.findall(r"all of credit, gae .*?([0-9.]+%)|all of credit is ([0-9.]+%)", printed)
    assert whole[0] == share[1], "what is held to the limit is all that the loop calls, not a part of it"
    assert "at most 0.00%): MISSED" in printed


def test_every_metric_that_a_script_reads_is_one_of_a_run(iteration):
    """A renamed one would be read as absent, or as 0."""
    known = {name for row in open_run(iteration[1]).metrics() for name in row if "/" in name}
    pages = [(ROOT / page).read_text(encoding="utf-8") for page in ("docs/metrics.md", "docs/mixture.md")]
    told = set(re.findall(r"`([a-z_]+/[^`]+)`", "".join(pages)))
    rooms = "|".join({name.partition("/")[0] for name in known} | {"mixture", "actor"})
    read = {
        node.value
        for file in (ROOT / "bench").glob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant)
        and re.fullmatch(rf"(?:{rooms})/[a-z0-9_/]*[a-z0-9_]", str(node.value))
    }
    reasons = {f"stop/{reason.value}" for reason in StopReason}
    mixtures = {name for name in read if name.replace("/fixed/", "/{policy}/") in told}
    assert len(read) > 20
    assert read - known - told - mixtures - reasons == set()


def test_what_recovery_costs_is_held_against_an_iteration_that_was_really_played(iteration, capsys: Printed):
    found, folder = iteration
    assert iteration_cost.report_recovery(found, open_run(folder), limit=0.0) == 1
    printed = capsys.readouterr().out
    assert {"spool", "checkpoint", "records"} <= set(printed.split())
    assert "at most 0.00%): MISSED" in printed


def test_the_store_is_held_against_an_iteration_that_was_really_played(
    iteration, capsys: Printed, monkeypatch: pytest.MonkeyPatch
):
    found, _ = iteration
    monkeypatch.setattr(iteration_cost, "ITERATIONS", 2)
    assert iteration_cost.report_store(found, limit=0.0) == 1
    assert "at most 0.00%): MISSED" in capsys.readouterr().out
    assert iteration_cost.report_store(found, limit=1e9) == 0


def test_a_page_of_a_run_that_takes_too_long_fails(capsys: Printed, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dashboard_pages, "REPEATS", 1)
    monkeypatch.setattr(dashboard_pages, "LOG_LINES", 100)
    assert dashboard_pages.main(["--iterations", "2", "--decisions", "40", "--limit-ms", "0"]) == 1
    printed = capsys.readouterr().out
    assert len(re.findall(r"a decision among 25,200 tokens .* TOO SLOW", printed)) == 1


@pytest.mark.parametrize(
    ("name", "enough", "too_bad"),
    [
        ("step_ratio", 25.0, 24.9),
        ("world_ratio", 80.0, 79.0),
        ("faster_than_pickle", 4.0, 3.9),
        ("smaller_than_pickle", 12.0, 11.0),
        ("restore_ms", 0.4, 0.41),
        ("group_start_ms", 15.0, 15.1),
        ("differences", 0, 1),
    ],
)
def test_the_crafter_engine_must_reach_every_target(
    name: str, enough: float, too_bad: float, capsys: Printed
):
    assert crafter_engine.report({"step_stock_us": 9.0, name: enough}) == 0
    assert crafter_engine.report({"step_stock_us": 9.0, name: too_bad}) == 1
    assert capsys.readouterr().out.count("MISSED") == 1
