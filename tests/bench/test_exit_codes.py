"""A figure that misses its target fails its script, and a script says what it lacks."""

import ast
import asyncio
import re
import sys
import time
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bench import credit_cost, generation_speed
from bench.decision_rate import cpu_seconds, serving_cpu_seconds
from bench.http_batch import NoPeer, peer_parts
from bench.http_rates import running
from bench.kit import ROOT
from bench.played_iteration import JOB, QUICK, Played, played_in
from service_kit.server import Listener, ServerThread
from tests.conftest import is_declared
from trainer_backend.job.load import load_job
from trainer_backend.rundir.layout import open_run

Printed = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def iteration(tmp_path_factory: pytest.TempPathFactory, services: str) -> tuple[Played, Path]:
    """An iteration of 40 decisions, really played, and its run directory."""
    folder = tmp_path_factory.mktemp("iteration") / "run"
    return played_in(folder, (*QUICK, "evaluation.instances=2", services)), folder


def test_credit_is_held_against_an_iteration_that_was_really_played(iteration, capsys: Printed):
    found, _ = iteration
    job = load_job(JOB).config
    assert (found.job.algorithm, found.job.training.critic) == (job.algorithm, job.training.critic)
    assert found.job.training.group_size == job.training.group_size
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
    assert [name for name in read if not is_declared(name)] == []


@pytest.mark.parametrize(
    ("first", "second", "met"), [(1.1, 5.0, True), (1.09, 50.0, False), (3.0, 4.9, False)]
)
def test_the_engine_must_reach_both_of_its_ratios(first: float, second: float, met: bool, capsys: Printed):
    ratios = {"generate": first, "vLLM": second}
    assert generation_speed.targets_met(ratios, {"generate": 1.1, "vLLM": 5.0}) is met
    assert ("TOO SLOW" in capsys.readouterr().out) is not met


async def busy(request: Request) -> Response:
    """Reply after 50 ms of CPU time."""
    until = time.thread_time() + 0.05
    while time.thread_time() < until:
        pass
    return Response()


def test_the_cpu_time_of_the_gateway_is_that_of_its_servers_thread():
    with ServerThread(Starlette(routes=[Route("/", busy)]), Listener("127.0.0.1", 0)) as url:
        before = cpu_seconds()
        assert httpx.get(url).status_code == 200
        spent = {who: seconds - before[who] for who, seconds in cpu_seconds().items()}
        assert spent["gateway"] >= 0.03  # the system counts in ticks of 10 ms
        with pytest.raises(SystemExit, match="turnwise-engine"):
            serving_cpu_seconds()


def test_a_python_without_the_peer_is_named_with_what_it_lacks():
    with pytest.raises(NoPeer, match="No module named 'openenv'"):
        peer_parts(sys.executable)


def test_a_server_that_ends_before_it_listens_is_told_with_its_last_words():
    async def start() -> None:
        async with running(sys.executable, "-c", "raise ImportError('no uvloop')"):
            raise AssertionError("it never listens")

    with pytest.raises(SystemExit, match=r"exit code 1 .*ImportError: no uvloop"):
        asyncio.run(start())
