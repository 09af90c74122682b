"""How much more two task apps do than one: decisions a second, collected over HTTP, with a policy that costs
next to nothing.

    python -m bench.many_apps [--replicas 2] [--episodes 128] [--decisions 50] [--rounds 3]

`python -m task_app --replicas N` is started for 1 and for N. The `random` policy plays Crafter, so that what
is measured is worlds, steps, JSON and HTTP. Both are measured in turns; the ratio is that of the best rounds.
Read it with the number of cores beside it, which is printed. This process reads every trajectory and needs a
core too: on two cores two task apps cannot reach twice the throughput of one, and beside other work none.
"""

import asyncio
import os
import secrets
import sys
import time
import tomllib
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pydantic import SecretStr

from bench import kit
from shared_schemas.rollouts import RolloutRequest
from trainer_backend.collect.apps import TaskApps
from trainer_backend.collect.dispatcher import Dispatcher


def plan(run_id: str, options: Namespace) -> list[RolloutRequest]:
    return [
        RolloutRequest.model_validate(
            {
                "rollout_id": f"{run_id}/{episode}",
                "run_id": run_id,
                "group_id": f"{episode // 8}",
                "sibling": episode % 8,
                "start": {"seed": episode // 8},
                "env": {"env_name": "crafter", "config": {"text": "compact", "max_actions": 4}},
                "policy": {"policy_name": "random", "config": {"seed": episode}},
                "limits": {"max_decisions": options.decisions},
            }
        )
        for episode in range(options.episodes)
    ]


@asynccontextmanager
async def replicas(count: int) -> AsyncIterator[TaskApps]:
    key = secrets.token_urlsafe(16)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "task_app", "--replicas", str(count), "--port", "0", "--exit-with-parent",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "ENVIRONMENT_API_KEY": key, "TURNWISE_LOG_LEVEL": "warning"},
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    urls = tomllib.loads((await process.stdout.readline()).decode())["task_url"]
    async with TaskApps(urls, SecretStr(key), timeout_s=60) as apps:
        yield apps
    process.stdin.close()
    await process.wait()


async def decisions_per_s(apps: TaskApps, run_id: str, options: Namespace) -> float:
    dispatcher = Dispatcher(apps, timeout_s=600, max_running=64)
    started = time.perf_counter()
    found = await dispatcher.collect(plan(run_id, options))
    took_s = time.perf_counter() - started
    assert not found.failed
    await dispatcher.ack(run_id, found.all)
    return sum(len(item.trajectory.steps) for item in found.rollouts if item.trajectory) / took_s


async def measure(options: Namespace) -> tuple[float, float]:
    best = {1: 0.0, options.replicas: 0.0}
    async with replicas(1) as one, replicas(options.replicas) as several:
        for number in range(options.rounds + 1):
            for count, apps in ((1, one), (options.replicas, several)):
                rate = await decisions_per_s(apps, f"round-{number}", options)
                if number:  # the first touches every cache
                    best[count] = max(best[count], rate)
    return best[1], best[options.replicas]


def main() -> int:
    options = kit.options(
        __doc__,
        ("--replicas", 2),
        ("--episodes", 128),
        ("--decisions", 50),
        ("--rounds", 3),
        ("--at-least", 1.0, "exit code 1 below this ratio"),
    )
    one, several = asyncio.run(measure(options))
    print(
        f"1 task app: {one:.0f} decisions/s; {options.replicas}: {several:.0f}; "
        f"ratio x{several / one:.2f} on {os.cpu_count()} cores"
    )
    return int(several / one < options.at_least)


if __name__ == "__main__":
    sys.exit(main())
