"""`--replicas N`: real processes on ports of their own, kept running; what they log is waited for."""

import json
import os
import re
import signal
import subprocess
from contextlib import contextmanager

import httpx
import pytest

from task_app.__main__ import main
from tests.conftest import free_port
from tests.processes import runs, service
from tests.task_app.counting import KEY


class Supervisor:
    """A started one: its URLs, and its log line by line."""

    def __init__(self, process, urls):
        self.process = process
        self.urls = json.loads(urls)
        self.ready = {}
        while len(self.ready) < len(self.urls):
            self.next_ready()

    def log_line(self, words):
        for line in self.process.stderr:
            if words in line:
                return line
        raise AssertionError(f"the log ended without {words!r}")

    def next_ready(self):
        """The replica that is ready next, as the log says."""
        line = self.log_line("replica_ready")
        index, pid = (int(re.search(rf"{name}=(\d+)", line)[1]) for name in ("replica", "pid"))
        self.ready[index] = pid
        return index

    def get(self, index, path):
        return httpx.get(self.urls[index] + path, headers={"X-API-Key": KEY}, timeout=20)


@contextmanager
def supervised(*arguments):
    environ, ready = {"ENVIRONMENT_API_KEY": KEY}, "task_url = "
    words = ("--exit-with-parent", *arguments)
    with service("task_app", *words, environ=environ, ready=ready, stderr=subprocess.PIPE) as (process, urls):
        try:
            yield Supervisor(process, urls)
        finally:
            process.stdin.close()  # its replicas end with it, whatever became of the test
            process.wait(30)


def test_a_replica_that_is_killed_is_started_again_on_its_port_and_a_stop_ends_all(tmp_path):
    port = free_port(2)
    with supervised("--replicas", "2", "--port", str(port), "--state-dir", str(tmp_path)) as supervisor:
        assert supervisor.urls == [f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"]
        first, second = (supervisor.get(index, "/info").json()["service"] for index in (0, 1))
        assert first["instance_id"] != second["instance_id"]
        assert sorted(folder.name for folder in tmp_path.iterdir()) == ["replica-0", "replica-1"]

        killed = supervisor.ready[1]
        os.kill(killed, signal.SIGKILL)
        ended = supervisor.log_line("replica_ended")
        assert f"url={supervisor.urls[1]}" in ended
        assert "exit_code=-9" in ended
        assert supervisor.next_ready() == 1
        assert supervisor.ready[1] != killed
        assert supervisor.get(1, "/health").json()["authorized"] is True
        assert supervisor.get(0, "/info").json()["service"]["instance_id"] == first["instance_id"]

        supervisor.process.send_signal(signal.SIGTERM)
        assert supervisor.process.wait(30) == 0
        assert not any(map(runs, supervisor.ready.values()))


def test_arguments_that_cannot_be_are_refused_with_2(capsys):
    for arguments, told in (
        (["--replicas", "0"], "Invalid value for '--replicas'"),
        (["--replicas", "2", "--port", "65535"], "2 replicas from port 65535 on go beyond port 65535"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        assert told in " ".join(capsys.readouterr().err.replace("│", "").split())


def test_a_replica_that_cannot_start_says_why_and_ends_all_with_2(capfd):
    with pytest.raises(SystemExit, match="2"):
        main(["--replicas", "1", "--port", "0", "--plugins", "no_such.py"])
    printed = capfd.readouterr()
    assert "no_such.py" in printed.err and "Traceback" not in printed.err
    assert printed.out == ""
