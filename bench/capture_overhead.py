"""What a captured call costs beside the gateway alone, in CPU time.

    python -m bench.capture_overhead [--preset tiny-0.8m] [--conversations 24] [--turns 4] [--rounds 5]

A client asks a gateway with a real model (new weights, one thread, 24 tokens an answer) in conversations of
some turns, four at a time: directly, and through captures of a task app that were opened before, in turns.
Each is a process.

    gateway     CPU time of the gateway for a call, asked directly
    capture     CPU time of the task app for a call
    overhead    capture / gateway, median over the rounds: <= 10 %

With a larger model the gateway costs more and the capture the same. Exit code 1 when the figure is missed.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import aiohttp
import torch

from bench import kit
from bench.gateway_conversations import KEY, MODEL, SYSTEM, observation
from bench.http_rates import HOST, Rate, Server, running, timed
from service_kit.server import Listener
from service_kit.server import Server as HttpServer
from shared_schemas.chat import ROLLOUT_HEADER
from trainer_backend.inference.asgi import error_response
from trainer_backend.inference.engine import LocalEngine
from trainer_backend.inference.gateway_app import create_gateway
from trainer_backend.inference.keys import EngineKeys
from trainer_backend.inference.served_policy import ServedPolicy
from trainer_backend.models import build_preset, train_tokenizer
from trainer_backend.processes.gateway_process import CONNECTIONS

TOKENS, AT_ONCE, LIMIT = 24, 4, 0.10
ENV_KEY = "the key of the task app of this script"
# Of a conversation: url and headers.
Endpoint = tuple[str, dict[str, str]]


def serve(port: int, preset: str) -> None:
    """Be a gateway until killed."""
    torch.set_num_threads(1)
    tokenizer = train_tokenizer([observation(turn) for turn in range(20)], 320)
    engine = LocalEngine(
        build_preset(preset, tokenizer), stop_ids=[], keys=EngineKeys(max_running=8, max_model_len=1024)
    )
    engine.start()
    app = create_gateway({MODEL: ServedPolicy(engine, tokenizer)}, key=KEY)
    HttpServer(app, CONNECTIONS, respond=error_response).run_on(Listener(HOST, port))


async def conversation(session: aiohttp.ClientSession, endpoint: Endpoint, turns: int) -> int:
    (url, headers) = endpoint
    messages: list[dict[str, Any]] = [SYSTEM]
    for turn in range(turns):
        messages.append({"role": "user", "content": observation(turn)[:60]})
        body = {"model": MODEL, "messages": messages, "max_tokens": TOKENS}
        async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
            reply = await response.json()
            assert response.status == 200, reply
        messages.append(reply["choices"][0]["message"])
    return turns


def directly(gateway: Server, number: int) -> Endpoint:
    headers = {"Authorization": f"Bearer {KEY}", ROLLOUT_HEADER: f"r/{number}"}
    return f"http://{HOST}:{gateway.port}", headers


async def captured(session: aiohttp.ClientSession, gateway: Server, app: Server) -> Endpoint:
    config = {
        "inference_url": f"http://{HOST}:{gateway.port}",
        "model": MODEL,
        "max_tokens": TOKENS,
        "seed": 1,
    }
    body = {"policy": {"policy_name": "openai", "config": config, "inference_key": KEY}}
    url = f"http://{HOST}:{app.port}/captures"
    async with session.post(url, json=body, headers={"X-API-Key": ENV_KEY}) as response:
        capture = await response.json()
        assert response.status == 200, capture
    return capture["capture_url"], {"Authorization": f"Bearer {capture['key']}"}


async def measured(chosen: Any) -> list[tuple[Rate, Rate, Rate]]:
    """For each round: the gateway asked directly, the gateway behind captures, and the task app."""
    rounds = []
    command = (sys.executable, "-m", "bench.capture_overhead", "--preset", chosen.preset, "--serve")
    task_app = (sys.executable, "-m", "task_app", "--port")
    async with (
        running(*command) as gateway,
        running(*task_app, key=ENV_KEY) as app,
        aiohttp.ClientSession() as session,
    ):

        async def play(endpoints: Sequence[Endpoint]) -> int:
            return sum([await conversation(session, one, chosen.turns) for one in endpoints])

        def plays(endpoints: Sequence[Endpoint]) -> list[Callable[[], Awaitable[int]]]:
            return [partial(play, endpoints[first::AT_ONCE]) for first in range(AT_ONCE)]

        for turn in range(chosen.rounds + 1):
            numbers = range(chosen.conversations)
            alone = await timed(gateway, plays([directly(gateway, number) for number in numbers]))
            captures = [await captured(session, gateway, app) for _ in numbers]
            app_s = app.cpu_s()
            behind = await timed(gateway, plays(captures))
            if turn:  # the first one warms both up
                rounds.append((alone, behind, Rate(behind.count, behind.wall_s, app.cpu_s() - app_s)))
    return rounds


def main() -> int:
    chosen = kit.options(
        __doc__,
        ("--preset", "tiny-0.8m", "of the model"),
        ("--conversations", 24, "of a round"),
        ("--turns", 4, "calls of each"),
        ("--rounds", 5, "in turns"),
        ("--serve", int, "be a gateway on this port"),
    )
    if chosen.serve is not None:
        serve(chosen.serve, chosen.preset)
        return 0
    rounds = asyncio.run(measured(chosen))
    alone, behind, app = ([rates[i].cpu_us / 1e3 for rates in rounds] for i in range(3))
    shares = [spent / gateway for spent, gateway in zip(app, alone, strict=True)]
    print(f"gateway alone {median(alone):.2f} ms a call, behind a capture {median(behind):.2f} ms")
    print(f"capture {median(app):.2f} ms a call ({min(app):.2f} to {max(app):.2f})")
    share = median(shares)
    return kit.report(f"overhead {share:.1%} ({min(shares):.1%} to {max(shares):.1%})", share <= LIMIT)


if __name__ == "__main__":
    sys.exit(main())
