"""What the dashboard may do to jobs, by the same rules as the routes."""

from pathlib import Path

from trainer_backend.api.checking import checked
from trainer_backend.api.control_routes import ask_for
from trainer_backend.api.finding import job_named
from trainer_backend.api.posted import document_of
from trainer_backend.api.service import Service
from trainer_backend.api.submitting import Submission, digest_of, submit
from trainer_backend.dashboard import services
from trainer_backend.store.rows import JobRow

_EXAMPLES = Path("configs")


class JobsForPages:
    """Implements dashboard.services.Jobs."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def check(self, text: str) -> services.Checked:
        found = checked(text, self._service.settings.bounds).findings

        def of(severity: str) -> tuple[services.Finding, ...]:
            return tuple(services.Finding(one.text, one.line) for one in found if one.severity == severity)

        return services.Checked(errors=of("error"), warnings=of("warning"))

    async def submit(self, text: str) -> JobRow:
        sent = Submission(document_of(text), digest_of(text.encode()))
        job, _, _ = await submit(self._service, sent, None)
        return job

    async def control(self, job_id: str, action: services.Action) -> JobRow:
        return await ask_for(self._service, action, await job_named(self._service, job_id))


def dashboard_of(service: Service) -> services.Dashboard:
    """What the pages work with."""
    jobs = JobsForPages(service) if service.supervisor is not None else None
    return services.Dashboard(service.store, jobs, service.store.clock, _examples())


def _examples() -> tuple[tuple[str, str], ...]:
    """The jobs beside the code, where there are some: names and texts."""
    files = sorted(_EXAMPLES.glob("*.toml"))
    return tuple((file.stem, file.read_text(encoding="utf-8")) for file in files)
