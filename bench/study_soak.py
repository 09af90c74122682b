"""Soak: a task app under mixed load for a long time; clients, and at the end the app, are killed at random.

    python -m bench.study_soak [--seconds 600]        (make study-soak)

Client processes play Crafter sessions and compare them with environments of their own, take and restore
snapshots, run rollouts, disconnect during requests and send requests twice. A client is killed every few
seconds. In the last fifth of the time, the task app is killed too, and restarted with the same --state-dir.
At the end, no step may be lost or doubled, no answer may differ, abandoned sessions must have expired, and
memory must be flat. bench/results/soak.json has the figures; the exit code is 1 if a bound does not hold.
"""

import argparse
import asyncio
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
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import psutil

from bench import kit
from bench.fault_installation import Server
from bench.kit import ROOT, free_port
from task_app.environments.crafter.environment import CrafterConfig, CrafterEnvironment
from task_app.environments.crafter.rules import ACTIONS
from task_app.episode.actions import requests_from_wire

TEXT = "compact"
# After any other status, a request is repeated with its key: the server was killed, starts or is full.
FINAL = (200, 202, 404, 409, 422)
# The longest that a client waits for a server that is being restarted.
PATIENCE_S = 60.0
# Number of players of a client; the first one runs scripted rollouts.
PLAYERS = 6


@dataclass
class Tally:
    """Counts of events, and the times of steps."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    steps_ms: list[float] = field(default_factory=list)

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            self.wrong.append(what)


class Caller:
    """POSTs with an Idempotency-Key until there is an answer, with occasional hang-ups and repeats."""

    def __init__(self, session: aiohttp.ClientSession, chance: random.Random, tally: Tally) -> None:
        self._session, self._chance, self._tally = session, chance, tally

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        key = str(uuid.UUID(int=self._chance.getrandbits(128)))
        if self._chance.random() < 0.1:
            await self._hang_up(path, body, key)
        if self._chance.random() < 0.1:
            self._tally.counts["asked_twice"] += 1
            answers = await asyncio.gather(*(self._until(path, body, key) for _ in range(2)))
            self._tally.check(answers[0] == answers[1], f"{path}: two answers to one key: {answers}")
            return answers[0]
        return await self._until(path, body, key)

    async def _until(self, path: str, body: dict[str, Any], key: str) -> tuple[int, dict[str, Any]]:
        until_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                started_s = time.perf_counter()
                status, answer = await self._once(path, body, key)
                if status in FINAL:
                    if path == "/env/step":
                        self._tally.steps_ms.append(1e3 * (time.perf_counter() - started_s))
                    return status, answer
                self._tally.counts[f"status_{status}"] += 1
            except (aiohttp.ClientError, OSError, TimeoutError):
                self._tally.counts["no_answer"] += 1
            if time.monotonic() > until_s:
                raise SystemExit(f"{path}: no answer within {PATIENCE_S:g} s")
            await asyncio.sleep(0.05)

    async def _hang_up(self, path: str, body: dict[str, Any], key: str) -> None:
        self._tally.counts["hung_up"] += 1
        sent = asyncio.ensure_future(self._once(path, body, key))
        await asyncio.wait({sent}, timeout=self._chance.random() * 0.01)
        sent.cancel()
        await asyncio.gather(sent, return_exceptions=True)

    async def _once(self, path: str, body: dict[str, Any], key: str) -> tuple[int, dict[str, Any]]:
        async with self._session.post(path, json=body, headers={"Idempotency-Key": key}) as response:
            return response.status, json.loads(await response.read())


class Expired(Exception):
    """The session was idle for too long, which a busy machine may cause."""


class Player:
    """Plays an environment over HTTP and an equal one in this process, which must never differ.

    A session that was idle for IDLE_S may have expired.
    """

    def __init__(self, call: Caller, chance: random.Random, tally: Tally) -> None:
        self._call, self._chance, self._tally = call, chance, tally
        self._used_s = time.monotonic()
        self._model = CrafterEnvironment(CrafterConfig(text=TEXT))
        self._calls: list[Any] = []
        self._env_id = ""

    async def play(self) -> None:
        try:
            await self._play()
        except Expired:
            self._tally.counts["expired"] += 1

    async def _ask(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        asked_s, before_s = time.monotonic(), self._used_s
        status, answer = await self._call.post(path, body)
        self._used_s = asked_s
        if status == 404 and time.monotonic() - before_s > IDLE_S:
            raise Expired
        return status, answer

    async def _play(self) -> None:
        seed = self._chance.randrange(20)
        body = {"env_name": "crafter", "seed": seed, "config": {"text": TEXT}}
        status, made = await self._ask("/env/create", body)
        self._tally.check(status == 200, f"create: {made}")
        self._env_id = made["env_id"]
        shown = self._model.reset(seed)
        self._tally.check(made["observation"]["text"] == shown.text, "the first observation differs")
        for _ in range(self._chance.randrange(1, 30)):
            if not await self._act():
                break
        if self._chance.random() < 0.8:  # other sessions are left to expire idle
            status, _ = await self._ask("/env/terminate", {"env_id": self._env_id})
            self._tally.check(status == 200, f"terminate: {status}")
            self._tally.counts["terminated"] += 1

    async def _act(self) -> bool:
        """Take a step, sometimes after a restore or a reset; return whether the episode continues."""
        chosen = self._chance.random()
        if chosen < 0.04:
            await self._restored()
        elif chosen < 0.06:
            seed = self._chance.randrange(20)
            _, answer = await self._ask("/env/reset", {"env_id": self._env_id, "seed": seed})
            shown, self._calls = self._model.reset(seed), []
            same = answer["observation"]["text"] == shown.text
            self._tally.check(same, "an observation after a reset differs")
        return await self._step()

    async def _step(self) -> bool:
        actions = [self._chance.choice(ACTIONS) for _ in range(self._chance.randrange(1, 6))]
        call = [{"tool": "interact_many", "args": {"actions": actions}}]
        status, answer = await self._ask("/env/step", {"env_id": self._env_id, "tool_calls": call})
        if status != 200:
            self._tally.check(False, f"step: {status} {answer}")
            return False
        outcome = self._model.step(requests_from_wire(call))
        self._calls.append(call)
        turn, expected = answer["info"]["turn"], len(self._calls)
        self._tally.check(turn == expected, f"turn {turn}, expected {expected}: a step was lost or doubled")
        wanted = outcome.observation.text, list(outcome.env_rewards)
        same = (answer["observation"]["text"], answer["env_rewards"]) == wanted
        self._tally.check(same, f"decision {turn} differs from the same environment in this process")
        self._tally.counts["steps"] += 1
        return not answer["done"]

    async def _restored(self) -> None:
        """Continue in a restored copy, and end the old session."""
        _, taken = await self._ask("/env/snapshot", {"env_id": self._env_id})
        status, copy = await self._ask("/env/restore", {"snapshot": taken["snapshot"]})
        self._tally.check(status == 200, f"restore: {copy}")
        await self._ask("/env/terminate", {"env_id": self._env_id})
        self._env_id = copy["env_id"]
        self._tally.counts["restored"] += 1


async def rollouts(session: aiohttp.ClientSession, chance: random.Random, tally: Tally) -> None:
    """Request, fetch and acknowledge four scripted episodes; give up if the task app is killed."""
    run_id = uuid.UUID(int=chance.getrandbits(128)).hex
    asked = [
        {"rollout_id": f"{run_id}/{i}", "run_id": run_id, "start": {"seed": chance.randrange(20)},
         "env": {"env_name": "crafter"}, "policy": {"policy_name": "crafter_teacher"},
         "limits": {"max_decisions": 10}}
        for i in range(4)
    ]  # fmt: skip
    try:
        async with session.post("/rollouts", json={"rollouts": asked}) as response:
            if response.status != 202:
                return
        unfinished, found, cursor = len(asked), 0, ""
        while unfinished:
            params = {"run_id": run_id, "cursor": cursor, "wait_s": "5"}
            async with session.get("/rollouts", params=params) as response:
                page = json.loads(await response.read())
                if response.status != 200:
                    return
            ids = [rollout["rollout_id"] for rollout in page["rollouts"]]
            found, unfinished, cursor = found + len(ids), page["unfinished"], page["cursor"]
            await (await session.post("/rollouts/ack", json={"run_id": run_id, "rollout_ids": ids})).read()
        tally.counts["rollouts"] += found
    except (aiohttp.ClientError, OSError, TimeoutError):
        tally.counts["runs_cut"] += 1
        await asyncio.sleep(0.1)


async def play_sessions(options: argparse.Namespace) -> Tally:
    """Be a client: run players that use every kind of session, misbehave, and check the answers."""
    tally, until_s = Tally(), time.monotonic() + options.seconds
    headers = {"X-API-Key": os.environ["ENVIRONMENT_API_KEY"]}
    timeout = aiohttp.ClientTimeout(total=30.0)
    async with aiohttp.ClientSession(options.client, headers=headers, timeout=timeout) as session:

        async def loop(number: int) -> None:
            chance = random.Random(f"{options.seed}/{number}")
            call = Caller(session, chance, tally)
            while time.monotonic() < until_s and not tally.wrong:
                if number == 0:
                    await rollouts(session, chance, tally)
                else:
                    await Player(call, chance, tally).play()

        await asyncio.gather(*(loop(number) for number in range(PLAYERS)))
    return tally


CLIENTS = 3
# Share of the time in which only clients are killed; in the rest, the task app is killed too.
STEADY = 0.8
# Largest ratio of memory in the last third of the steady part to memory in the middle third: a leak grows.
FLAT = 1.1


IDLE_S, MAX_SESSIONS = 5.0, 400
SETTINGS = {
    "TURNWISE_SESSION_IDLE_S": str(IDLE_S),
    "TURNWISE_SWEEP_EVERY_S": "0.5",
    "TURNWISE_MAX_SESSIONS": str(MAX_SESSIONS),
    "TURNWISE_IDEMPOTENCY_S": "20",
    "TURNWISE_LOG_LEVEL": "warning",
}


@dataclass
class Found(Tally):
    """The study's observations so far."""

    memory: list[tuple[float, int]] = field(default_factory=list)

    def took(self, process: subprocess.Popen[str]) -> None:
        """Add the tally that a client has printed, if it ended by itself."""
        printed, _ = process.communicate()
        if process.returncode not in (0, 1):
            self.wrong.append(f"a client ended with {process.returncode}")
            return
        told = json.loads(printed)
        self.counts.update(told["counts"])
        self.wrong += told["wrong"]
        self.steps_ms += told["steps_ms"]


class App(Server):
    """The task app in a process that can be killed and restarted at the same address with the same state."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.environ = {"ENVIRONMENT_API_KEY": secrets.token_hex(16), "PYTHONPATH": str(ROOT), **SETTINGS}
        command = [sys.executable, "-m", "task_app", "--port", str(self.port), "--exit-with-parent"]
        super().__init__([*command, "--state-dir", str(folder / "state")], self.environ, folder / "app.log")

    def start(self) -> None:
        """Start the process, and return when it listens."""
        super().start()
        while True:
            with suppress(ConnectionRefusedError):
                return socket.create_connection(("127.0.0.1", self.port)).close()
            if self.ended:
                raise SystemExit("the task app did not start")
            time.sleep(0.02)


def study(seconds: float, *, seed: int) -> dict[str, Any]:
    """Run the study, and return the results."""
    chance, found = random.Random(seed), Found()
    with tempfile.TemporaryDirectory() as folder:
        app = App(Path(folder))
        try:
            load(app, found, chance, seconds=STEADY * seconds, restarts=False)
            steady_ms = sorted(found.steps_ms)
            load(app, found, chance, seconds=(1 - STEADY) * seconds, restarts=True)
            left = abandoned(app)
        finally:
            app.kill()
    return results(seconds, found, steady_ms, left)


def load(app: App, found: Found, chance: random.Random, *, seconds: float, restarts: bool) -> None:
    """Run clients for some seconds; every second or two, mostly kill one, and with `restarts` the app."""
    until_s = time.monotonic() + seconds
    clients = [client(app, chance, until_s) for _ in range(CLIENTS)]
    while time.monotonic() < until_s:
        time.sleep(min(chance.uniform(1.0, 2.0), max(0.1, until_s - time.monotonic())))
        if not restarts:
            found.memory.append((time.monotonic(), psutil.Process(app.pid).memory_info().rss))
        elif time.monotonic() < until_s:
            app.kill()
            app.start()
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
    command = [sys.executable, "-m", "bench.study_soak", "--client", app.url]
    command += ["--seed", str(chance.getrandbits(32)), "--seconds", str(seconds)]
    environ = {**os.environ, **app.environ}
    return subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True)


def abandoned(app: App) -> dict[str, Any]:
    """Wait until idle sessions expire; return how many are left, and how many new sessions then fit."""
    key = {"X-API-Key": app.environ["ENVIRONMENT_API_KEY"]}
    body = {"env_name": "crafter", "config": {"text": "compact"}}
    with httpx.Client(base_url=app.url, headers=key, timeout=60.0) as http:
        before = now = open_sessions(http)
        until_s = time.monotonic() + 4 * IDLE_S + 10.0
        while now and time.monotonic() < until_s:
            time.sleep(0.5)
            now = open_sessions(http)
        fits = sum(http.post("/env/create", json=body).status_code == 200 for _ in range(MAX_SESSIONS))
    return {"at_the_end": before, "after_idle_expiry": now, "new_sessions_that_fit": fits}


def open_sessions(http: httpx.Client) -> int:
    """Return the number of live environments, by the task app's metrics."""
    line = re.search(r'^turnwise_sessions\{kind="env"\} (\S+)$', http.get("/metrics").text, re.M)
    assert line is not None, "/metrics tells the open sessions"
    return int(float(line[1]))


def results(seconds: float, found: Found, steady_ms: list[float], left: dict[str, Any]) -> dict[str, Any]:
    """Return the figures, and whether all required bounds hold."""
    begun_s = found.memory[0][0]
    third = (found.memory[-1][0] - begun_s) / 3
    middle = [size for at_s, size in found.memory if third <= at_s - begun_s < 2 * third]
    last = [size for at_s, size in found.memory if at_s - begun_s >= 2 * third]
    growth = statistics.median(last) / statistics.median(middle)
    return {
        "study": "soak",
        "seconds": seconds,
        "machine": kit.describe_machine(python=platform.python_version()),
        "counts": dict(found.counts),
        "step_ms": {f"p{n}": quantile(steady_ms, n / 100) for n in (50, 99)} | {"steps": len(steady_ms)},
        "memory_mb": {"middle": statistics.median(middle) / 1e6, "last": statistics.median(last) / 1e6},
        "memory_growth": growth,
        "sessions": left,
        "wrong": found.wrong[:20],
        "holds": {
            "no step lost or doubled, no answer differs": not found.wrong,
            "no session leaked": left["after_idle_expiry"] == 0
            and left["new_sessions_that_fit"] == MAX_SESSIONS,
            "memory flat": growth <= FLAT,
        },
    }


def quantile(ordered: Sequence[float], share: float) -> float | None:
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2) if ordered else None


def main(arguments: Sequence[str] | None = None) -> int:
    options = kit.options(
        __doc__,
        ("--seconds", 600.0, "of load"),
        ("--seed", 0),
        ("--client", "", "be a client of the task app at this address; used by the script itself"),
        ("--results", ROOT / "bench" / "results" / "soak.json"),
        arguments=arguments,
    )
    if options.client:  # until its time is over
        tally = asyncio.run(play_sessions(options))
        print(json.dumps({"counts": tally.counts, "wrong": tally.wrong[:10], "steps_ms": tally.steps_ms}))
        return 1 if tally.wrong else 0
    return kit.end_study(study(options.seconds, seed=options.seed), options.results)


if __name__ == "__main__":
    sys.exit(main())
