"""Connects to the task apps in the job's table [services], or starts task apps as child processes.

A child listens on the loopback interface and ends with this process. Normally it is stopped on exit; if this
process is killed, the child notices that the pipe at its standard input is closed.
"""

import asyncio
import os
import secrets
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from pydantic import SecretStr

from service_kit.errors import SettingsError
from service_kit.keys import TASK_APP_KEY, key_from_environ
from service_kit.process import Child, last_line, name_exit
from shared_schemas.urls import is_loopback
from trainer_backend.collect.apps import TaskApps, Tell, log_sentence
from trainer_backend.collect.sources import Rows, count_bytes
from trainer_backend.errors import JobError, TaskAppError
from trainer_backend.job.tables import ServicesTable
from trainer_backend.learner.calls import KEYS_OF_THE_LEARNER
from trainer_backend.processes.launching import LOCAL, NotReady, Role, read_address

Entered = TypeVar("Entered")

_START_S = 60.0
_STOP_S = 10.0
# The exit code of a task app that refused a setting or a plug-in file (task_app.__main__).
_REFUSAL = 2
_BODY_BYTES = "TURNWISE_MAX_BODY_BYTES"
# Default limit of a request's bytes at the job's own task app. POST /replay with 10,000 decisions fits.
OWN_BODY_BYTES = 4 << 20
# The largest value that TURNWISE_MAX_BODY_BYTES may have.
_MOST_BODY_BYTES = 1 << 30


@asynccontextmanager
async def own_task_app(
    log_file: Path, key: SecretStr, arguments: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> AsyncIterator[tuple[str, Child]]:
    """Start a task app on the loopback interface, yield its URL and process, and stop it on exit.

    Args:
        arguments: further command-line arguments of the task app.
        variables: further environment variables.

    Raises:
        JobError: the task app refused its settings or a plug-in file.
        TaskAppError: the task app did not start for another reason.
    """
    listens = ("--host", "127.0.0.1", "--port", "0", "--exit-with-parent")
    command = (sys.executable, "-m", "task_app", *listens, *arguments)
    environment = {**(variables or {}), TASK_APP_KEY: key.get_secret_value()}
    role = Role("task app", lambda place: command, environment, log_file, withheld=KEYS_OF_THE_LEARNER)
    child = await LOCAL.start(role)
    try:
        try:
            url = await read_address(child, log_file, _START_S)
        except NotReady as error:
            if error.code == _REFUSAL:
                # The message quotes the last line of the log, because the log may be deleted together with
                # the run.
                word = last_line(log_file).removeprefix("error: ")
                raise JobError(f"the job's own task app did not start: {word}") from error
            raise TaskAppError(f"the embedded task app {error}", hint=f"Its log is {log_file}.") from error
        yield url, child
    finally:
        await child.end(_STOP_S)


# Assumed bytes of a request without its row: ids, limits, and the configs of policy and environment.
_WITHOUT_ITS_ROW = 1 << 18
# Label of the job's own task apps in metrics. Host and port would not do, because the port differs at every
# start.
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
    """Connect to the task apps in [services], or start the job's own ones, and yield them.

    At least one of them answers, and all that answer accept the API key.

    Args:
        log_file: log file of the first task app that the job starts. The next ones append _1, _2 and so on.
        hosts_to_call: `host:port` of the model servers that the job's own task apps may call, in addition to
            servers on this machine. The task apps in [services] have their own allow-lists.
        rows: the rows of the job's data set; the job's own task apps accept requests with the largest row.
        tell: called with a sentence for the user when a task app stops answering or answers again.
    """
    own: list[tuple[str, Child]] = []
    async with AsyncExitStack() as stack:
        if table.task_url:
            apps = TaskApps(
                table.task_url, task_app_key(table.task_url, table.task_api_key),
                timeout_s=table.request_timeout_s, lost_wait_s=table.task_app_wait_s, tell=tell,
            )  # fmt: skip
        else:
            key, body_bytes = SecretStr(secrets.token_urlsafe(32)), OWN_BODY_BYTES
            if rows is not None:
                body_bytes = max(body_bytes, count_bytes(rows.largest()) + _WITHOUT_ITS_ROW)
            limit = os.environ.get(_BODY_BYTES, str(min(body_bytes, _MOST_BODY_BYTES)))
            variables = {_BODY_BYTES: limit, **table.task_app_variables}
            arguments = [*_arguments(table, hosts_to_call, interactions)]
            names = [log_file.stem, *(f"{log_file.stem}_{number}" for number in range(1, table.task_apps))]
            own = await stack.enter_async_context(
                _side_by_side(
                    [own_task_app(log_file.with_stem(name), key, arguments, variables) for name in names]
                )
            )
            urls = [url for url, _ in own]
            # Without lost_wait_s, because the job does not restart its own task apps.
            apps = TaskApps(urls, key, timeout_s=table.request_timeout_s, label=OWN, tell=tell)
        try:
            yield await stack.enter_async_context(apps)
        except TaskAppError as error:
            if codes := [child.exit_code for _, child in own if child.exit_code is not None]:
                error.hint = f"The job's own task app ended by itself, with {name_exit(codes[0])}."
            raise


def _arguments(
    table: ServicesTable, hosts_to_call: Sequence[str], interactions: Path | None
) -> Iterator[str]:
    for host in hosts_to_call:
        yield from ("--allow-inference-host", host)
    host = table.gateway_host
    if not is_loopback(host):  # this machine's loopback is always allowed
        yield from ("--allow-inference-host", f"[{host}]" if ":" in host else host)
    for file in table.task_plugins:
        yield from ("--plugins", str(file))
    if interactions is not None:
        yield from ("--interactions", str(interactions))


@asynccontextmanager
async def _side_by_side(
    contexts: Sequence[AbstractAsyncContextManager[Entered]],
) -> AsyncIterator[list[Entered]]:
    """Enter several contexts concurrently, and exit them concurrently.

    If entering one of them fails, those that were entered are exited.
    """
    starts = [asyncio.ensure_future(context.__aenter__()) for context in contexts]
    try:
        yield await asyncio.gather(*starts)
    finally:
        for start in starts:
            start.cancel()
        await asyncio.wait(starts)
        states = zip(contexts, starts, strict=True)
        up = [one for one, start in states if not start.cancelled() and start.exception() is None]
        await asyncio.gather(*(one.__aexit__(None, None, None) for one in up))


def describe(apps: TaskApps) -> str:
    """Return one line with the addresses of the task apps that answer, and the errors of all others."""
    urls = ", ".join(app.url for app in apps.serving)
    faults = apps.answers()
    return f"task app{'s' if len(apps.serving) > 1 else ''}: {urls}" + (
        f"; not there: {faults}" if faults else ""
    )


def task_app_key(urls: Sequence[str], own_key: SecretStr | None = None) -> SecretStr:
    """Return the API key for the task apps in [services].

    The key is `own_key`, or else the key in this process's environment. If neither is set and all task apps
    are on this machine, the result is empty, because such task apps may need no key.

    Args:
        own_key: `services.task_api_key` of the job.

    Raises:
        JobError: no key is set, and a task app is on another machine; or the key cannot be read.
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
