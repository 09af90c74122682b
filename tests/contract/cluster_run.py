"""`python -m tests.contract.cluster_run JOB.toml RUN STAGE`: train; kill the learner once at a stage, and the
gateway once it has played a rollout of training.

Each stage is told with whether this process, the orchestrator, has imported torch.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

from bench.kit import Reporter
from trainer_backend.job.load import load_job
from trainer_backend.rundir.layout import create_run
from trainer_backend.start import run_job

LEARNER, GATEWAY = b"trainer_backend.learner.process", b"trainer_backend.processes.gateway_process"


def kill(module: bytes) -> None:
    """Kill the child that runs a module."""
    for child in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split():
        if module in Path(f"/proc/{child}/cmdline").read_bytes():
            os.kill(int(child), signal.SIGKILL)


class Killing(Reporter):
    """Prints the lines of a run."""

    def __init__(self, stage: str) -> None:
        self._stages = {stage: LEARNER, "collect 1": GATEWAY}

    def say(self, text: str) -> None:
        print(text, flush=True)

    def stage(self, name: str, done: int, total: int) -> None:
        self.say(f"stage: {name}, torch: {'torch' in sys.modules}")
        if name in self._stages and done < total and (done or name.startswith("update")):
            kill(self._stages.pop(name))

    def process(self, name: str, *, role: str, state: str, **others: object) -> None:
        if role == "learner":
            print(f"learner: {state}", flush=True)


if __name__ == "__main__":
    job = load_job(Path(sys.argv[1])).config
    asyncio.run(run_job(job, create_run(job, Path(sys.argv[2])), Killing(sys.argv[3]), resume=False))
