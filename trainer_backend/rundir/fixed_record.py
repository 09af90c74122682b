"""RUN/fixed_policies.json records a run's fixed policies. A run with changed ones cannot be resumed."""

import fcntl
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from trainer_backend.errors import JobError, RunDirectoryError
from trainer_backend.rundir.files import replace_text, write_errors
from trainer_backend.rundir.layout import FIXED_RECORD, RunDirectory


@dataclass(frozen=True, slots=True)
class FixedWeights:
    """A fixed policy's folder, and the fingerprint of its weights. Only the fingerprint decides equality."""

    folder: str = field(compare=False)
    sha256: str

    def __str__(self) -> str:
        return f"the weights with sha256 {self.sha256}, of {self.folder}"


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A fixed policy at a remote server: its model name and its URL. Only the name decides equality.

    Its weights are unknown. `url` has no query. A resumed run reports a changed URL and continues.
    """

    model: str
    url: str = field(compare=False)

    def __str__(self) -> str:
        return f"the model {self.model!r} at {self.url}"


FixedModel = FixedWeights | RemoteModel


def begin_record(run: RunDirectory, models: Mapping[str, FixedModel]) -> None:
    """Record the fixed policies of a new run by name. If it has none, delete the file."""
    path = run.path / FIXED_RECORD
    if not models:
        path.unlink(missing_ok=True)
        return
    replace_text(path, _write(models))


def _write(models: Mapping[str, FixedModel]) -> str:
    return json.dumps({name: asdict(model) for name, model in models.items()}, indent=2) + "\n"


def continue_record(run: RunDirectory, models: Mapping[str, FixedModel]) -> list[str]:
    """Raise JobError if a policy differs from the run's record; otherwise add new policies to the record.

    Returns a line for each model whose URL has changed.
    """
    if not models:
        return []
    path = run.path / "run.json"  # the file to lock: every run has it, and it is never replaced
    with write_errors(path):
        lock = path.open("r+b")
    with lock:
        with write_errors(path):  # a file system may have no locks
            # The gateways of a run with [cluster] may read and write the record at the same time.
            fcntl.flock(lock, fcntl.LOCK_EX)
        return _continue_record(run, models)


def _continue_record(run: RunDirectory, models: Mapping[str, FixedModel]) -> list[str]:
    record = _read_record(run)
    moves = []
    for name, model in models.items():
        before = record.get(name)
        if before not in (None, model):
            raise JobError(
                f"the run has samples of {before}, and now it names {model}",
                where=f"[rollout_only] {name!r}",
                hint="Name the first, give the new policy another name, or begin another run.",
            )
        if isinstance(model, RemoteModel) and isinstance(before, RemoteModel) and before.url != model.url:
            moves.append(f"fixed policy {name!r}: {model}; the run has samples of it at another URL")
    if _write(record) != _write(merged := {**record, **models}):
        begin_record(run, merged)
    return moves


def _read_record(run: RunDirectory) -> dict[str, FixedModel]:
    path = run.path / FIXED_RECORD
    if not path.exists():
        return {}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return {
            name: (RemoteModel if "url" in model else FixedWeights)(**model) for name, model in record.items()
        }
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise RunDirectoryError(f"{path} cannot be read: {error}") from error
