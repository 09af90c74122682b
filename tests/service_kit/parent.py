"""`python -m tests.service_kit.parent FOLDER`: start processes as services do, print their ids, wait.

Those of roles that start others are there twice: to be killed alone, and not at all. Ranks are there once
more, to be killed with this process. A command that is not ours starts one in another session.
"""

import asyncio
import json
import socket
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from service_kit.output import Output
from task_app.captures.agents import Agent, start_agent
from task_app.environments.foreign.child import Child as ForeignChild
from task_app.plugins import RewardPlugin
from task_app.replicas import Replica
from task_app.reward_functions.process import RewardProcess
from task_app.settings import Reach, Settings
from trainer_backend.job.tables import InferenceTable, LearnerTable
from trainer_backend.jobs.check_process import CheckProcess
from trainer_backend.learner.calls import learner_role
from trainer_backend.processes.gateway_calls import CONTROL_KEY, GATEWAY_KEY, gateway_command
from trainer_backend.processes.launching import LOCAL, Resources, Role
from trainer_backend.processes.vllm_servers import VllmServer

FORKS = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
HANGS = f"{FORKS}import time; time.sleep(600)\n"


async def start_learner(folder: Path, processes: int = 1) -> Any:
    table = LearnerTable(nproc_per_node=processes)
    return await LOCAL.start(learner_role(table, "cpu", "key", folder / "log"))


async def start_gateway(folder: Path) -> Any:
    keys = {GATEWAY_KEY: "key", CONTROL_KEY: "other"}
    listener = socket.create_server(("127.0.0.1", 0))
    role = Role(
        "gateway_0", lambda place: gateway_command("gateway_0", listener.fileno(), place), keys,
        folder / "log", descriptors=(listener.fileno(),),
    )  # fmt: skip
    return await LOCAL.start(role)


async def start_engine(folder: Path) -> Any:
    kept.append(sockets := socket.socketpair())
    number = sockets[1].fileno()
    # As `engine_role` has it, whose module imports torch.
    command = [sys.executable, "-m", "trainer_backend.processes.engine_process", "--socket", str(number)]
    return await LOCAL.start(Role("engine", lambda place: command, descriptors=(number,)))


async def start_vllm(folder: Path) -> Any:
    python = folder / "python"
    python.write_text(f"#!{sys.executable}\n{HANGS}")
    python.chmod(0o755)
    server = VllmServer(
        0, 1, folder / "log", None, table=InferenceTable(engine="vllm", vllm_python=python), own={},
        launcher=LOCAL, resources=Resources("replicas"), tell=print,
    )  # fmt: skip
    return await server.start()


async def start_reward_function(folder: Path) -> Any:
    file = folder / "mine.py"
    file.write_text(f"{FORKS}REWARD_FUNCTIONS = {{'f': print}}\n")
    process = RewardProcess("f", RewardPlugin("pointwise", str(file)), Settings())
    return await process._start()


async def start_an_agent(folder: Path) -> Any:
    agent = Agent([sys.executable, "-c", HANGS])
    return await start_agent(agent, {}, url="http://h", key="key", output=Output("agent", "a"))


async def start_foreign(folder: Path) -> Any:
    child = ForeignChild("mcp:child", [sys.executable, "-c", HANGS], Reach(), source="this test")
    return child._process


async def start_replica(folder: Path) -> Any:
    return await Replica(0, ["--exit-with-parent"], 0, end_s=5.0).start()


async def start_check(folder: Path) -> Any:
    kept.append(checks := CheckProcess())
    await asyncio.to_thread(checks._connect)
    return checks._server


Start = Callable[[Path], Awaitable[Any]]
ALONE: tuple[Start, ...] = (start_learner, start_gateway, start_engine, start_replica)
start_ranks = partial(start_learner, processes=2)
GUARDED: tuple[Start, ...] = (
    start_vllm, start_reward_function, start_an_agent, start_foreign, start_check,
)  # fmt: skip
kept: list[Any] = []


async def start_all(folder: Path, starts: tuple[Start, ...]) -> list[int]:
    folder.mkdir()
    processes = await asyncio.gather(*(start(folder) for start in starts))
    kept.extend(processes)
    return [process.pid for process in processes]


async def main(folder: Path) -> None:
    alone = await start_all(folder / "alone", (start_ranks, *GUARDED))
    both = await start_all(folder / "both", (start_ranks,))
    await start_all(folder / "orphans", (*ALONE, start_ranks, *GUARDED))
    print(json.dumps([alone, both]), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
