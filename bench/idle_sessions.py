"""Memory of a session that nobody uses: 1,000 Crafter environments, and what a step takes beside them.

    python -m bench.idle_sessions [--sessions 1000] [--state-dir] [--clients 16]

The task app is a process of its own; its resident memory is read before and after (Linux only). Each session
has taken a few decisions. Then `--clients` connections step sessions of their own for some seconds, as fast
as they are answered: p50 and p99 of a step under that load. bench/results/idle_sessions.json.
"""

import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from bench import kit
from bench.kit import ROOT
from bench.study_soak import App, quantile

WARM_UP = 20
CREATE_AT_ONCE = 8


async def created(http: aiohttp.ClientSession, seed: int) -> str:
    """A new session after three decisions."""
    body = {"env_name": "crafter", "seed": seed, "config": {"text": "compact"}}
    made = await post(http, "/env/create", body)
    for _ in range(3):
        await step(http, made["env_id"])
    return str(made["env_id"])


async def step(http: aiohttp.ClientSession, env_id: str) -> dict[str, Any]:
    call = {"tool": "interact_many", "args": {"actions": ["move_left", "do", "move_right", "do"]}}
    return await post(http, "/env/step", {"env_id": env_id, "tool_calls": [call]})


async def post(http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with http.post(path, json=body) as response:
        answer: dict[str, Any] = json.loads(await response.read())
        if response.status != 200:
            raise SystemExit(f"{path}: {response.status} {answer}")
        return answer


async def filled(http: aiohttp.ClientSession, count: int) -> list[str]:
    """Open this many sessions, each in its own world."""
    seeds, made = iter(range(count)), []

    async def maker() -> None:
        for seed in seeds:
            made.append(await created(http, seed))

    await asyncio.gather(*(maker() for _ in range(CREATE_AT_ONCE)))
    return made


async def loaded(http: aiohttp.ClientSession, clients: int, seconds: float) -> list[float]:
    """Sorted milliseconds of every step of this many concurrent clients."""
    until_s, took = time.monotonic() + seconds, []

    async def one(seed: int) -> None:
        env_id = await created(http, seed)
        while time.monotonic() < until_s:
            started_s = time.perf_counter()
            answer = await step(http, env_id)
            took.append(1e3 * (time.perf_counter() - started_s))
            if answer["done"]:
                await post(http, "/env/reset", {"env_id": env_id})

    await asyncio.gather(*(one(seed) for seed in range(clients)))
    return sorted(took)


async def measure(app: App, options: Namespace) -> dict[str, Any]:
    headers = {"X-API-Key": app.environ["ENVIRONMENT_API_KEY"]}
    async with aiohttp.ClientSession(app.url, headers=headers) as http:
        await filled(http, WARM_UP)
        before = app.resident_bytes()
        await filled(http, options.sessions)
        idle = app.resident_bytes()
        took = await loaded(http, options.clients, options.seconds)
    restart_s = None
    if options.state_dir:
        started_s = time.monotonic()
        app.restart()
        restart_s = round(time.monotonic() - started_s, 1)
    return {
        "bench": "idle_sessions",
        "machine": {
            "cpus": os.cpu_count(),
            "platform": platform.platform(),
            "python": platform.python_version(),
        },
        "sessions": options.sessions,
        "state_dir": options.state_dir,
        "kb_per_session": round((idle - before) / options.sessions / 1e3, 1),
        "resident_mb": round(idle / 1e6, 1),
        "kill_to_serving_again_s": restart_s,
        "load": {
            "clients": options.clients,
            "steps_per_s": round(len(took) / options.seconds, 1),
            "p50_ms": quantile(took, 0.5),
            "p99_ms": quantile(took, 0.99),
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    options = kit.options(
        __doc__,
        ("--sessions", 1_000),
        ("--clients", 16),
        ("--seconds", 10.0),
        ("--state-dir", False, "write the sessions down, as --state-dir does"),
        ("--results", ROOT / "bench" / "results" / "idle_sessions.json"),
        arguments=arguments,
    )
    room = {
        "TURNWISE_MAX_SESSIONS": str(options.sessions + WARM_UP + options.clients),
        "TURNWISE_LOG_LEVEL": "warning",
    }
    with tempfile.TemporaryDirectory() as folder:
        app = App(Path(folder) if options.state_dir else None, room)
        try:
            found = asyncio.run(measure(app, options))
        finally:
            app.stop()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
