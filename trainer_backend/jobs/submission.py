"""Checks posted jobs and stores them. Also offers the dashboard's actions on jobs."""

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from shared_schemas.plain_text import read_text
from trainer_backend.errors import QueueFull, RunsNoJobs, TrainerError
from trainer_backend.jobs.posted import Checked, Finding, Resolution, check, may_name, resolve
from trainer_backend.jobs.service import Service, find_job, refuse_foreign
from trainer_backend.jobs.states import Verb, changes_for
from trainer_backend.pages import page
from trainer_backend.pages.stored import Frames
from trainer_backend.store import jobs
from trainer_backend.store.rows import Job
from trainer_backend.terminal.templates import Choices, job_text

# Takes a resolved job's TOML; returns warnings or raises JobError.
Trial = Callable[[str], Awaitable[tuple[str, ...]]]


@dataclass(frozen=True, slots=True)
class Submission:
    """A job as a client sent it."""

    content: bytes | Mapping[str, Any]
    """The unparsed body of the request, or the tables of a job."""
    digest: str
    """Digest of the body. A repeated Idempotency-Key is refused if the digest differs."""
    tags: Mapping[str, Any] = field(default_factory=dict)
    """Tags that override the job's own tags of the same name."""
    media_type: str = ""
    """Content-Type of the body."""


def hash_body(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


async def resolution(service: Service, submission: Submission) -> Resolution:
    """Parse and validate a submission in the check process."""
    bounds = service.settings.bounds
    return await service.checks.ask(
        resolve, submission.content, submission.media_type, submission.tags, bounds
    )


async def submit(
    service: Service, submission: Submission, key: str | None, trial: Trial | None = None
) -> tuple[Job, bool, tuple[str, ...]]:
    """Check and store a job; return the job, whether this request created it, and its warnings.

    A repeated request (with the same `key`) returns the job of the first request, even if a new job would be
    refused now. `trial` asks the task apps to check the job; without it, they check it only when it starts.
    """
    if service.supervisor is None:
        raise RunsNoJobs(
            "this service only shows runs (--no-jobs)", hint="Start one that runs jobs: turnwise trainer."
        )
    if key is not None:
        earlier = await service.line.ask(
            jobs.job_of_request, service.store, service.data.home, key, submission.digest
        )
        if earlier is not None:
            try:
                return earlier, False, (await resolution(service, submission)).warnings
            except TrainerError:  # a new job of this kind would be refused now
                return earlier, False, ()
    resolved = await resolution(service, submission)
    # The trial takes seconds, so the queued jobs are counted after it.
    trial_warnings = () if trial is None else await trial(resolved.toml)
    queued = (await service.line.ask(jobs.counts, service.store, service.data.home)).get("queued", 0)
    if queued >= service.settings.max_queued:
        raise QueueFull(f"{queued} jobs wait for their turn, the most that this service takes")
    new = Job(
        name=resolved.name,
        config=resolved.toml,
        home=service.data.home,
        run_dir=str(service.data.new_run_dir(resolved.name)),
        tags=dict(resolved.tags),
        idempotency_key=key,
        body_hash=submission.digest if key is not None else None,
    )
    job, is_new = await service.line.ask(jobs.create, service.store, new)
    service.changed(job.id)
    return job, is_new, (*resolved.warnings, *trial_warnings)


async def apply_verb(service: Service, verb: Verb, job: Job) -> Job:
    """Store a pause, resume or cancel in a job's row, where the supervisor reads it; return the row."""
    refuse_foreign(service, job)
    now = service.store.clock()
    row = await service.line.ask(
        jobs.change, service.store, job.id, lambda current: changes_for(verb, current, now)
    )
    service.changed(job.id)
    return row


_log = structlog.get_logger("trainer")


class JobsForPages:
    """The dashboard's actions on jobs; implements the protocol pages.page.Jobs."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def check(self, text: str) -> Checked:
        bounds = self._service.settings.bounds
        try:
            return await self._service.checks.ask(check, _encode(text), bounds)
        except TrainerError as error:
            return Checked(ok=False, findings=(Finding(severity="error", text=str(error), line=None),))

    async def submit(self, text: str, form: str) -> Job:
        body = _encode(text)
        submission = Submission(body, hash_body(body), media_type="application/toml")
        # The text is part of the key: going back and sending another text makes another job.
        key = f"form-{form}-{submission.digest[:16]}" if form else None
        job, _, _ = await submit(self._service, submission, key)
        return job

    async def control(self, job_id: str, action: page.Action) -> Job:
        return await apply_verb(self._service, action, await find_job(self._service, job_id))


def _encode(text: str) -> bytes:
    """Encode a form's text. A lone surrogate becomes invalid UTF-8, which the check of the job refuses."""
    return text.encode("utf-8", "surrogatepass")


def build_dashboard(service: Service) -> page.Dashboard:
    jobs = JobsForPages(service) if service.supervisor is not None else None
    settings = service.settings
    # The form first shows the job that `turnwise init` writes, because that job needs no other file.
    first = ("turnwise init", job_text(Choices().values()))
    return page.Dashboard(
        service.store, jobs, service.store.clock, (first, *examples_in(settings.roots)),
        frames=Frames(may_run=lambda file: may_name("services.task_plugins", file, settings)),
    )  # fmt: skip


def examples_in(roots: Sequence[Path]) -> tuple[tuple[str, str], ...]:
    """Return the name and text of each example job: the files *.toml in the folders of --allow-root.

    An unreadable file is logged and skipped, because it must not prevent the service's start.
    """
    files = [file for root in roots for file in sorted(root.glob("*.toml"))]
    stems = [file.stem for file in files]
    examples = []
    for file in files:
        try:
            text = read_text(file)
        except (OSError, ValueError) as error:
            _log.warning("example_not_read", file=str(file), error=str(error))
            continue
        examples.append((file.stem if stems.count(file.stem) == 1 else str(file), text))
    return tuple(examples)
