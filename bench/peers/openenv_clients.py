"""Runs OpenEnv's own clients against its own server for bench/http_batch.py; prints steps per second.

python bench/peers/openenv_clients.py PORT CLIENTS STEPS ACTION,ACTION,...
"""

import asyncio
import os
import sys
import time

from openenv.core.generic_client import GenericEnvClient


async def play(client: GenericEnvClient, steps: int, actions: list[str]) -> int:
    for index in range(steps):
        result = await client.step({"actions": [actions[index % len(actions)]]})
        if result.done:
            return index + 1
    return steps


async def main(port: str, clients: str, steps: str, actions: str) -> None:
    opened = [GenericEnvClient(base_url=f"http://127.0.0.1:{port}") for _ in range(int(clients))]
    for seed, client in enumerate(opened):
        await client.connect()
        await client.reset(seed=seed)
    started_s = time.perf_counter()
    done = await asyncio.gather(*(play(client, int(steps), actions.split(",")) for client in opened))
    print(sum(done) / (time.perf_counter() - started_s), flush=True)
    # The library's close() can wait for ever (websockets 17); the server notices that the sockets have ended.
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:5]))
