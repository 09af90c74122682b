"""The task apps of a job: its own child process, or those that [services] names."""

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from pydantic import SecretStr

from trainer_backend.collect.client import TaskAppClient
from trainer_backend.collect.plan import Inference
from trainer_backend.embedded import EmbeddedTaskApp
from trainer_backend.endpoints import hosts_to_call
from trainer_backend.errors import JobError
from trainer_backend.job_schema import JobConfig

KEY_VARIABLE = "ENVIRONMENT_API_KEY"
KEY_FILE_VARIABLE = "ENVIRONMENT_API_KEY_FILE"


@asynccontextmanager
async def task_apps(
    job: JobConfig, log_file: Path, player: Inference | None = None
) -> AsyncIterator[Sequence[TaskAppClient]]:
    """Clients of the job's task apps, each known to be up and to accept the key.

    Args:
        job: names them in [services], or none.
        log_file: where an embedded one logs.
        player: a model at somebody else's server; an embedded task app is allowed to call it. What another
            one may call, its operator decides.

    Raises:
        JobError: [services] names task apps, but no key is given for them; or a server's URL is none.
        TaskAppError: one cannot be reached, or refuses the key.
    """
    timeout_s = job.services.request_timeout_s
    async with AsyncExitStack() as stack:
        if job.services.task_url:
            key = _key(job)
            addresses = [(url, key) for url in job.services.task_url]
        else:
            child = await stack.enter_async_context(
                EmbeddedTaskApp(log_file, hosts_to_call(job, player), plugins=job.services.task_plugins)
            )
            addresses = [(child.url, child.api_key)]
        clients = []
        for url, key in addresses:
            client = await stack.enter_async_context(TaskAppClient(url, key, timeout_s=timeout_s))
            await client.task_info()
            clients.append(client)
        yield clients


def _key(job: JobConfig) -> SecretStr:
    if job.services.task_api_key is not None:
        return job.services.task_api_key
    value = os.environ.get(KEY_VARIABLE, "").strip() or _key_in_file(os.environ.get(KEY_FILE_VARIABLE, ""))
    if not value:
        raise JobError(
            f"services.task_url is given, but no key: set {KEY_VARIABLE} or {KEY_FILE_VARIABLE} in the "
            "environment, or services.task_api_key in the job"
        )
    return SecretStr(value)


def _key_in_file(name: str) -> str:
    if not name:
        return ""
    try:
        return Path(name).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"{KEY_FILE_VARIABLE} names {name!r}, which cannot be read: {error}") from error
