"""The processes of bench/study_faults.py: a trainer that is watched, and a task app that comes back."""

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from trainer_backend.rundir.state import read_state

ROOT = Path(__file__).resolve().parent.parent
# A start that has not come to anything by then never will.
PATIENCE_S = 300.0


class TaskApp:
    """In a process of its own, that can be killed and started again at its address."""

    def __init__(self, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.url, self._log = f"http://127.0.0.1:{self._port}", log
        key = {"ENVIRONMENT_API_KEY": secrets.token_hex(16), "PYTHONPATH": str(ROOT)}
        self.environ = {**os.environ, **key}
        self._process = self._started()

    def restart(self) -> None:
        self.kill()
        self._process = self._started()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _started(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "task_app", "--port", str(self._port), "--exit-with-parent"]
        with self._log.open("a") as log:
            return subprocess.Popen(
                command, cwd=ROOT, env=self.environ, text=True, stderr=log,
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            )  # fmt: skip


class Trainer:
    """One start of the trainer: of a new run, or of the one that is there."""

    def __init__(self, run: Path, app: TaskApp, settings: Sequence[str]) -> None:
        self._run, self._started_s = run, time.monotonic()
        self.first_rollout_s: float | None = None
        command = [sys.executable, "-m", "trainer_backend", "train", "--no-report"]
        if (run / "run.json").exists():
            command += ["--resume", str(run)]
        else:
            command += [str(ROOT / "configs" / "crafter_cpu.toml"), "--run", str(run)]
            command += [word for setting in settings for word in ("--set", setting)]
        with run.with_name("trainer.log").open("a") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=app.environ, stdout=log, stderr=log)

    def lives_until(self, iteration: int, seconds: float) -> bool:
        """Watch it until so long after it has that iteration behind it; False: it has ended before.

        Args:
            iteration: -1: from its very start.
            seconds: math.inf: until it ends.
        """
        reached_s = self._started_s if iteration < 0 else None
        while self.process.poll() is None:
            now = time.monotonic()
            state = read_state(self._run)
            if state is not None and state.pid == self.process.pid:
                if self.first_rollout_s is None and state.stage and state.done and "warm" not in state.stage:
                    self.first_rollout_s = now - self._started_s
                if reached_s is None and state.stage and state.iteration >= iteration:
                    reached_s = now
            if reached_s is not None and now - reached_s >= seconds:
                return True
            if now - self._started_s > PATIENCE_S:
                raise SystemExit(f"{self._run}: the trainer did not end in {PATIENCE_S:g} s")
            time.sleep(0.01)
        return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
