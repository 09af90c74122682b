"""Compares CPU time and steps per second over HTTP with FastAPI's hello and with OpenEnv's server.

    python -m bench.http_batch [--peer-python /path/to/venv/bin/python] [--rounds 5]

    null     CPU of a POST /env/step of an environment that does nothing / CPU of FastAPI's hello       <= 1.6
    single   16 clients: steps/s of POST /env/step / 16 of OpenEnv's own, the same environment          >= 1.4
    batch    one client: steps/s of POST /env/step_many, 10 actions each in two decisions,
             / steps/s of OpenEnv with the original crafter                                             >= 20

The peer is OpenEnv's server. It needs a Python with openenv-core, crafter and structlog; without one,
`single` and `batch` are skipped. They are judged only if that Python also has uvloop and httptools, as our
service has. Otherwise the slower asyncio and h11 serve the peer, and each figure says so. Our service has
clients of bare asyncio, OpenEnv its own clients. The sides take turns. Their best rounds are compared, as
other load on the machine only adds time. Our server's CPU time a step, from /proc (Linux only), is printed
too. The exit code is 1 if a figure is missed.
"""

import asyncio
import os
import secrets
import subprocess
import sys
from argparse import Namespace
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from bench import kit
from bench.http_rates import Connection, Play, Rate, Server, running, timed

HERE = Path(__file__).parent
PEER = str(HERE / "peers/openenv_crafter.py")
OUR_PARTS = "uvloop and httptools"
CLIENTS, STEPS, BATCH, REQUESTS = 16, 100, 10, 500
# The player walks and looks around. Within STEPS it needs no food, and rarely dies.
ACTIONS = ("move_left", "do", "move_up", "noop", "move_right", "do", "move_down", "noop")


def step(env_id: str, index: int, actions: int = 1) -> dict[str, object]:
    """Return the body of a request: a decision of this many actions, beginning at this index of ACTIONS."""
    named = [ACTIONS[number % len(ACTIONS)] for number in range(index, index + actions)]
    return {"env_id": env_id, "tool_calls": [{"tool": "interact_many", "args": {"actions": named}}]}


async def requests(server: Server, path: str, body: object) -> Rate:
    """Send REQUESTS equal requests from CLIENTS connections at once."""
    async with AsyncExitStack() as stack:

        def one(connection: Connection) -> Play:
            async def play() -> int:
                request = connection.encoded(path, body)
                for _ in range(REQUESTS):
                    status, reply = await connection.send(request)
                    assert status == 200, reply
                return REQUESTS

            return play

        opened = [Connection(server) for _ in range(CLIENTS)]
        return await timed(server, [one(await stack.enter_async_context(each)) for each in opened])


async def null_ratio(ours: Server, rounds: int) -> float:
    async with Connection(ours) as connection:
        env_id = (await connection.post("/env/create", {"env_name": "null"}))["env_id"]
    body = {"env_id": env_id, "tool_calls": [{"tool": "noop", "args": {}}]}
    mine, hers = [], []
    async with running(sys.executable, str(HERE / "peers/fastapi_hello.py")) as hello:
        for _ in range(rounds):
            hers.append((await requests(hello, "/", None)).cpu_us)
            mine.append((await requests(ours, "/env/step", body)).cpu_us)
    here, there = min(mine), min(hers)
    print(f"null environment: {here:.0f} us of CPU a request, FastAPI hello {there:.0f}", flush=True)
    return here / there


async def ours(server: Server, *, a_request: int = 1, a_decision: int = 1) -> Rate:
    """Play STEPS actions in each of CLIENTS sessions on connections of their own.

    By default, a request is one decision of one action, and all sessions play at once. Otherwise a request
    has `a_request` actions, in decisions of `a_decision`, and the sessions play one after the other. Sessions
    are created before the clock starts and terminated after it stops.
    """

    def one(connection: Connection, env_id: str) -> Play:
        async def play() -> int:
            done = 0
            for start in range(0, STEPS, a_request):
                at = range(start, start + a_request, a_decision)
                steps = [step(env_id, index, a_decision) for index in at]
                path, body = (
                    ("/env/step", steps[0]) if a_request == 1 else ("/env/step_many", {"steps": steps})
                )
                status, reply = await connection.send(connection.encoded(path, body))
                done += status == 200 if a_request == 1 else a_decision * reply.count(b'"status":200')
            return done

        return play

    async with AsyncExitStack() as stack:
        plays, made = [], []
        for seed in range(CLIENTS):
            connection = await stack.enter_async_context(Connection(server))
            created = await connection.post("/env/create", {"env_name": "crafter", "seed": seed})
            made.append((connection, created["env_id"]))
            plays.append(one(connection, created["env_id"]))

        async def in_turn() -> int:
            return sum([await play() for play in plays])

        rate = await timed(server, plays if a_request == 1 else [in_turn])
        for connection, env_id in made:
            await connection.post("/env/terminate", {"env_id": env_id})
        return rate


async def own_clients(python: str, server: Server, clients: int) -> float:
    """Return the steps per second of OpenEnv's own client library, which runs in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        python, str(HERE / "peers/openenv_clients.py"), str(server.port), str(clients), str(STEPS),
        ",".join(ACTIONS), stdout=subprocess.PIPE,
    )  # fmt: skip
    told, _ = await process.communicate()
    return float(told)


async def openenv_ratio(
    python: str, kind: str, name: str, play: Callable[[], Awaitable[Rate]], clients: int, rounds: int
) -> float:
    """Return our steps per second, divided by those of OpenEnv's own clients."""
    mine, theirs = [], []
    async with running(python, PEER, kind) as peer:
        for _ in range(rounds):
            theirs.append(await own_clients(python, peer, clients))
            mine.append(await play())
    per_s, cpu_us = max(rate.per_s for rate in mine), min(rate.cpu_us for rate in mine)
    print(f"{name}: {per_s:.0f} steps/s, {cpu_us:.0f} us of CPU a step", flush=True)
    print(f"OpenEnv, {kind}, its own clients: {max(theirs):.0f} steps/s", flush=True)
    return per_s / max(theirs)


async def measure(options: Namespace) -> int:
    plugins = str(HERE / "peers/null_environment.py")
    command = (sys.executable, "-m", "task_app", "--plugins", plugins, "--port")
    async with running(*command, key=secrets.token_urlsafe(16)) as server:
        ratio = await null_ratio(server, options.rounds)
        code = kit.report(f"x{ratio:.2f} CPU of a request / FastAPI hello (at most 1.6)", ratio <= 1.6)
        try:
            parts = peer_parts(options.peer_python)
        except NoPeer as why:
            print(f"skipped: single and batch against OpenEnv; {why}")
        else:
            bounds = {
                "single": (partial(ours, server), "ours", CLIENTS, 1.4),
                "batch": (partial(ours, server, a_request=BATCH, a_decision=5), "stock", 1, 20.0),
            }
            for name, (play, kind, clients, least) in bounds.items():
                ratio = await openenv_ratio(options.peer_python, kind, name, play, clients, options.rounds)
                equal = parts == OUR_PARTS
                bound = f"at least {least:g}" if equal else f"NOT JUDGED: it has {parts}, we {OUR_PARTS}"
                told = f"x{ratio:.2f} {name} / OpenEnv + {kind} crafter ({bound})"
                code |= kit.report(told, ratio >= least or not equal)
    return code


class NoPeer(Exception):
    """A Python cannot run the peer; the text says why."""


def peer_parts(python: str) -> str:
    """Return the event loop and the HTTP parser with which that Python would serve the peer.

    Raises:
        NoPeer: `python` is no Python, or lacks a package that the peer imports.
    """
    try:
        done = subprocess.run(
            [python, PEER, "parts"],
            capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(kit.ROOT)},
        )  # fmt: skip
    except OSError as exc:
        raise NoPeer(f"{python}: {exc.strerror}") from exc
    if done.returncode:
        raise NoPeer((done.stderr.strip().splitlines() or ["it ended"])[-1])
    return done.stdout.strip()


def main() -> int:
    peer = ("--peer-python", sys.executable, "a Python with openenv-core and crafter")
    return asyncio.run(measure(kit.options(__doc__, peer, ("--rounds", 5))))


if __name__ == "__main__":
    sys.exit(main())
