"""POST /jobs from its bytes to a row of the store."""

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer_backend.api.checking import Resolution, resolved
from trainer_backend.api.errors import QueueFull, RunsNoJobs
from trainer_backend.api.service import Service
from trainer_backend.errors import TrainerError
from trainer_backend.store import jobs
from trainer_backend.store.jobs import NewJob
from trainer_backend.store.rows import JobRow

# Of a resolved job: warnings, or a JobError.
Trial = Callable[[str], Awaitable[tuple[str, ...]]]


@dataclass(frozen=True, slots=True)
class Submission:
    """What somebody sent.

    Attributes:
        content: the body as it came, or the tables of a job.
        digest: of the body as it came: the same key with another one is refused.
        tags: beside those of the job.
        media_type: of a body.
    """

    content: bytes | Mapping[str, Any]
    digest: str
    tags: Mapping[str, Any] = field(default_factory=dict)
    media_type: str = ""


def submission_of(body: bytes, media_type: str) -> Submission:
    """What a request brings; not read yet."""
    return Submission(body, digest_of(body), media_type=media_type)


def digest_of(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


async def resolution(service: Service, sent: Submission) -> Resolution:
    """
    Raises:
        TrainerError: what `checking.resolved` raises.
        CheckEnded: that took too long, or too much memory.
    """
    bounds = service.settings.bounds
    return await service.checks.ask(resolved, sent.content, sent.media_type, sent.tags, bounds)


async def untried(toml: str) -> tuple[str, ...]:
    """No trial: what the job asks of others shows when it begins."""
    return ()


async def submit(
    service: Service, sent: Submission, key: str | None, trial: Trial = untried
) -> tuple[JobRow, bool, tuple[str, ...]]:
    """Check and store it; the job, whether this request made it, and what may still be wrong with it.

    A request that was accepted before is answered with its job, whatever has become of the queue, of the
    files that it names and of what posted jobs may name.

    Raises:
        JobError: it is wrong, or names what it may not.
        RunsNoJobs: this service only shows runs.
        QueueFull: too many wait already.
        JobError: the trial says that it cannot run.
        IdempotencyConflict: the key came with another body before.
    """
    if service.supervisor is None:
        raise RunsNoJobs(
            "this service only shows runs (--no-jobs)",
            hint="Start one that runs jobs: turnwise trainer.",
        )
    if key is not None:
        before = await service.ask(jobs.made_by, service.store, service.data.home, key, sent.digest)
        if before is not None:
            return before, False, await _warnings_again(service, sent)
    found = await resolution(service, sent)
    doubts = await trial(found.toml)  # takes seconds: what is posted meanwhile is counted below
    waiting = (await service.ask(jobs.counts, service.store, service.data.home)).get("queued", 0)
    if waiting >= service.settings.max_queued:
        raise QueueFull(f"{waiting} jobs wait for their turn, the most that this service takes")
    new = NewJob(
        name=found.name,
        config=found.toml,
        home=service.data.home,
        run_dir=service.data.new_run_dir(found.name),
        tags=found.tags,
        idempotency_key=key,
        body_hash=sent.digest if key is not None else None,
    )
    job, made = await service.ask(jobs.create, service.store, new)
    service.changed(job.id)
    return job, made, (*found.warnings, *doubts)


async def _warnings_again(service: Service, sent: Submission) -> tuple[str, ...]:
    """Of a job that was accepted; none where it would not be now."""
    try:
        return (await resolution(service, sent)).warnings
    except TrainerError:
        return ()
