"""A figure that misses its target fails its script, so that `make bench` and CI notice."""

import ast
import re
from pathlib import Path

import pytest

from bench import (
    credit_share,
    engine_speed,
    logprob_exactness,
    recovery_cost,
    remote_latency,
    run_page,
    snapshot_speed,
    state_keys_speed,
    store_cost,
)
from bench.demo_iteration import JOB, QUICK, Played, played_in
from bench.kit import ROOT
from shared_schemas.trajectory import StopReason
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


def test_what_a_remote_policy_adds_to_its_latency_is_held_against_that(capsys: Printed):
    size = ["--latency-ms", "5", "--episodes", "4", "--decisions", "2"]
    assert remote_latency.main([*size, "--limit", "0"]) == 1
    printed = capsys.readouterr().out
    assert "8 decisions of 4 episodes" in printed and "MISSED" in printed


def test_credit_is_held_against_an_iteration_that_was_really_played(iteration, capsys: Printed):
    found, _ = iteration
    demo = load_job(JOB).config
    assert (found.job.algorithm, found.job.training.critic) == (demo.algorithm, demo.training.critic)
    assert found.job.training.group_size == demo.training.group_size
    assert credit_share.report(found, limit=0.0) == 1
    printed = capsys.readouterr().out
    assert "an iteration of 40 decisions took" in printed
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
    assert len(read) > 30
    assert read - known - told - mixtures - reasons == set()


def test_what_recovery_costs_is_held_against_an_iteration_that_was_really_played(iteration, capsys: Printed):
    found, folder = iteration
    assert recovery_cost.report(found, open_run(folder), limit=0.0) == 1
    printed = capsys.readouterr().out
    assert {"spool", "checkpoint", "records"} <= set(printed.split())
    assert "at most 0.00%): MISSED" in printed


def test_the_store_is_held_against_an_iteration_that_was_really_played(iteration, capsys: Printed):
    found, _ = iteration
    assert store_cost.report(found, limit=0.0) == 1
    printed = capsys.readouterr().out
    assert "an iteration of 40 decisions took" in printed
    assert "at most 0.00%): MISSED" in printed
    assert store_cost.report(found, limit=1e9) == 0


def test_a_page_of_a_run_that_reads_too_long_fails(capsys: Printed):
    assert run_page.main(["--iterations", "12", "--decisions", "240", "--limit-ms", "0"]) == 1
    assert len(re.findall(r"run, every curve, 400 points .* TOO SLOW", capsys.readouterr().out)) == 1


@pytest.mark.parametrize(("step", "world", "met"), [(25.0, 80.0, True), (24.9, 80.0, False), (99, 79, False)])
def test_the_engine_must_reach_both_of_its_ratios(step: float, world: float, met: bool):
    figures = {"step": {"ratio": step}, "world": {"ratio": world}}
    assert engine_speed.targets_met(figures) is met


@pytest.mark.parametrize(
    ("changed", "met"),
    [
        ({}, True),
        ({"faster_than_pickle": 3.9}, False),
        ({"smaller_than_pickle": 11.0}, False),
        ({"restore_ms": 0.41}, False),
        ({"group_start_ms": 15.1}, False),
    ],
)
def test_snapshots_must_reach_every_target(changed: dict[str, float], met: bool):
    figures = {
        "faster_than_pickle": 4.0, "smaller_than_pickle": 12.0, "restore_ms": 0.4, "branch_ms": 1.0,
        "group_start_ms": 15.0, **changed,
    }  # fmt: skip
    assert snapshot_speed.targets_met(figures) is met
