"""The task apps of a job: the ones in [services], or child processes of its own on the loopback.

A child lives exactly as long as this process: it is stopped at the end, and its standard input is a pipe
from this process, so it also ends when this process is killed.
"""

import asyncio
import os
import secrets
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from pydantic import SecretStr

from service_kit.children import Child, last_line, name_exit
from service_kit.errors import SettingsError
from service_kit.keys import TASK_APP_KEY, key_from_environ
from shared_schemas.urls import is_loopback
from trainer_backend.collect.apps import TaskApps, Tell, log_sentence
from trainer_backend.collect.sources import Rows, bytes_of
from trainer_backend.errors import JobError, TaskAppError
from trainer_backend.job.tables import ServicesTable
from trainer_backend.launchers.launcher import LOCAL, NotReady, Place, Role, address_of
from trainer_backend.learner.calls import KEYS_OF_THE_LEARNER

_START_S = 60.0
_STOP_S = 10.0
# Its exit code for a wrong setting or plug-in file (task_app.__main__).
_REFUSAL = 2
_BODY_BYTES = "TURNWISE_MAX_BODY_BYTES"
# Of the job's own task app: the calls of an episode of 10,000 decisions fit (POST /replay).
OWN_BODY_BYTES = 4 << 20
# The setting's own bound.
_MOST_BODY_BYTES = 1 << 30


class EmbeddedTaskApp:
    """Async context manager around the child process.

    Args:
        hosts_to_call: `host:port` of inference servers that it may call, besides servers on this machine.
        plugins: files with the job's own environments and policies.
        interactions: the file of its interactions, or None.
        body_bytes: size limit of a request, unless the variable for it is set.
        variables: further environment variables, which settings of the job become.
    """

    def __init__(
        self,
        log_file: Path,
        hosts_to_call: Sequence[str] = (),
        *,
        plugins: Sequence[Path] = (),
        interactions: Path | None = None,
        body_bytes: int = OWN_BODY_BYTES,
        api_key: SecretStr | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._log_file = log_file
        self._arguments = [word for host in hosts_to_call for word in ("--allow-inference-host", host)]
        self._arguments += [word for file in plugins for word in ("--plugins", str(file))]
        if interactions is not None:
            self._arguments += ["--interactions", str(interactions)]
        self._environment = {_BODY_BYTES: os.environ.get(_BODY_BYTES, str(min(body_bytes, _MOST_BODY_BYTES)))}
        self._environment |= variables or {}
        self.api_key = api_key or SecretStr(secrets.token_urlsafe(32))
        self.url = ""
        self._child: Child | None = None

    async def __aenter__(self) -> Self:
        environment = {**self._environment, TASK_APP_KEY: self.api_key.get_secret_value()}
        role = Role("task app", self._command, environment, self._log_file, withheld=KEYS_OF_THE_LEARNER)
        self._child = await LOCAL.start(role)
        try:
            self.url = await self._address(self._child)
        except BaseException:
            await self._child.end(_STOP_S)
            raise
        return self

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return None if self._child is None else self._child.exit_code

    def _command(self, place: Place) -> tuple[str, ...]:
        where = ("--host", "127.0.0.1", "--port", "0", "--exit-with-parent")
        return (sys.executable, "-m", "task_app", *where, *self._arguments)

    async def __aexit__(self, *_: object) -> None:
        if self._child is not None:
            await self._child.end(_STOP_S)

    async def _address(self, child: Child) -> str:
        try:
            return await address_of(child, self._log_file, _START_S)
        except NotReady as error:
            if error.code == _REFUSAL:
                # Its last line names the fault; the log's folder may be deleted with the run.
                word = last_line(self._log_file).removeprefix("error: ")
                raise JobError(f"the job's own task app did not start: {word}") from error
            raise TaskAppError(
                f"the embedded task app {error}", hint=f"Its log is {self._log_file}."
            ) from error


# Size of a request without its row: ids, limits, the configs of policy and environment.
_BESIDE_A_ROW = 1 << 18
# Label of the job's own task apps, whose ports differ in every start.
OWN = "own"


@asynccontextmanager
async def task_apps(
    table: ServicesTable,
    log_file: Path,
    hosts_to_call: Sequence[str] = (),
    *,
    interactions: Path | None = None,
    rows: Rows | None = None,
    tell: Tell = log_sentence,
) -> AsyncIterator[TaskApps]:
    """Open the task apps of a job. At least one is up, and each that is up accepts the key.

    Args:
        log_file: receives the log of an own task app; the second one's has _1 after its name, and so on.
        hosts_to_call: as in `EmbeddedTaskApp`. The operators of other task apps decide that themselves.
        rows: that are played: the largest has to fit a request.
        tell: receives a sentence when one is lost, and when it is back.
    """
    async with AsyncExitStack() as stack:
        if table.task_url:
            apps = TaskApps(
                table.task_url, task_app_key(table.task_url, table.task_api_key),
                timeout_s=table.request_timeout_s, lost_wait_s=table.task_app_wait_s, tell=tell,
            )  # fmt: skip
        else:
            key, body_bytes = SecretStr(secrets.token_urlsafe(32)), OWN_BODY_BYTES
            if rows is not None:
                body_bytes = max(body_bytes, bytes_of(rows.largest()) + _BESIDE_A_ROW)
            own = [
                EmbeddedTaskApp(
                    log_file.with_stem(f"{log_file.stem}_{number}") if number else log_file,
                    [*hosts_to_call, *_gateway_elsewhere(table)],
                    plugins=table.task_plugins,
                    interactions=interactions,
                    body_bytes=body_bytes,
                    api_key=key,
                    variables=table.task_app_variables,
                )
                for number in range(table.task_apps)
            ]
            await stack.enter_async_context(_side_by_side(own))
            urls = [app.url for app in own]
            # No waiting for one that is lost: it is not started again.
            apps = TaskApps(urls, key, timeout_s=table.request_timeout_s, label=OWN, tell=tell)
        try:
            yield await stack.enter_async_context(apps)
        except TaskAppError as error:
            codes = [] if table.task_url else [app.exit_code for app in own if app.exit_code is not None]
            if codes:
                error.hint = f"The job's own task app ended by itself, with {name_exit(codes[0])}."
            raise


@asynccontextmanager
async def _side_by_side(own: Sequence[EmbeddedTaskApp]) -> AsyncIterator[None]:
    """Start the task apps together, and end those that are up together, also where one does not start."""
    starts = [asyncio.ensure_future(app.__aenter__()) for app in own]
    try:
        await asyncio.gather(*starts)
        yield
    finally:
        for start in starts:
            start.cancel()
        await asyncio.wait(starts)
        up = [start.result() for start in starts if not start.cancelled() and start.exception() is None]
        await asyncio.gather(*(app.__aexit__(None, None, None) for app in up))


def _gateway_elsewhere(table: ServicesTable) -> list[str]:
    """The host of the job's own gateways, unless it is this machine's loopback, which is always allowed."""
    host = table.gateway_host
    return [] if is_loopback(host) else [f"[{host}]" if ":" in host else host]


def describe(apps: TaskApps) -> str:
    """Describe the task apps' addresses, and the faults of those that do not answer, in one line."""
    urls = ", ".join(app.url for app in apps.serving)
    faults = apps.answers()
    return f"task app{'s' if len(apps.serving) > 1 else ''}: {urls}" + (
        f"; not there: {faults}" if faults else ""
    )


def task_app_key(urls: Sequence[str], own_key: SecretStr | None = None) -> SecretStr:
    """Return the key of the task apps in [services]: the job's own, or this process's.

    It is empty where there is none and all are on this machine, where a task app may need none.
    """
    if own_key is not None:
        return own_key
    try:
        key = key_from_environ(os.environ, TASK_APP_KEY)
    except SettingsError as error:
        raise JobError(error.detail) from error
    if key is None and all(is_loopback(urlsplit(url).hostname or "") for url in urls):
        return SecretStr("")
    if key is None:
        raise JobError(
            f"services.task_url is given, but no key: set {TASK_APP_KEY} or {TASK_APP_KEY}_FILE in the "
            "environment, or services.task_api_key in the job"
        )
    return key
