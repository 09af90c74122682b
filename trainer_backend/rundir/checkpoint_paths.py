"""Which checkpoint folders a run has, and which of them is the best. Paths alone: no torch."""

import os
import shutil
from pathlib import Path

from trainer_backend.errors import RunDirectoryError
from trainer_backend.rundir.boundary import writing

STATE_FILE = "state.json"


def latest_checkpoint(checkpoints: Path) -> Path | None:
    """The finished checkpoint with the highest iteration; folders still aside do not count."""
    found = [path for path in _folders(checkpoints) if (path / STATE_FILE).exists()]
    return found[-1] if found else None


def best_checkpoint(checkpoints: Path) -> Path | None:
    """The checkpoint that the best evaluation belongs to, or the latest when none was evaluated."""
    pointer = checkpoints / "best"
    if pointer.exists():
        path = checkpoints / pointer.read_text(encoding="utf-8").strip()
        if path.exists():
            return path
    return latest_checkpoint(checkpoints)


def run_of(folder: Path) -> Path | None:
    """The run that a folder is, or whose checkpoint it is."""
    candidates = (folder, folder.parent.parent)
    return next((path for path in candidates if (path / "run.json").exists()), None)


def model_in(folder: Path) -> Path:
    """The model that a person means: of a run its best checkpoint, otherwise the folder itself.

    Raises:
        RunDirectoryError: the run has no checkpoint yet.
    """
    if run_of(folder) != folder:
        return folder
    best = best_checkpoint(folder / "checkpoints")
    if best is None:
        raise RunDirectoryError(f"{folder} has no checkpoint yet")
    return best


def mark_best(folder: Path) -> None:
    """Point `best` at this checkpoint."""
    pointer, aside = folder.parent / "best", folder.parent / ".best.tmp"
    with writing(pointer):
        aside.write_text(folder.name, encoding="utf-8")
        os.replace(aside, pointer)


def prune_checkpoints(checkpoints: Path, keep: int) -> None:
    """Remove all but the newest `keep`, the best one, and iteration_0 (what RL started from)."""
    best = best_checkpoint(checkpoints)
    for folder in _folders(checkpoints)[:-keep]:
        if folder != best and _iteration(folder) > 0:
            with writing(folder):
                shutil.rmtree(folder)


def _folders(checkpoints: Path) -> list[Path]:
    """Oldest first; a copy that somebody made (iteration_5_backup) is not ours to count or remove."""
    ours = [path for path in checkpoints.glob("iteration_*") if path.name[10:].isdecimal()]
    return sorted(ours, key=_iteration)


def _iteration(folder: Path) -> int:
    return int(folder.name.rpartition("_")[2])
