"""`turnwise trainer` as a process: what it prints, how it ends, and that a second one is refused."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.processes import ROOT, service
from tests.trainer_backend.test_command_line import turnwise

IMPORTED = "trainer_backend.jobs.server, trainer_backend.jobs.submission, trainer_backend.pages.app"


def start(folder: Path, *words: str):
    own = ("trainer", "--port", "0", "--data-dir", "runs")
    return service("trainer_backend", *own, *words, environ={"TRAINER_API_KEY": ""}, cwd=folder)


def test_it_shows_the_dashboard_and_ends_in_order_when_it_is_told_to(tmp_path):
    with start(tmp_path, "--exit-with-parent") as (process, url):
        page = httpx.get(url, headers={"Accept": "text/html"})
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert page.status_code == 200 and "<title>Runs" in page.text


def test_a_second_one_in_the_same_folder_is_refused_unless_it_only_shows(tmp_path):
    with start(tmp_path, "--exit-with-parent") as (first, _):
        second = turnwise("trainer", "--port", "0", "--data-dir", "runs", cwd=tmp_path)
        assert second.returncode == 2
        assert second.stderr.startswith(
            f"error: another trainer service runs jobs in {tmp_path}/runs. Stop it, choose"
        )
        with start(tmp_path, "--no-jobs") as (third, _):
            third.terminate()
            assert third.wait(60) == 0
        first.stdin.close()
        assert first.wait(60) == 0, "it ends when its standard input closes"


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (
            ("--host", "0.0.0.0"),
            2,
            "error: --host is '0.0.0.0', which others can reach, and there is no key.",
        ),
        (
            ("--database-url", "postgresql://turnwise:hunter2@127.0.0.1:1/turnwise"),
            1,
            "error: the store postgresql://turnwise:***@127.0.0.1:1/turnwise cannot be used: ",
        ),
    ],
)
def test_what_keeps_it_from_starting_is_one_sentence(tmp_path, words, code, told):
    done = turnwise("trainer", "--port", "0", "--data-dir", "runs", *words, cwd=tmp_path)
    assert (done.returncode, "listening" in done.stdout) == (code, False)
    assert done.stderr.startswith(told), done.stderr
    assert "hunter2" not in done.stderr + done.stdout


def test_a_port_that_is_taken_is_told_before_the_store_is_touched(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = turnwise("trainer", "--data-dir", "runs", "--port", str(port), cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.startswith(f"error: cannot listen on 127.0.0.1:{port}")
    assert list(tmp_path.iterdir()) == []


def test_the_service_itself_needs_no_torch():
    code = f"import sys, {IMPORTED}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
