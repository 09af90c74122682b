"""Opens the task apps of a job: those of [services], or own child processes on the loopback.

A child ends with this process: it is stopped at the end, and its standard input is a pipe, which closes when
this process is killed.
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
# A task app's exit code for a wrong setting or plug-in file (task_app.__main__).
_REFUSAL = 2
_BODY_BYTES = "TURNWISE_MAX_BODY_BYTES"
# Limit of a body at the job's own task app. The calls of 10,000 decisions fit (POST /replay).
OWN_BODY_BYTES = 4 << 20
# The largest value that this setting may have.
_MOST_BODY_BYTES = 1 << 30


@asynccontextmanager
async def own_task_app(
    log_file: Path, key: SecretStr, arguments: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> AsyncIterator[tuple[str, Child]]:
    """Run a task app on the loopback until the context is left; yield its address and process.

    Args:
        arguments: further arguments of its command line.
        variables: further environment variables.
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
                # Its last line names the fault; the log's folder may be deleted with the run.
                word = last_line(log_file).removeprefix("error: ")
                raise JobError(f"the job's own task app did not start: {word}") from error
            raise TaskAppError(f"the embedded task app {error}", hint=f"Its log is {log_file}.") from error
        yield url, child
    finally:
        await child.end(_STOP_S)


# Size of a request without its row: ids, limits, the configs of policy and environment.
_WITHOUT_ITS_ROW = 1 << 18
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
    """Yield the task apps of a job. At least one answers, and each that answers accepts the key.

    Args:
        log_file: receives the log of an own task app; the second log has _1 after its name, and so on.
        hosts_to_call: `host:port` of inference servers that own task apps may call in addition to servers on
            this machine. Operators of other task apps decide this themselves.
        rows: the rows of the job, of which the largest must fit a request.
        tell: receives a sentence when a task app is lost or answers again.
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
            # No lost_wait_s, since an own task app is not restarted.
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
    """Enter contexts concurrently, and leave the entered ones concurrently, also if entering one failed."""
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
    """Describe the task apps' addresses, and the errors of unreachable ones, in one line."""
    urls = ", ".join(app.url for app in apps.serving)
    faults = apps.answers()
    return f"task app{'s' if len(apps.serving) > 1 else ''}: {urls}" + (
        f"; not there: {faults}" if faults else ""
    )


def task_app_key(urls: Sequence[str], own_key: SecretStr | None = None) -> SecretStr:
    """Return the key of the task apps in [services]: the job's own, or this process's.

    Empty if no key is set and all task apps are on this machine, where they may need none.
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
