"""The task apps of a job: a child process of its own on the loopback, or the ones that [services] names.

It lives exactly as long as this process: it is told to stop at the end, and its standard input is a pipe
from us, so that it also ends when this process is killed and can tell nobody anything.
"""

import asyncio
import os
import secrets
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import SecretStr

from service_kit.children import PIPE, Child
from service_kit.errors import SettingsError
from service_kit.keys import TASK_APP_KEY, key_from_environ
from trainer_backend.collect.apps import TaskApps, Tell, logged
from trainer_backend.collect.endpoints import hosts_to_call
from trainer_backend.collect.plan import Inference
from trainer_backend.collect.sources import Rows, bytes_of
from trainer_backend.data.dataset import DataSet
from trainer_backend.errors import JobError, TaskAppError
from trainer_backend.job.schema import JobConfig

_START_S = 60.0
_STOP_S = 10.0
# Its exit code for a setting or a plug-in file that is wrong (task_app.__main__).
_REFUSED = 2
_BODY_BYTES = "TURNWISE_MAX_BODY_BYTES"
# Of the job's own task app: the calls of an episode of 10,000 decisions fit (POST /replay).
OWN_BODY_BYTES = 4 << 20
# The setting's own bound.
_MOST_BODY_BYTES = 1 << 30


class EmbeddedTaskApp:
    """Async context manager around the child process.

    Args:
        log_file: its log lines are appended to it.
        hosts_to_call: `host:port` of inference servers that it may call beside those on this machine.
        plugins: files with environments and policies of the job's own.
        interactions: the file of its interactions, if it has one.
        body_bytes: a request may hold so many, unless the variable for that is set already.
    """

    def __init__(
        self,
        log_file: Path,
        hosts_to_call: Sequence[str] = (),
        *,
        plugins: Sequence[Path] = (),
        interactions: Path | None = None,
        body_bytes: int = OWN_BODY_BYTES,
    ) -> None:
        self._log_file = log_file
        self._allowed = [word for host in hosts_to_call for word in ("--allow-inference-host", host)]
        self._allowed += [word for file in plugins for word in ("--plugins", str(file))]
        if interactions is not None:
            self._allowed += ["--interactions", str(interactions)]
        self._environment = {_BODY_BYTES: str(min(body_bytes, _MOST_BODY_BYTES)), **os.environ}
        self.api_key = SecretStr(secrets.token_urlsafe(32))
        self.url = ""
        self._child: Child | None = None

    async def __aenter__(self) -> Self:
        with self._log_file.open("ab") as log:
            self._child = await Child.start(
                (
                    sys.executable, "-m", "task_app", "--host", "127.0.0.1", "--port", "0",
                    "--exit-with-parent", *self._allowed,
                ),
                stdout=PIPE,
                stderr=log,
                env={**self._environment, TASK_APP_KEY: self.api_key.get_secret_value()},
            )  # fmt: skip
        try:
            async with asyncio.timeout(_START_S):
                self.url = await self._address(self._child)
        except BaseException as error:
            await self._child.end(_STOP_S)
            if isinstance(error, TimeoutError):
                raise TaskAppError(f"the embedded task app did not start within {_START_S:g} s") from error
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._child is not None:
            await self._child.end(_STOP_S)

    async def _address(self, child: Child) -> str:
        address = await child.address()
        if address is not None:
            return address
        code = await child.ended()
        if code == _REFUSED:
            # Its last line says what is wrong; the log may be in a folder that goes with us.
            lines = self._log_file.read_text(encoding="utf-8", errors="replace").splitlines()
            raise JobError(f"the job's own task app did not start: {lines[-1].removeprefix('task_app: ')}")
        raise TaskAppError(f"the embedded task app ended with exit code {code}; see {self._log_file}")


# What a request holds beside its row: ids, limits, the configs of policy and environment.
_BESIDE_A_ROW = 1 << 18
# Of the job's own task app, whose port is another one in every start.
OWN = "own"


@asynccontextmanager
async def task_apps(
    job: JobConfig,
    log_file: Path,
    player: Inference | None = None,
    *,
    data: DataSet | None = None,
    tell: Tell = logged,
) -> AsyncIterator[TaskApps]:
    """The job's task apps. One at least is known to be up, and each that is up, to accept the key.

    Args:
        job: names them in [services], or none.
        log_file: where an embedded one logs.
        player: a model at somebody else's server; an embedded task app is allowed to call it. What another
            one may call, its operator decides.
        tell: is given a sentence when one is lost, and when it is back.
    """
    table = job.services
    source = None if data is None or job.data is None else Rows(job.job.seed, job.data, data)
    async with AsyncExitStack() as stack:
        if table.task_url:
            apps = TaskApps(
                table.task_url, task_app_key(table.task_api_key),
                timeout_s=table.request_timeout_s, lost_wait_s=table.task_app_wait_s, tell=tell,
            )  # fmt: skip
        else:
            child = await stack.enter_async_context(
                EmbeddedTaskApp(
                    log_file,
                    hosts_to_call(job.warmup, player),
                    plugins=table.task_plugins,
                    interactions=job.multi_turn.interaction_config_path,
                    body_bytes=OWN_BODY_BYTES if source is None else _body_bytes(source),
                )
            )
            # Nobody would start it again: there is nothing to wait for.
            apps = TaskApps(
                (child.url,), child.api_key, timeout_s=table.request_timeout_s, label=OWN, tell=tell
            )
        yield await stack.enter_async_context(apps)


def _body_bytes(source: Rows) -> int:
    return max(OWN_BODY_BYTES, bytes_of(source.largest()) + _BESIDE_A_ROW)


def told_of(apps: TaskApps) -> str:
    """Where the task apps are, and what those said that do not answer, in one line."""
    urls = ", ".join(client.url for client in apps)
    missing = apps.answers()
    return f"task app{'s' if len(apps) > 1 else ''}: {urls}" + (f"; not there: {missing}" if missing else "")


def task_app_key(given: SecretStr | None = None) -> SecretStr:
    """The key of the task apps that [services] names: the job's own, or this process's."""
    if given is not None:
        return given
    try:
        key = key_from_environ(os.environ, TASK_APP_KEY)
    except SettingsError as error:
        raise JobError(error.detail) from error
    if key is None:
        raise JobError(
            f"services.task_url is given, but no key: set {TASK_APP_KEY} or {TASK_APP_KEY}_FILE in the "
            "environment, or services.task_api_key in the job"
        )
    return key
