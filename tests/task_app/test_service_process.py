"""`python -m task_app` as a process of its own, and `--replicas N`, over real sockets."""

import json
import os
import re
import signal
import socket
import subprocess
from contextlib import contextmanager
from importlib.metadata import version

import httpx
import pytest
from typer.testing import CliRunner

from task_app.__main__ import app, main
from tests.conftest import free_port
from tests.processes import runs, service
from tests.task_app.counting import KEY


@contextmanager
def task_app(*arguments, key=KEY, **environment):
    """A started task app and a client of it. It is ended by its stdin, like that of a killed trainer."""
    words, environ = ("--port", "0", "--exit-with-parent"), {"ENVIRONMENT_API_KEY": key, **environment}
    with service("task_app", *words, *arguments, environ=environ, stderr=subprocess.PIPE) as (process, url):
        with httpx.Client(base_url=url, headers={"X-API-Key": key}, timeout=20.0) as client:
            yield process, client
        process.stdin.close()
        process.wait(20)


def crafter(rollout_id, **changes):
    return {
        "rollout_id": rollout_id,
        "run_id": "r",
        "start": {"seed": 5},
        "env": {"env_name": "crafter", "config": {"text": "compact", "max_actions": 4}},
        "policy": {"policy_name": "crafter_teacher", "config": {"max_actions": 4}},
        "step_rewards": {"enabled": True, "mode": "decision_stepwise"},
        "limits": {"max_decisions": 20},
        **changes,
    }


def collected(client, count):
    found, cursor = {}, None
    while len(found) < count:
        page = client.get("/rollouts", params={"run_id": "r", "wait_s": 20, "cursor": cursor or ""}).json()
        cursor = page["cursor"]
        found |= {rollout["rollout_id"]: rollout for rollout in page["rollouts"]}
    return found


def test_a_life_of_the_service_until_its_parent_ends():
    with task_app(TURNWISE_LOG_LEVEL="debug") as (process, client):
        assert client.get("/health").json()["authorized"] is True
        client.get("/info", headers={"X-API-Key": KEY[:-1]})

        too_large = client.post("/rollouts", content=b"x" * 10_000_000)
        assert (too_large.status_code, too_large.json()["code"]) == (413, "body_too_large")

        assert client.post("/rollouts", json={"rollouts": [crafter("a"), crafter("b")]}).status_code == 202
        found = collected(client, 2)
        _, log = process.communicate(timeout=15)  # closes its stdin
    steps, again = [found[name]["trajectory"]["steps"] for name in "ab"]
    for step in (*steps, *again):
        for took in ("policy_s", "environment_s"):
            del step["step_info"][took]
    assert steps == again, "equal seeds and a policy without chance: equal episodes"
    records = [step["metadata"]["decision_rewards"] for step in steps]
    outcome = found["a"]["trajectory"]["outcome_reward"]
    assert sum(record["unique_delta"] for record in records) == outcome > 0
    assert process.returncode == 0
    assert [line for line in log.splitlines() if "rollout_finished" in line and "rollout_id=a" in line]
    assert KEY[:-1] not in log and "Traceback" not in log


def test_a_stop_ends_a_running_rollout_and_answers_who_waits_for_it():
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        task_app(TURNWISE_DRAIN_S="0.5") as (process, client),
    ):
        config = {"inference_url": f"http://127.0.0.1:{silent.getsockname()[1]}", "model": "m"}
        policy = {"policy_name": "openai", "config": config}
        client.post("/rollouts", json={"rollouts": [crafter("slow", policy=policy)]})
        asked, _ = silent.accept()
        poll = socket.create_connection((client.base_url.host, client.base_url.port), timeout=15)
        with asked, poll:
            poll.sendall(
                f"GET /rollouts?run_id=r&wait_s=30 HTTP/1.1\r\nHost: x\r\nX-API-Key: {KEY}\r\n\r\n".encode()
            )
            client.get("/health")  # answered after the poll was read
            process.send_signal(signal.SIGTERM)
            answer = poll.makefile("rb").read()
            assert process.wait(15) == 0
    assert answer.startswith(b"HTTP/1.1 200 OK")
    page = json.loads(answer.partition(b"\r\n\r\n")[2])
    (ended,) = page["rollouts"]
    assert (page["unfinished"], ended["status"], ended["failure"]["code"]) == (0, "cancelled", "cancelled")


def test_what_cannot_be_is_told_clearly_with_exit_code_2(capsys, monkeypatch):
    def refusal(*arguments: str) -> str:
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        printed = capsys.readouterr()
        assert printed.out == ""
        return " ".join(printed.err.replace("│", "").split())

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit, match="2"):
            main(["--port", str(port)])
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert printed.out == "" and line.startswith(
        f"error: cannot listen on 127.0.0.1:{port}: Address already in use. "
    )
    assert "Invalid value for '--port'" in refusal("--port", "70000")
    assert "Invalid value for '--replicas'" in refusal("--replicas", "0")
    beyond = refusal("--replicas", "2", "--port", "65535")
    assert "2 replicas from port 65535 on go beyond port 65535" in beyond
    unreachable = refusal("--host", "no.such.host.invalid")
    assert unreachable.startswith("error: cannot listen on no.such.host.invalid:8001")
    monkeypatch.setenv("TURNWISE_MAX_SESSIONS", "many")
    assert refusal().startswith("error: TURNWISE_MAX_SESSIONS is 'many'")


def test_it_tells_its_version_and_its_name_as_the_other_commands_do():
    told = CliRunner().invoke(app, ["--version"]).stdout
    assert told == f"turnwise {version('turnwise')}\n"
    usage = CliRunner().invoke(app, ["--help"], prog_name="turnwise task-app").stdout
    assert "Usage: turnwise task-app [OPTIONS]" in usage and "╭─ Options" in usage


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


def test_a_replica_that_cannot_start_says_why_and_ends_all_with_2(capfd):
    with pytest.raises(SystemExit, match="2"):
        main(["--replicas", "1", "--port", "0", "--plugins", "no_such.py"])
    printed = capfd.readouterr()
    assert "no_such.py" in printed.err and "Traceback" not in printed.err
    assert printed.out == ""
