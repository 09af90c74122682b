"""The checkpoint folders of a run, and the mark of the best one. Does not import torch."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from trainer_backend.errors import RunDirectoryError
from trainer_backend.rundir.files import NO_LINKS, replace_text, write_errors

STATE_FILE = "state.json"
# The checkpoint that RL started from: the base of adapters, and the reference of a KL term.
STARTED_FROM = "iteration_0"
BEST, _MARK = "best", "best.json"
# The files that only a resume reads. They have a folder of their own, because servers load every
# safetensors file next to config.json as weights of the model.
TRAINING_FOLDER = "training_state"
VALUE_HEAD_FILE = "value_head.safetensors"
CRITIC_FILE = "critic.safetensors"


def latest_checkpoint(checkpoints: Path) -> Path | None:
    """Return the finished checkpoint with the highest iteration, or None."""
    folders = [path for path in _folders(checkpoints) if is_whole(path)]
    return folders[-1] if folders else None


def is_whole(checkpoint: Path) -> bool:
    return (checkpoint / STATE_FILE).exists()


def newest_folder(checkpoints: Path) -> Path | None:
    """Return the folder with the highest iteration, even if its checkpoint is damaged."""
    return next(reversed(_folders(checkpoints)), None)


def best_checkpoint(checkpoints: Path) -> Path | None:
    """Return the checkpoint with the best evaluation, or the latest if none was evaluated."""
    mark = best_mark(checkpoints)
    return latest_checkpoint(checkpoints) if mark is None else mark.folder


class BestMark(NamedTuple):
    """The content of best.json: a checkpoint, and the mean outcome of its evaluation."""

    folder: Path
    score: float


def best_mark(checkpoints: Path) -> BestMark | None:
    """Return the mark of the best checkpoint; None if there is no mark or its checkpoint is gone."""
    try:
        if (checkpoints / _MARK).exists():
            stored = json.loads((checkpoints / _MARK).read_bytes())
            name, score = str(stored["checkpoint"]), stored["outcome_reward"]
        else:  # in older runs `best` is a text file
            name, score = (checkpoints / BEST).read_text(encoding="utf-8").split()
        mark = BestMark(checkpoints / name, float(score))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return mark if is_whole(mark.folder) else None


def find_run(folder: Path) -> Path | None:
    """Return the run directory if `folder` is one, or is a checkpoint inside one."""
    candidates = (folder, folder.parent.parent)
    return next((path for path in candidates if (path / "run.json").exists()), None)


def model_in(folder: Path) -> Path:
    """Return the model folder that a user's path means: a run's best checkpoint, or the folder itself."""
    if find_run(folder) != folder:
        # The link is resolved, so that errors and files name the iteration.
        return folder.parent / os.readlink(folder) if folder.name == BEST and folder.is_symlink() else folder
    best = best_checkpoint(folder / "checkpoints")
    if best is None:
        raise RunDirectoryError(f"{folder} has no checkpoint yet")
    return best


def mark_best(mark: BestMark) -> None:
    """Mark a checkpoint as the best. The score is stored too, since the evaluation's metrics can be lost."""
    stored = {"checkpoint": mark.folder.name, "outcome_reward": mark.score}
    replace_text(mark.folder.parent / _MARK, json.dumps(stored) + "\n")
    link_best(mark.folder.parent)


def link_best(checkpoints: Path) -> None:
    """Make the symbolic link `best` point to the best checkpoint, for other programs.

    Turnwise itself reads best.json, because some disks, such as a mounted bucket, have no links.
    """
    best, link = best_checkpoint(checkpoints), checkpoints / BEST
    if best is None or (link.is_symlink() and os.readlink(link) == best.name):
        return
    with write_errors(link):
        aside = link.with_name(f".{BEST}.tmp")
        aside.unlink(missing_ok=True)
        try:
            os.symlink(best.name, aside)  # relative: a run may be moved
        except OSError as error:
            if error.errno in NO_LINKS:
                return
            raise
        if not link.is_symlink() and is_whole(link):  # a folder, in a copy that followed links
            shutil.rmtree(link)
        os.replace(aside, link)


def prune_checkpoints(checkpoints: Path, keep: int, *, stays: Callable[[int], bool]) -> None:
    """Delete checkpoints except the newest, the best, iteration_0 (the start of RL), and the last `keep`.

    The last `keep` are counted among the checkpoints for whose iteration `stays` returns True.
    """
    folders = _folders(checkpoints)
    rest = [folder for folder in folders if stays(read_iteration(folder))][-keep:]
    rest += [folder for folder in (best_checkpoint(checkpoints), latest_checkpoint(checkpoints)) if folder]
    for folder in folders:
        if folder not in rest and read_iteration(folder) > 0:
            with write_errors(folder):
                # A kill during the deletion must not leave half a checkpoint under a valid name.
                os.replace(folder, folder.with_name(f".{folder.name}.gone"))
    for folder in checkpoints.glob(".iteration_*.gone"):
        with write_errors(folder):
            shutil.rmtree(folder)


def whole_checkpoints(checkpoints: Path) -> list[tuple[int, Path]]:
    """List the finished checkpoints with their iterations, oldest first."""
    return [(read_iteration(folder), folder) for folder in _folders(checkpoints) if is_whole(folder)]


def _folders(checkpoints: Path) -> list[Path]:
    """List the checkpoint folders, oldest first. A user's copies (iteration_5_backup) are left out."""
    ours = [path for path in checkpoints.glob("iteration_*") if path.name[10:].isdecimal()]
    return sorted(ours, key=read_iteration)


def read_iteration(folder: Path) -> int:
    return int(folder.name.rpartition("_")[2])
