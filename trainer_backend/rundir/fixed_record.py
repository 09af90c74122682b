"""Which models the fixed policies of a run are, so that it goes on with no others."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from trainer_backend.errors import JobError, RunDirectoryError
from trainer_backend.rundir.layout import FIXED_RECORD, RunDirectory
from trainer_backend.rundir.whole_files import replace_text


@dataclass(frozen=True, slots=True)
class FixedWeights:
    """The folder that a fixed policy was loaded from, and its weights' fingerprint (`models.frozen`)."""

    folder: str
    sha256: str

    @property
    def identity(self) -> str:
        """What two of one name must have in common."""
        return self.sha256

    @property
    def told(self) -> str:
        return f"the weights with sha256 {self.sha256}, of {self.folder}"


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """What somebody else's server calls a fixed policy, and its URL without the query. What stands behind the
    name cannot be known."""

    model: str
    url: str

    @property
    def identity(self) -> str:
        """The server may move; where it does, that is told."""
        return self.model

    @property
    def told(self) -> str:
        return f"the model {self.model!r} at {self.url}"


FixedModel = FixedWeights | RemoteModel


def begin_record(run: RunDirectory, found: Mapping[str, FixedModel]) -> None:
    """Write down, by name, the models that a run begins with; no file for a run without.

    Raises:
        RunDirectoryError: the disk is full, or refuses.
    """
    path = run.path / FIXED_RECORD
    if not found:
        path.unlink(missing_ok=True)
        return
    text = json.dumps({name: asdict(model) for name, model in found.items()}, indent=2)
    replace_text(path, text + "\n")


def continue_record(run: RunDirectory, found: Mapping[str, FixedModel]) -> list[str]:
    """A policy that the run had must be what it was; one that it did not have may come, and is written down.

    Returns:
        A line for each whose model answers at another URL now.

    Raises:
        JobError: a policy of that name had other weights, or was another model; with both.
        RunDirectoryError: the record cannot be read or written.
    """
    recorded = _recorded(run)
    moved = []
    for name, model in found.items():
        before = recorded.get(name)
        if before is not None and (type(before), before.identity) != (type(model), model.identity):
            raise JobError(
                f"the run has samples of {before.told}, and now it names {model.told}",
                where=f"[rollout_only] {name!r}",
                hint="Name the first, give the new policy another name, or begin another run.",
            )
        if isinstance(model, RemoteModel) and before not in (None, model):
            moved.append(f"fixed policy {name!r}: {model.told}; the run has samples of it at another URL")
    begin_record(run, {**recorded, **found})
    return moved


def _recorded(run: RunDirectory) -> dict[str, FixedModel]:
    path = run.path / FIXED_RECORD
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {
            name: (RemoteModel if "url" in model else FixedWeights)(**model) for name, model in found.items()
        }
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise RunDirectoryError(f"{path} cannot be read: {error}") from error
