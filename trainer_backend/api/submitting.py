"""POST /jobs from its bytes to a row of the store."""

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field, ValidationError, model_validator

from shared_schemas.base import Body, did_you_mean
from trainer_backend.api.errors import ApiError, QueueFull, RunsNoJobs, UnknownMediaType
from trainer_backend.api.posted import document_of, posted_job
from trainer_backend.api.service import Service
from trainer_backend.errors import JobError, TrainerError
from trainer_backend.job import dump_job
from trainer_backend.store import jobs
from trainer_backend.store.jobs import NewJob
from trainer_backend.store.rows import JobRow

# Of a resolved job: warnings, or a JobError.
Trial = Callable[[str], Awaitable[tuple[str, ...]]]
_TOML = frozenset({"", "application/toml", "application/x-toml", "application/octet-stream"})
# What curl -d sends when nobody says otherwise.
_FORM = "application/x-www-form-urlencoded"


class PostedJob(Body):
    """A job as JSON: its tables, or its TOML as one text."""

    config: dict[str, Any] | None = Field(default=None, description="the tables of the TOML")
    toml: str | None = Field(default=None, description="or the TOML itself")
    tags: dict[str, str | int | float | bool] = Field(default_factory=dict, description="beside [tags]")

    @model_validator(mode="after")
    def _one_of_two(self) -> "PostedJob":
        if (self.config is None) == (self.toml is None):
            raise ValueError("exactly one of 'config' and 'toml' must be given")
        return self


@dataclass(frozen=True, slots=True)
class Submission:
    """What somebody sent.

    Attributes:
        digest: of the body as it came: the same key with another one is refused.
    """

    document: dict[str, Any]
    digest: str
    tags: Mapping[str, Any] = field(default_factory=dict)


def submission_of(body: bytes, media_type: str) -> Submission:
    """
    Args:
        media_type: the Content-Type header, or nothing.

    Raises:
        JobError: no TOML.
        ApiError: no JSON of the documented shape.
        UnknownMediaType: neither of the two.
    """
    kind = media_type.partition(";")[0].strip().lower()
    digest = digest_of(body)
    if kind == "application/json":
        posted = json_body(body)
        document = document_of(posted.toml) if posted.toml is not None else posted.config
        return Submission(document or {}, digest, posted.tags)
    if kind in _TOML or kind.startswith("text/"):
        return Submission(document_of(text_of(body)), digest)
    if kind == _FORM:
        try:
            return Submission(document_of(text_of(body)), digest)
        except JobError as error:
            raise JobError(
                error.detail, hint="curl -d drops line ends; send --data-binary @job.toml."
            ) from error
    raise UnknownMediaType(
        f"Content-Type is {kind[:80]!r}; known: application/toml, text/plain, application/json",
        where="header Content-Type",
    )


def digest_of(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def text_of(body: bytes) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is no UTF-8 text: byte {error.start}", where="body") from error


def json_body(body: bytes) -> PostedJob:
    """
    Raises:
        ApiError: with the key that is wrong.
    """
    try:
        return PostedJob.model_validate(json.loads(text_of(body)))
    except (ValueError, RecursionError) as error:
        raise ApiError(_told(error), where="body") from error


def _told(error: ValueError | RecursionError) -> str:
    if not isinstance(error, ValidationError):
        return f"no JSON: {error}"
    finding = error.errors(include_url=False)[0]
    name = ".".join(map(str, finding["loc"]))
    if finding["type"] == "extra_forbidden":
        return f"{name[:80]!r} is not known here{did_you_mean(name[:80], PostedJob.model_fields)}"
    message = finding["msg"].removeprefix("Value error, ")
    return f"{name}: {message}" if name else message


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
            return before, False, await service.ask(_warnings_again, service, sent)
    posted = await service.ask(posted_job, sent.document, service.settings.bounds, sent.tags)
    waiting = (await service.ask(jobs.counts, service.store, service.data.home)).get("queued", 0)
    if waiting >= service.settings.max_queued:
        raise QueueFull(f"{waiting} jobs wait for their turn, the most that this service takes")
    config = posted.loaded.config
    toml = dump_job(config)
    doubts = await trial(toml)
    new = NewJob(
        name=config.job.name,
        config=toml,
        home=service.data.home,
        run_dir=service.data.new_run_dir(config.job.name),
        tags=tuple(posted.tags.items()),
        idempotency_key=key,
        body_hash=sent.digest if key is not None else None,
    )
    job, made = await service.ask(jobs.create, service.store, new)
    service.changed(job.id)
    return job, made, (*posted.loaded.warnings, *doubts)


def _warnings_again(service: Service, sent: Submission) -> tuple[str, ...]:
    """Of a job that was accepted; none where it would not be now."""
    try:
        return posted_job(sent.document, service.settings.bounds, sent.tags).loaded.warnings
    except TrainerError:
        return ()
