"""A figure that misses its target fails its script, so that `make bench` and CI notice."""

import re

import pytest

from tests.bench.scripts import module, script


def test_log_probs_that_differ_too_much_fail():
    done = script("logprob_exactness.py", "--requests", "4", "--limit", "0")
    assert (done.returncode, done.stderr) == (1, "")
    assert "TOO LARGE" in done.stdout


def test_state_keys_that_take_too_long_fail():
    done = script("state_keys_speed.py", "--decisions", "60", "--limit", "0")
    assert (done.returncode, done.stderr) == (1, "")
    assert "TOO SLOW" in done.stdout and "text_history" in done.stdout


def test_what_a_remote_policy_adds_to_its_latency_is_held_against_that():
    size = ("--latency-ms", "5", "--episodes", "4", "--decisions", "2")
    done = script("remote_latency.py", *size, "--limit", "0")
    assert (done.returncode, done.stderr) == (1, "")
    assert "8 decisions of 4 episodes" in done.stdout and "MISSED" in done.stdout


def test_credit_is_held_against_an_iteration_that_was_really_played():
    done = script("credit_share.py", "--quick", "--limit", "0")
    assert (done.returncode, done.stderr) == (1, "")
    assert "an iteration of 40 decisions took" in done.stdout
    assert "of that rewards and advantages" in done.stdout
    whole, share = re.findall(
        r"all of credit, stepwise .*?([0-9.]+%)|all of credit is ([0-9.]+%)", done.stdout
    )
    assert whole[0] == share[1], "what is held to the limit is all that the loop calls, not a part of it"
    assert "at most 0.00%): MISSED" in done.stdout


def test_what_recovery_costs_is_held_against_an_iteration_that_was_really_played():
    done = script("recovery_cost.py", "--quick", "--limit", "0")
    assert (done.returncode, done.stderr) == (1, "")
    assert {"spool", "checkpoint", "records"} <= set(done.stdout.split())
    assert "at most 0.00%): MISSED" in done.stdout


def test_the_store_is_held_against_an_iteration_that_was_really_played():
    done = script("store_cost.py", "--quick", "--limit", "0")
    assert (done.returncode, done.stderr) == (1, "")
    assert "an iteration of 40 decisions took" in done.stdout
    assert "at most 0.00%): MISSED" in done.stdout


def test_a_page_of_a_run_that_reads_too_long_fails():
    done = script("run_page.py", "--iterations", "12", "--decisions", "240", "--limit-ms", "0")
    assert (done.returncode, done.stderr) == (1, "")
    assert len(re.findall(r"run, every curve, 400 points .* TOO SLOW", done.stdout)) == 1


@pytest.mark.parametrize(("step", "world", "met"), [(25.0, 80.0, True), (24.9, 80.0, False), (99, 79, False)])
def test_the_engine_must_reach_both_of_its_ratios(step: float, world: float, met: bool):
    figures = {"step": {"ratio": step}, "world": {"ratio": world}}
    assert module("engine_speed").targets_met(figures) is met


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
    assert module("snapshot_speed").targets_met(figures) is met
