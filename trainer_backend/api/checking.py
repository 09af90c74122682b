"""What is wrong with a job's text, or doubtful, finding by finding, each with its line: for the form."""

from typing import Literal

from pydantic import Field

from shared_schemas.base import Body
from trainer_backend.api.posted import WHERE, document_of, posted_job
from trainer_backend.api.settings import Bounds
from trainer_backend.api.toml_lines import line_of, lines_of
from trainer_backend.errors import TrainerError


class Finding(Body):
    """`line` from 1, where it is known."""

    severity: Literal["error", "warning"]
    text: str
    line: int | None = Field(default=None, ge=1)


class Checked(Body):
    """What was found in a job's text; without errors (`ok`) it can be posted."""

    ok: bool
    findings: tuple[Finding, ...]


def checked(text: str, bounds: Bounds) -> Checked:
    """Read a job as POST /jobs would; nothing is stored or started."""
    try:
        warnings = posted_job(document_of(text), bounds).loaded.warnings
    except TrainerError as error:
        lines = [line.removeprefix(f"{WHERE}: ") for line in str(error).splitlines()]
        return Checked(ok=False, findings=tuple(_finding("error", line, text) for line in lines if line))
    return Checked(ok=True, findings=tuple(_finding("warning", line, text) for line in warnings))


def _finding(severity: Literal["error", "warning"], told: str, text: str) -> Finding:
    return Finding(severity=severity, text=told, line=line_of(told, lines_of(text), text))
