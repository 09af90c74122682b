"""Which checkpoint folders a run has, and which of them is the best. Paths alone: no torch."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from trainer_backend.errors import RunDirectoryError
from trainer_backend.rundir.files import replace_text, writing

STATE_FILE = "state.json"
# What of a checkpoint only a resume reads. In a folder of its own: servers take all safetensors beside
# config.json for weights of the model.
TRAINING_FOLDER = "training_state"


def latest_checkpoint(checkpoints: Path) -> Path | None:
    """The finished checkpoint with the highest iteration; folders still aside do not count."""
    found = [path for path in _folders(checkpoints) if is_whole(path)]
    return found[-1] if found else None


def is_whole(checkpoint: Path) -> bool:
    """Whether there is a checkpoint in this folder."""
    return (checkpoint / STATE_FILE).exists()


def newest_folder(checkpoints: Path) -> Path | None:
    """As `latest_checkpoint`, also where that folder has lost what makes it one."""
    return next(reversed(_folders(checkpoints)), None)


def best_checkpoint(checkpoints: Path) -> Path | None:
    """The checkpoint that the best evaluation belongs to, or the latest when none was evaluated."""
    mark = best_mark(checkpoints)
    return latest_checkpoint(checkpoints) if mark is None else mark.folder


class BestMark(NamedTuple):
    """What the file `best` says: a checkpoint, and the mean outcome of its evaluation."""

    folder: Path
    score: float


def best_mark(checkpoints: Path) -> BestMark | None:
    """Return the last mark; None if there is none, or its checkpoint is gone."""
    try:
        name, score = (checkpoints / "best").read_text(encoding="utf-8").split()
        mark = BestMark(checkpoints / name, float(score))
    except (OSError, ValueError):
        return None
    return mark if is_whole(mark.folder) else None


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


def mark_best(mark: BestMark) -> None:
    """Point `best` at a checkpoint. Its score stands beside it: rows of metrics can be lost."""
    replace_text(mark.folder.parent / "best", f"{mark.folder.name}\n{mark.score!r}\n")


def prune_checkpoints(checkpoints: Path, keep: int, *, stays: Callable[[int], bool]) -> None:
    """Remove all but the newest, the best one, iteration_0 (what RL started from), and the last `keep` of
    those that stay.

    Args:
        stays: whether the checkpoint of an iteration is one to keep, or was only made for a resume.
    """
    folders = _folders(checkpoints)
    kept = [folder for folder in folders if stays(iteration_of(folder))][-keep:]
    kept += [folder for folder in (best_checkpoint(checkpoints), latest_checkpoint(checkpoints)) if folder]
    for folder in folders:
        if folder not in kept and iteration_of(folder) > 0:
            with writing(folder):
                # A kill in the middle must not leave half of it under a name that counts.
                os.replace(folder, folder.with_name(f".{folder.name}.gone"))
    for folder in checkpoints.glob(".iteration_*.gone"):
        with writing(folder):
            shutil.rmtree(folder)


def whole_checkpoints(checkpoints: Path) -> list[tuple[int, Path]]:
    """By iteration, oldest first; one that is being written is none."""
    return [(iteration_of(folder), folder) for folder in _folders(checkpoints) if is_whole(folder)]


def _folders(checkpoints: Path) -> list[Path]:
    """Oldest first; a copy that somebody made (iteration_5_backup) is not ours to count or remove."""
    ours = [path for path in checkpoints.glob("iteration_*") if path.name[10:].isdecimal()]
    return sorted(ours, key=iteration_of)


def iteration_of(folder: Path) -> int:
    """Of a checkpoint's folder."""
    return int(folder.name.rpartition("_")[2])
