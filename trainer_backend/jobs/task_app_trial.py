"""Asks the task apps of a launcher's job before it is queued, as its process does when it begins."""

import asyncio
from collections.abc import Sequence

import tomli
from pydantic import Field, SecretStr

from shared_schemas.base import Body, OpenBody
from trainer_backend.collect.apps import TaskApps
from trainer_backend.collect.plan import Inference, Planner
from trainer_backend.collect.task_apps import task_app_key
from trainer_backend.collect.trial import try_job
from trainer_backend.collect.wire import TaskAppLost
from trainer_backend.core.policies import ACTOR, model_of
from trainer_backend.errors import JobError, TaskAppError
from trainer_backend.job.load import parse_job
from trainer_backend.job.schema import JobConfig
from trainer_backend.jobs.posted import WHERE
from trainer_backend.jobs.settings import Bounds

# Somebody waits for the answer. A task app that takes longer may still be there when the job begins.
_AT_MOST_S = 20.0
_ONE_REQUEST_S = 10.0
# A job that leaves the port open gets another one; lists of hosts cannot name it.
_ANY_PORT = 1


class Verify(OpenBody):
    """Which task app to verify."""

    endpoint_base_url: str = Field(min_length=1, max_length=2_000)


class Attempt(Body):
    """`status` of GET /info with the service's key, where it was 200; else `detail` says what happened."""

    url: str
    status: int | None
    detail: str | None = None


class Verified(Body):
    """Whether a job with this task app would reach it. No key, and no part of one, is ever told."""

    any_ok: bool
    attempts: tuple[Attempt, ...]


async def verified(url: str, bounds: Bounds) -> Verified:
    """
    Raises:
        JobError: the service's key may not be sent there.
    """
    if url.rstrip("/") not in bounds.task_urls:
        allowed = ", ".join(sorted(bounds.task_urls)) or "none"
        raise JobError(
            "it names a task app that the service's key may not be sent to "
            f"(TASK_URL or --allow-task-url: {allowed})",
            where="endpoint_base_url",
        )
    try:
        async with asyncio.timeout(_AT_MOST_S), _apps([url], task_app_key()) as apps:
            attempts = [
                Attempt(url=app.client.url, status=200 if app.lost is None else None, detail=app.lost)
                for app in apps.members
            ]
    except (TaskAppError, JobError, TimeoutError) as error:
        attempts = [Attempt(url=url, status=None, detail=_told(error))]
    return Verified(any_ok=any(found.status == 200 for found in attempts), attempts=tuple(attempts))


async def tried(toml: str) -> tuple[str, ...]:
    """Have the task apps that a resolved job names make what it will ask for; warnings where they are away.

    A job with rows or fixed policies is tried when it begins: that takes the rows, and other people's keys.

    Raises:
        JobError: a task app refuses a name, a config or the service's key: the job cannot run.
    """
    job = (await asyncio.to_thread(parse_job, tomli.loads(toml), where=WHERE)).config
    if not job.services.task_url or job.data is not None or job.rollout_only:
        return ()
    planner = Planner(job, "trial", _gateway(job))
    try:
        async with asyncio.timeout(_AT_MOST_S), _apps(job.services.task_url, task_app_key()) as apps:
            await try_job(planner, apps, from_scratch=True)
    except (TaskAppLost, TimeoutError) as error:
        return (f"the job was not tried at its task app, which does not answer now: {_told(error)}",)
    except TaskAppError as error:
        raise JobError(f"{WHERE} cannot run: {error}") from error
    return ()


def _apps(urls: Sequence[str], key: SecretStr) -> TaskApps:
    return TaskApps(urls, key, timeout_s=_ONE_REQUEST_S)


def _gateway(job: JobConfig) -> Inference:
    """Where the actor will be asked, as far as it is known; nobody asks there in a trial."""
    host, port = job.services.gateway_host, job.services.gateway_port or _ANY_PORT
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    return Inference(url, model_of(job.job.name, ACTOR), SecretStr(""), job.inference.max_model_len)


def _told(error: Exception) -> str:
    return str(error) or f"nothing within {_AT_MOST_S:g} s"
