"""What the dashboard may do to jobs, by the same rules as the routes."""

from collections.abc import Sequence
from pathlib import Path

import structlog

from trainer_backend.api.checking import checked
from trainer_backend.api.control_routes import ask_for
from trainer_backend.api.finding import job_named
from trainer_backend.api.service import Service
from trainer_backend.api.submitting import submission_of, submit
from trainer_backend.dashboard import services
from trainer_backend.errors import TrainerError
from trainer_backend.store.rows import JobRow

_log = structlog.get_logger("trainer")


class JobsForPages:
    """Implements dashboard.services.Jobs."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def check(self, text: str) -> services.Checked:
        bounds = self._service.settings.bounds
        try:
            found = (await self._service.checks.ask(checked, _bytes_of(text), bounds)).findings
        except TrainerError as error:
            return services.Checked(errors=(services.Finding(str(error)),))

        def of(severity: str) -> tuple[services.Finding, ...]:
            return tuple(services.Finding(one.text, one.line) for one in found if one.severity == severity)

        return services.Checked(errors=of("error"), warnings=of("warning"))

    async def submit(self, text: str, form: str) -> JobRow:
        sent = submission_of(_bytes_of(text), "application/toml")
        # With the text in it: who goes back and sends another one wants another job.
        key = f"form-{form}-{sent.digest[:16]}" if form else None
        job, _, _ = await submit(self._service, sent, key)
        return job

    async def control(self, job_id: str, action: services.Action) -> JobRow:
        return await ask_for(self._service, action, await job_named(self._service, job_id))


def _bytes_of(text: str) -> bytes:
    """Of a form's text; half a character in it makes bytes that are refused where they are read."""
    return text.encode("utf-8", "surrogatepass")


def dashboard_of(service: Service) -> services.Dashboard:
    """What the pages work with."""
    jobs = JobsForPages(service) if service.supervisor is not None else None
    return services.Dashboard(
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
