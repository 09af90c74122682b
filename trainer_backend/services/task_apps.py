"""The task apps of a job: its own child process, or those that [services] names."""

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from pydantic import SecretStr

from service_kit.errors import SettingsError
from service_kit.keys import TASK_APP_KEY, key_from_environ
from trainer_backend.collect.apps import TaskApps, Tell, logged
from trainer_backend.collect.plan import Inference
from trainer_backend.collect.slices import DEFAULT_BODY_BYTES
from trainer_backend.collect.sources import Source, bytes_of, source_of
from trainer_backend.data.dataset import DataSet
from trainer_backend.errors import JobError
from trainer_backend.jobfile.schema import JobConfig
from trainer_backend.services.embedded import EmbeddedTaskApp
from trainer_backend.services.endpoints import hosts_to_call

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

    Raises:
        JobError: [services] names task apps, but no key is given for them; or a server's URL is none.
        TaskAppError: none can be reached, or one refuses the key.
    """
    table = job.services
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
                    body_bytes=_body_bytes(source_of(job, data)),
                )
            )
            # Nobody would start it again: there is nothing to wait for.
            apps = TaskApps(
                (child.url,), child.api_key, timeout_s=table.request_timeout_s, label=OWN, tell=tell
            )
        yield await stack.enter_async_context(apps)


def _body_bytes(source: Source) -> int:
    return max(DEFAULT_BODY_BYTES, bytes_of(source.largest()) + _BESIDE_A_ROW)


def told_of(apps: TaskApps) -> str:
    """Where the task apps are, and what those said that do not answer, in one line."""
    urls = ", ".join(client.url for client in apps)
    missing = apps.answers()
    return f"task app{'s' if len(apps) > 1 else ''}: {urls}" + (f"; not there: {missing}" if missing else "")


def task_app_key(given: SecretStr | None = None) -> SecretStr:
    """The key of the task apps that [services] names: the job's own, or this process's.

    Raises:
        JobError: neither has one, or what it has is no key.
    """
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
