"""CPU that the task app spends on a decision: 64 Crafter episodes at once, a language-model policy, no model.

    python -m bench.task_app_cpu [--text full] [--decisions 50] [--bound-ms 1.5]

A stand-in for the gateway answers every chat completion at once with the same legal call and 66 token ids.
The figure is the CPU time of the task app's process alone (from /proc, so Linux only) with world generation,
HTTP, steps and JSON, divided by the decisions taken. Exit code 1 when it is above the bound.
"""

import argparse
import asyncio
import json
import os
import secrets
import sys
from typing import Any

import aiohttp
from aiohttp import web

EPISODES = 64
CALL = {
    "id": "call_0",
    "type": "function",
    "function": {"name": "interact_many", "arguments": '{"actions": ["do", "move_left", "do", "noop"]}'},
}
REPLY = json.dumps(
    {
        "model": "bench",
        "prompt_token_ids": list(range(60)),
        "prompt_ids_reused": 0,
        "choices": [
            {
                "message": {"role": "assistant", "content": None, "tool_calls": [CALL]},
                "finish_reason": "stop",
                "token_ids": list(range(6)),
                "token_logprobs": [-0.5] * 6,
                "versions": [[0, 0]],
            }
        ],
    }
).encode()


async def answer(request: web.Request) -> web.Response:
    await request.read()
    return web.Response(body=REPLY, content_type="application/json")


def requests(run_id: str, url: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    config = {"inference_url": url, "model": "bench", "seed": 1}
    return [
        {
            "rollout_id": f"{run_id}/{episode}",
            "run_id": run_id,
            "start": {"seed": episode},
            "env": {"env_name": "crafter", "config": {"text": options.text, "max_actions": 4}},
            "policy": {"policy_name": "openai", "config": config},
            "step_rewards": {"enabled": True, "mode": "decision_stepwise"},
            "limits": {"max_decisions": options.decisions},
        }
        for episode in range(EPISODES)
    ]


def cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def run_once(
    session: aiohttp.ClientSession, run_id: str, gateway: str, options: argparse.Namespace
) -> int:
    """Submit rollouts, poll until all have ended, acknowledge them; return the number of decisions."""
    batch = {"rollouts": requests(run_id, gateway, options)}
    async with session.post("/rollouts", json=batch) as reply:
        assert reply.status == 202, await reply.text()
    cursor, ended = "", []
    while len(ended) < EPISODES:
        params = {"run_id": run_id, "wait_s": "20", "cursor": cursor}
        async with session.get("/rollouts", params=params) as reply:
            page = await reply.json()
        cursor, ended = page["cursor"], ended + page["rollouts"]
    ids = [rollout["rollout_id"] for rollout in ended]
    async with session.post("/rollouts/ack", json={"run_id": run_id, "rollout_ids": ids}) as reply:
        assert reply.status == 200, await reply.text()
    return sum(len(rollout["trajectory"]["steps"]) for rollout in ended)


async def measure(options: argparse.Namespace) -> float:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    gateway = f"http://127.0.0.1:{runner.addresses[0][1]}"
    key = secrets.token_urlsafe(16)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "task_app", "--port", "0", "--exit-with-parent",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "ENVIRONMENT_API_KEY": key, "TURNWISE_LOG_LEVEL": "warning"},
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    url = (await process.stdout.readline()).decode().split()[-1]
    async with aiohttp.ClientSession(url, headers={"X-API-Key": key}) as session:
        await run_once(session, "warm", gateway, options)  # first touch of every cache
        before_s = cpu_s(process.pid)
        decisions = await run_once(session, "measured", gateway, options)
        spent_s = cpu_s(process.pid) - before_s
    process.stdin.close()
    await process.wait()
    await runner.cleanup()
    return 1_000 * spent_s / decisions


def main() -> int:
    parser = argparse.ArgumentParser(description="CPU of the task app per decision.")
    parser.add_argument("--text", choices=("compact", "full"), default="compact")
    parser.add_argument("--decisions", type=int, default=50)
    parser.add_argument("--bound-ms", type=float, default=1.5)
    options = parser.parse_args()
    cost_ms = asyncio.run(measure(options))
    print(f"task app CPU per decision: {cost_ms:.2f} ms (bound {options.bound_ms:g} ms), text={options.text}")
    return int(cost_ms > options.bound_ms)


if __name__ == "__main__":
    sys.exit(main())
