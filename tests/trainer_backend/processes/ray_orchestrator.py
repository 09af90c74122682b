"""`python -m tests.trainer_backend.processes.ray_orchestrator ADDRESS FOLDER RUN LEASE_S`.

An orchestrator that starts a role whenever it has ended, and tells its process and place.
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

from trainer_backend.processes.launching import Place, Resources, Role
from trainer_backend.processes.ray import RayLauncher

# It says where it is placed, who has started it, its key, and one of its node's, and then waits.
SCRIPT = (
    "import os, sys; print('listening on', sys.argv[1], os.getppid(), os.environ['KEY'], "
    "os.environ.get('KEY_OF_NODES'), flush=True); input()"
)


def role(name: str, folder: Path, **keys: Any) -> Role:
    def command(place: Place) -> list[str]:
        return [sys.executable, "-c", SCRIPT, f"http://{place.host}"]

    resources = Resources(name, device="cpu", **keys)
    return Role(
        name, command, {"KEY": "the key"}, folder / f"{name}.log", frozenset({"KEY_OF_NODES"}),
        resources=resources,
    )  # fmt: skip


async def work(address: str, folder: str, run: str, lease_s: str) -> None:
    launcher = RayLauncher(run, 60.0, lambda line: None, float(lease_s))
    await launcher.open(address)
    while True:
        process = await launcher.start(role("learner", Path(folder)))
        print(process.pid, await process.address(), flush=True)
        await process.ended()


if __name__ == "__main__":
    asyncio.run(work(*sys.argv[1:]))
