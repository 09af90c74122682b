"""A figure that misses its target fails its script, so that `make bench` and CI notice."""

import ast
import re
from pathlib import Path

import pytest

from bench import credit_cost
from bench.demo_iteration import JOB, QUICK, Played, played_in
from bench.kit import ROOT
from trainer_backend.job.load import load_job
from trainer_backend.metrics import DECLARED
from trainer_backend.rundir.layout import open_run

Printed = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def iteration(tmp_path_factory: pytest.TempPathFactory, services: str) -> tuple[Played, Path]:
    """An iteration of 40 decisions, really played, and its run directory."""
    folder = tmp_path_factory.mktemp("iteration") / "run"
    return played_in(folder, (*QUICK, services)), folder


def test_credit_is_held_against_an_iteration_that_was_really_played(iteration, capsys: Printed):
    found, _ = iteration
    demo = load_job(JOB).config
    assert (found.job.algorithm, found.job.training.critic) == (demo.algorithm, demo.training.critic)
    assert found.job.training.group_size == demo.training.group_size
    assert credit_cost.decisions(found.rollouts) == 40
    assert credit_cost.report_credit(found, limit=0.0) == 1
    printed = capsys.readouterr().out
    assert "of that rewards and advantages" in printed
    whole, share = re.findall(r"all of credit, gae .*?([0-9.]+%)|all of credit is ([0-9.]+%)", printed)
    assert whole[0] == share[1], "what is held to the limit is all that the loop calls, not a part of it"
    assert "at most 0.00%): MISSED" in printed


def test_every_metric_that_a_script_reads_is_one_of_a_run(iteration):
    """A renamed one would be read as absent, or as 0."""
    known = {name for row in open_run(iteration[1]).metrics() for name in row if "/" in name}
    rooms = "|".join({name.partition("/")[0] for name in known} | {"mixture", "actor"})
    read = {
        node.value
        for file in (ROOT / "bench").glob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant)
        and re.fullmatch(rf"(?:{rooms})/[a-z0-9_/]*[a-z0-9_]", str(node.value))
    }
    assert len(read) > 20
    assert [name for name in read if not any(metric.matches(name) for metric in DECLARED)] == []
