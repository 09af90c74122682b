"""Soak: a task app under mixed load for a long time, its clients killed at random, and at the end itself.

    python -m bench.study_soak [--quick] [--seconds 600]        (make study-soak)

Client processes (bench/soak_client.py) play Crafter sessions against a model of their own, snapshot and
restore them, run rollouts, hang up in the middle of requests and send them twice; one of them is killed every
few seconds. In the last fifth the task app too is killed with SIGKILL, again and again, and started on the
same --state-dir. Then: no step was lost or doubled, no answer differed, every abandoned session has expired,
memory was flat. bench/results/soak.json says so with the figures; exit code 1 when one does not hold.
"""

import json
import os
import platform
import random
import re
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench import kit
from bench.kit import ROOT

CLIENTS = 3
# Of the time: with clients killed alone; the rest with the task app killed too.
STEADY = 0.8
# Memory in the last third of the steady part, against the middle third: a leak would add to every second.
FLAT = 1.1


@dataclass(frozen=True)
class Size:
    """The duration and bounds of a study."""

    seconds: float
    idle_s: float
    max_sessions: int

    def settings(self) -> dict[str, str]:
        return {
            "TURNWISE_SESSION_IDLE_S": str(self.idle_s),
            "TURNWISE_SWEEP_EVERY_S": "0.5",
            "TURNWISE_MAX_SESSIONS": str(self.max_sessions),
            "TURNWISE_IDEMPOTENCY_S": "20",
            "TURNWISE_LOG_LEVEL": "warning",
        }


QUICK = Size(seconds=15.0, idle_s=3.0, max_sessions=60)


@dataclass
class Found:
    """The study's observations so far."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    steps_ms: list[float] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)

    def took(self, process: subprocess.Popen[str]) -> None:
        """The last output of a client that ended by itself."""
        printed, _ = process.communicate()
        if process.returncode not in (0, 1):
            self.wrong.append(f"a client ended with {process.returncode}")
            return
        told = json.loads(printed)
        self.counts.update(told["counts"])
        self.wrong += told["wrong"]
        self.steps_ms += told["steps_ms"]


class App:
    """The task app as a process that may be killed and started again at the same address."""

    def __init__(self, folder: Path | None, settings: Mapping[str, str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        self._environ = {
            **os.environ,
            "ENVIRONMENT_API_KEY": secrets.token_hex(16),
            "PYTHONPATH": str(ROOT),
            **settings,
        }
        self.process = self._started()

    @property
    def environ(self) -> dict[str, str]:
        return self._environ

    def resident_bytes(self) -> int:
        text = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(text) * os.sysconf("SC_PAGE_SIZE")

    def restart(self) -> None:
        """Kill the app with SIGKILL, and start a new one with its state."""
        self.process.kill()
        self.process.communicate()
        self.process = self._started()

    def stop(self) -> None:
        self.process.terminate()
        self.process.communicate(timeout=30)

    def _started(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "task_app", "--port", str(self.port)]
        command += ["--state-dir", str(self._folder)] if self._folder is not None else []
        process = subprocess.Popen(command, cwd=ROOT, env=self._environ, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        if not process.stdout.readline().startswith("listening on"):
            raise SystemExit("the task app did not start")
        return process


def study(size: Size, *, seed: int) -> dict[str, Any]:
    """Run the study, and return the results."""
    chance, found = random.Random(seed), Found()
    with tempfile.TemporaryDirectory() as folder:
        app = App(Path(folder) / "state", size.settings())
        try:
            load(app, found, chance, seconds=STEADY * size.seconds, restarts=False)
            steady_ms = sorted(found.steps_ms)
            load(app, found, chance, seconds=(1 - STEADY) * size.seconds, restarts=True)
            left = abandoned(app, Path(folder) / "state", size)
        finally:
            app.stop()
    return results(size, found, steady_ms, left)


def load(app: App, found: Found, chance: random.Random, *, seconds: float, restarts: bool) -> None:
    """Run clients for this long; kill one every second or two, and with `restarts` the app as well."""
    until_s = time.monotonic() + seconds
    clients = [client(app, chance, until_s) for _ in range(CLIENTS)]
    while time.monotonic() < until_s:
        time.sleep(min(chance.uniform(1.0, 2.0), max(0.1, until_s - time.monotonic())))
        if not restarts:
            found.memory.append((time.monotonic(), app.resident_bytes()))
        elif time.monotonic() < until_s:
            app.restart()
            found.counts["app_killed"] += 1
        if time.monotonic() < until_s - 2.0 and chance.random() < 0.7:
            number = chance.randrange(CLIENTS)
            clients[number].send_signal(signal.SIGKILL)
            clients[number].communicate()
            found.counts["clients_killed"] += 1
            clients[number] = client(app, chance, until_s)
    for process in clients:
        found.took(process)


def client(app: App, chance: random.Random, until_s: float) -> subprocess.Popen[str]:
    seconds = max(0.5, until_s - time.monotonic())
    command = [sys.executable, "-m", "bench.soak_client", app.url]
    command += ["--seed", str(chance.getrandbits(32)), "--seconds", str(seconds)]
    command += ["--idle-s", app.environ["TURNWISE_SESSION_IDLE_S"]]
    return subprocess.Popen(command, cwd=ROOT, env=app.environ, stdout=subprocess.PIPE, text=True)


def abandoned(app: App, folder: Path, size: Size) -> dict[str, Any]:
    """The sessions that are left after the idle time."""
    key = {"X-API-Key": app.environ["ENVIRONMENT_API_KEY"]}
    body = {"env_name": "crafter", "config": {"text": "compact"}}
    with httpx.Client(base_url=app.url, headers=key, timeout=60.0) as http:
        before = now = open_sessions(http)
        until_s = time.monotonic() + 4 * size.idle_s + 10.0
        while now and time.monotonic() < until_s:
            time.sleep(0.5)
            now = open_sessions(http)
        fits = sum(http.post("/env/create", json=body).status_code == 200 for _ in range(size.max_sessions))
    return {"at_the_end": before, "after_idle_expiry": now, "new_sessions_that_fit": fits}


def open_sessions(http: httpx.Client) -> int:
    """The number of live environments by the task app's count."""
    line = re.search(r'^turnwise_sessions\{kind="env"\} (\S+)$', http.get("/metrics").text, re.M)
    assert line is not None, "/metrics tells the open sessions"
    return int(float(line[1]))


def results(size: Size, found: Found, steady_ms: list[float], left: dict[str, Any]) -> dict[str, Any]:
    """The figures, and whether all required bounds hold."""
    machine = {"cpus": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()}
    begun_s = found.memory[0][0]
    third = (found.memory[-1][0] - begun_s) / 3
    middle = [size for at_s, size in found.memory if third <= at_s - begun_s < 2 * third]
    last = [size for at_s, size in found.memory if at_s - begun_s >= 2 * third]
    growth = statistics.median(last) / statistics.median(middle)
    return {
        "study": "soak",
        "seconds": size.seconds,
        "machine": machine,
        "counts": dict(found.counts),
        "step_ms": {
            "p50": quantile(steady_ms, 0.5),
            "p99": quantile(steady_ms, 0.99),
            "steps": len(steady_ms),
        },
        "memory_mb": {"middle": statistics.median(middle) / 1e6, "last": statistics.median(last) / 1e6},
        "memory_growth": growth,
        "sessions": left,
        "wrong": found.wrong[:20],
        "holds": {
            "no step lost or doubled, no answer differs": not found.wrong,
            "no session leaked": left["after_idle_expiry"] == 0
            and left["new_sessions_that_fit"] == size.max_sessions,
            "memory flat": growth <= FLAT,
        },
    }


def quantile(ordered: Sequence[float], share: float) -> float | None:
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2) if ordered else None


def main(arguments: Sequence[str] | None = None) -> int:
    options = kit.options(
        __doc__,
        ("--seconds", 600.0, "of load"),
        ("--quick", False, "15 seconds of load; memory is not judged"),
        ("--seed", 0),
        ("--results", ROOT / "bench" / "results" / "soak.json"),
        arguments=arguments,
    )
    full = Size(seconds=options.seconds, idle_s=5.0, max_sessions=400)
    found = study(QUICK if options.quick else full, seed=options.seed)
    if options.quick:
        # So few seconds are all warm-up.
        del found["holds"]["memory flat"]
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return 0 if all(found["holds"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
