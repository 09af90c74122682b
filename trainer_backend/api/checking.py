"""Reads what somebody has sent as a job: to what it resolves, or what is wrong with it, finding by finding.

It is anybody's text, so all of it is read in a process that can be ended (check_process.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from shared_schemas.base import Body, did_you_mean
from shared_schemas.json_text import read_json
from trainer_backend.api.errors import ApiError, UnknownMediaType
from trainer_backend.api.posted import WHERE, Tags, document_of, posted_job
from trainer_backend.api.settings import Bounds
from trainer_backend.api.toml_lines import line_of, lines_of
from trainer_backend.errors import JobError, TrainerError
from trainer_backend.job import dump_job

_JSON = "application/json"
_TOML = frozenset({"", "application/toml", "application/x-toml", "application/octet-stream"})
# What curl -d sends when nobody says otherwise.
_FORM = "application/x-www-form-urlencoded"


class PostedJob(Body):
    """A job as JSON: its tables, or its TOML as one text."""

    config: dict[str, Any] | None = Field(default=None, description="the tables of the TOML")
    toml: str | None = Field(default=None, description="or the TOML itself")
    tags: Tags = Field(default_factory=dict, description="beside [tags]")

    @model_validator(mode="after")
    def _one_of_two(self) -> "PostedJob":
        if (self.config is None) == (self.toml is None):
            raise ValueError("exactly one of 'config' and 'toml' must be given")
        return self


class Finding(Body):
    """`line` from 1, where it is known."""

    severity: Literal["error", "warning"]
    text: str
    line: int | None = Field(default=None, ge=1)


class Checked(Body):
    """What was found in a job's text; without errors (`ok`) it can be posted."""

    ok: bool
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Resolution:
    """A job that may run.

    Attributes:
        toml: with every default filled in.
        warnings: what may still be wrong with it.
    """

    name: str
    toml: str
    tags: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]


def resolved(
    content: bytes | Mapping[str, Any], media_type: str, tags: Mapping[str, Any], bounds: Bounds
) -> Resolution:
    """
    Args:
        content: a body as it came, or the tables of a job.
        media_type: of a body: its Content-Type header, or nothing.
        tags: beside those of the job.

    Raises:
        JobError: no TOML, a job that is wrong, or one that names what it may not.
        ApiError: no JSON of the documented shape.
        UnknownMediaType: neither of the two.
    """
    if isinstance(content, bytes):
        tables, own_tags = _read(content, media_type.partition(";")[0].strip().lower())
        posted = posted_job(tables, bounds, {**own_tags, **tags})
    else:
        posted = posted_job(content, bounds, tags)
    config = posted.loaded.config
    return Resolution(
        config.job.name, dump_job(config), tuple(posted.tags.items()), tuple(posted.loaded.warnings)
    )


def checked(content: bytes, bounds: Bounds) -> Checked:
    """Read the TOML of a job as POST /jobs would; nothing is stored or started.

    Raises:
        ApiError: it is no text.
    """
    text = text_of(content)
    try:
        warnings = posted_job(document_of(text), bounds).loaded.warnings
    except TrainerError as error:
        lines = [line.removeprefix(f"{WHERE}: ") for line in str(error).splitlines()]
        return Checked(ok=False, findings=_findings("error", [line for line in lines if line], text))
    return Checked(ok=True, findings=_findings("warning", warnings, text))


def _findings(
    severity: Literal["error", "warning"], sentences: Sequence[str], text: str
) -> tuple[Finding, ...]:
    lines = lines_of(text)
    return tuple(
        Finding(severity=severity, text=sentence, line=line_of(sentence, lines, text))
        for sentence in sentences
    )


def text_of(body: bytes) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is no UTF-8 text: byte {error.start}", where="body") from error


def _read(body: bytes, media_type: str) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """The tables of a job, and the tags that came beside them."""
    if media_type == _JSON:
        posted = _json_body(body)
        document = document_of(posted.toml) if posted.toml is not None else posted.config
        return document or {}, posted.tags
    if media_type in _TOML or media_type.startswith("text/"):
        return document_of(text_of(body)), {}
    if media_type == _FORM:
        try:
            return document_of(text_of(body)), {}
        except JobError as error:
            raise JobError(
                error.detail, hint="curl -d drops line ends; send --data-binary @job.toml."
            ) from error
    raise UnknownMediaType(
        f"Content-Type is {media_type[:80]!r}; known: application/toml, text/plain, application/json",
        where="header Content-Type",
    )


def _json_body(body: bytes) -> PostedJob:
    """
    Raises:
        ApiError: with the key that is wrong.
    """
    try:
        return PostedJob.model_validate(read_json(body))
    except ValueError as error:
        raise ApiError(_told(error), where="body") from error


def _told(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    finding = error.errors(include_url=False)[0]
    name = ".".join(map(str, finding["loc"]))[:80]
    if finding["type"] == "extra_forbidden":
        return f"{name!r} is not known here{did_you_mean(name, PostedJob.model_fields)}"
    message = finding["msg"].removeprefix("Value error, ")
    return f"{name}: {message}" if name else message
