"""Lets the task apps of a launcher's job check the job before it is queued.

The process of the job makes the same check when it starts.
"""

import asyncio
from collections.abc import Sequence

import tomli
from pydantic import Field, SecretStr

from shared_schemas.base import Body, OpenBody
from trainer_backend import job_parts
from trainer_backend.collect.apps import TaskApps
from trainer_backend.collect.task_apps import task_app_key
from trainer_backend.collect.trial import try_job
from trainer_backend.collect.wire import BackendFailed, TaskAppLost
from trainer_backend.errors import JobError, TaskAppError
from trainer_backend.job.load import parse_job
from trainer_backend.jobs.posted import WHERE, refuse_task_app
from trainer_backend.jobs.settings import Bounds

# Short, since a client waits. A slower task app may still answer when the job starts.
_AT_MOST_S = 20.0
_ONE_REQUEST_S = 10.0


class Verify(OpenBody):
    """The task app to verify."""

    endpoint_base_url: str = Field(min_length=1, max_length=2_000)


class Attempt(Body):
    """The result of GET /info with the service's key: `status` is 200, or `detail` describes the problem."""

    url: str
    status: int | None
    detail: str | None = None


class Verified(Body):
    """Whether a job could reach the task app. The reply never contains a key or a part of a key."""

    any_ok: bool
    attempts: tuple[Attempt, ...]


async def verify(url: str, bounds: Bounds) -> Verified:
    """Send GET /info with the service's key to a task app; raise JobError if it may not get the key."""
    if not_allowed := refuse_task_app(url, bounds):
        raise JobError(f"it {not_allowed}", where="endpoint_base_url")
    try:
        async with asyncio.timeout(_AT_MOST_S), _apps([url], task_app_key([url])) as apps:
            attempts = [
                Attempt(url=app.url, status=200 if app.fault is None else None, detail=app.fault)
                for app in apps.members
            ]
    except (TaskAppError, JobError, TimeoutError) as error:
        attempts = [Attempt(url=url, status=None, detail=_message(error))]
    return Verified(any_ok=any(attempt.status == 200 for attempt in attempts), attempts=tuple(attempts))


async def try_at_task_apps(toml: str) -> tuple[str, ...]:
    """Let a job's task apps check the job; return a warning if they do not answer.

    A job with [data] or fixed policies is not checked here, because the check needs data rows or keys.

    Raises:
        JobError: a task app refuses the job.
    """
    job = (await asyncio.to_thread(parse_job, tomli.loads(toml), where=WHERE)).config
    if not job.services.task_url or job.data is not None or job.rollout_only:
        return ()
    planner = job_parts.trial_planner(job, "trial")
    try:
        urls = job.services.task_url
        async with asyncio.timeout(_AT_MOST_S), _apps(urls, task_app_key(urls)) as apps:
            await try_job(planner, apps, from_scratch=True, preset=job.model.preset is not None)
    except (TaskAppLost, BackendFailed, TimeoutError) as error:
        return (f"the job could not be tried at its task app now: {_message(error)}",)
    except TaskAppError as error:
        raise JobError(f"{WHERE} cannot run: {error}") from error
    return ()


def _apps(urls: Sequence[str], key: SecretStr) -> TaskApps:
    return TaskApps(urls, key, timeout_s=_ONE_REQUEST_S)


def _message(error: Exception) -> str:
    return str(error) or f"nothing within {_AT_MOST_S:g} s"
