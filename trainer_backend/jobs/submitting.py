"""Jobs on their way into the store: POST /jobs from bytes to a row, and the dashboard's actions on jobs."""

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from trainer_backend.errors import QueueFull, RunsNoJobs, TrainerError
from trainer_backend.jobs.control import ask_for
from trainer_backend.jobs.posted import Resolution, checked, resolved
from trainer_backend.jobs.service import Service, job_named
from trainer_backend.pages import page
from trainer_backend.store import jobs
from trainer_backend.store.jobs import NewJob
from trainer_backend.store.rows import JobRow

# Of a resolved job: warnings, or a JobError.
Trial = Callable[[str], Awaitable[tuple[str, ...]]]


@dataclass(frozen=True, slots=True)
class Submission:
    """A job as a client sent it.

    Attributes:
        content: the body as it came, or the tables of a job.
        digest: of the body as it came; an Idempotency-Key that comes again with another digest is refused.
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
    """Check a job and store it; return the job, whether this request made it, and its warnings.

    A repeated request gets the job of the accepted one, even if the queue is full now, files are gone, or the
    rules for posted jobs have changed.

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


_log = structlog.get_logger("trainer")


class JobsForPages:
    """Implements pages.page.Jobs."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def check(self, text: str) -> page.Checked:
        bounds = self._service.settings.bounds
        try:
            found = (await self._service.checks.ask(checked, _bytes_of(text), bounds)).findings
        except TrainerError as error:
            return page.Checked(errors=(page.Finding(str(error)),))

        def of(severity: str) -> tuple[page.Finding, ...]:
            return tuple(page.Finding(one.text, one.line) for one in found if one.severity == severity)

        return page.Checked(errors=of("error"), warnings=of("warning"))

    async def submit(self, text: str, form: str) -> JobRow:
        sent = submission_of(_bytes_of(text), "application/toml")
        # With the text in it: who goes back and sends another one wants another job.
        key = f"form-{form}-{sent.digest[:16]}" if form else None
        job, _, _ = await submit(self._service, sent, key)
        return job

    async def control(self, job_id: str, action: page.Action) -> JobRow:
        return await ask_for(self._service, action, await job_named(self._service, job_id))


def _bytes_of(text: str) -> bytes:
    """Of a form's text; half a character in it makes bytes that are refused where they are read."""
    return text.encode("utf-8", "surrogatepass")


def dashboard_of(service: Service) -> page.Dashboard:
    """What the pages work with."""
    jobs = JobsForPages(service) if service.supervisor is not None else None
    return page.Dashboard(
        service.store, jobs, service.store.clock, examples_in(service.settings.bounds.roots)
    )


def examples_in(roots: Sequence[Path]) -> tuple[tuple[str, str], ...]:
    """Jobs that the operator offers, *.toml in the folders of --allow-root: names and texts.

    What cannot be read is logged and left out: a form is no reason not to serve.
    """
    files = [file for root in roots for file in sorted(root.glob("*.toml"))]
    stems = [file.stem for file in files]
    found = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            _log.warning("example_not_read", file=str(file), error=str(error))
            continue
        found.append((file.stem if stems.count(file.stem) == 1 else str(file), text))
    return tuple(found)
