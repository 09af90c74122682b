"""What the pages work with: one object of the application, made once at its start."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Literal, Protocol

from fastapi import Request

from trainer_backend.dashboard.frames import Frames
from trainer_backend.dashboard.stored import Kept, StoredRollouts
from trainer_backend.dashboard.token_texts import token_texts
from trainer_backend.store.database import Store
from trainer_backend.store.rows import JobRow

Action = Literal["pause", "resume", "cancel"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with a job's text, or doubtful; `line` from 1, where it is known."""

    text: str
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Checked:
    """What was found in a job's text; without errors it can start."""

    errors: tuple[Finding, ...] = ()
    warnings: tuple[Finding, ...] = ()


class Jobs(Protocol):
    """What pages may do to jobs. The API does it, so that both keep to the same rules."""

    async def check(self, text: str) -> Checked: ...

    async def submit(self, text: str, form: str) -> JobRow:
        """The job of a form's text.

        Args:
            form: which form was sent; the same text in the same form, sent again, is the same job.

        Raises:
            TrainerError: the job is refused.
        """
        ...

    async def control(self, job_id: str, action: Action) -> JobRow:
        """
        Raises:
            JobConflict: it makes no sense in the job's state.
        """
        ...


@dataclass(frozen=True, slots=True)
class Dashboard:
    """
    Attributes:
        jobs: None where this service only shows what is there.
        clock: of the calendar; UTC.
        examples: jobs that the form can begin from: names and texts.
    """

    store: Store
    jobs: Jobs | None
    clock: Callable[[], datetime]
    examples: tuple[tuple[str, str], ...] = ()
    rollouts: StoredRollouts = field(default_factory=StoredRollouts)
    frames: Frames = field(default_factory=Frames)
    _tokenizers: Kept[Callable[[int], str] | None] = field(default_factory=lambda: Kept(4))

    def token_texts(self, run_dir: Path) -> Callable[[int], str] | None:
        """What token ids of a run say; None where it has no checkpoint with a tokenizer."""
        folders = sorted((run_dir / "checkpoints").glob("iteration_*"))
        if not folders:
            return None
        return self._tokenizers.get(str(run_dir), lambda: token_texts(folders))


def dashboard_of(request: Request) -> Dashboard:
    """The application's."""
    found = request.app.state.dashboard
    assert isinstance(found, Dashboard)
    return found
