"""Finds the files of a split: a single file, or a folder as `datasets` or the Hugging Face hub lays it out.

file.jsonl, file.parquet                  all rows belong to the split that the job names
dataset_dict.json, train/, test/          DatasetDict.save_to_disk: one folder per split
state.json, data-00000-of-00001.arrow     Dataset.save_to_disk: one split, named in state.json
train.jsonl, test-00000-of-00002.parquet  a repository of the hub, which may have these files in data/
train/0000.parquet, test/0000.parquet     a hub repository that was converted to Parquet
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from shared_schemas.base import did_you_mean, shown
from shared_schemas.plain_text import read_text
from trainer_backend.data.records import READERS
from trainer_backend.errors import DataError

_SHARD = re.compile(r"(?P<split>.+)-\d{5}-of-\d{5}")
# Names of the files in a folder that is one split: numbers, or the names that `datasets` gives.
_DATA_NAME = re.compile(r"\d+|data(-\d{5}-of-\d{5})?|part[-.].*")

Splits = Mapping[str, Sequence[Path]]


def find_files(path: Path, split: str) -> Sequence[Path]:
    """Return the files of a split, in order."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"no such file or folder{suggest_path(path, Path.exists)}", where=str(path))
    splits = _splits(path, split)
    if split not in splits:
        raise DataError(f"has no split {split!r}{did_you_mean(split, splits)}", where=str(path))
    formats = sorted({file.suffix for file in splits[split]})
    if len(formats) > 1:
        raise DataError(f"split {split!r} is there as {' and as '.join(formats)}; keep one", where=str(path))
    return splits[split]


def suggest_path(path: Path, kind: Callable[[Path], bool]) -> str:
    """Return `". Did you mean 'x'?"` if the folder of `path` contains a similar name, or else an empty text.

    Only paths for which `kind` returns True are suggested.
    """
    try:
        others = [other.name for other in path.parent.iterdir() if kind(other)]
    except OSError:
        others = []
    close = get_close_matches(path.name, others, n=1)
    return f". Did you mean {str(path.with_name(close[0]))!r}?" if close else ""


def _splits(folder: Path, split: str) -> Splits:
    if (folder / "dataset_dict.json").is_file():
        names = _json(folder / "dataset_dict.json").get("splits")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise DataError("has no list `splits` of names", where=str(folder / "dataset_dict.json"))
        return {name: _dataset_files(_inside(folder, name, folder / "dataset_dict.json")) for name in names}
    if (folder / "state.json").is_file():
        name = _json(folder / "state.json").get("_split")
        return {str(name or split): _dataset_files(folder)}
    splits = _by_name(folder) or _by_name(folder / "data") or dict(_by_folder(folder))
    if not splits:
        raise DataError(f"holds no data; known: {', '.join(READERS)}, by split", where=str(folder))
    return splits


def _dataset_files(folder: Path) -> Sequence[Path]:
    """Return the files that Dataset.save_to_disk wrote, in the order in which its state.json lists them."""
    state = folder / "state.json"
    if not state.is_file():
        raise DataError("is missing; the folder is not as `save_to_disk` left it", where=str(state))
    document = _json(state)
    if document.get("_indices_data_files") or document.get("_indices_files"):
        raise DataError("picks rows by an index of its own; save it again with datasets>=2", where=str(state))
    try:
        names = [entry["filename"] for entry in document["_data_files"]]
    except (KeyError, TypeError) as error:
        raise DataError("has no list `_data_files` of file names", where=str(state)) from error
    return [_inside(folder, name, state) for name in names]


def _inside(folder: Path, name: Any, where: Path) -> Path:
    """Return the path of the entry `name` of the folder; refuse a name that leads out of the folder.

    `where` is the file that contains the name, for the error.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or set(name) & {"/", "\0"}:
        raise DataError(f"names {shown(name)}, which is no name of a file in its folder", where=str(where))
    return folder / name


def _by_name(folder: Path) -> dict[str, list[Path]]:
    splits: dict[str, list[Path]] = {}
    for file in _data_files(folder):
        match = _SHARD.fullmatch(file.stem)
        splits.setdefault(match["split"] if match else file.stem, []).append(file)
    return splits


def _by_folder(folder: Path) -> Iterator[tuple[str, list[Path]]]:
    """Yield (split, files) for each subfolder. Refuse a folder whose subfolders are whole data sets."""
    inside = {path: _data_files(path) for path in sorted(folder.iterdir()) if path.is_dir()}
    choices = [path for path, files in inside.items() if any(not _DATA_NAME.fullmatch(f.stem) for f in files)]
    choices += [path for path in inside if (path / "dataset_dict.json").is_file()]
    if choices:
        names = ", ".join(path.name for path in choices)
        raise DataError(
            f"holds several data sets ({names})", where=str(folder), hint=f"Did you mean {str(choices[0])!r}?"
        )
    for path, files in inside.items():
        if files:
            yield path.name, files


def _data_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in READERS)


def _json(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(read_text(path))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read: {error}", where=str(path)) from error
    if not isinstance(value, dict):
        raise DataError(f"is a {type(value).__name__}; it is a JSON object", where=str(path))
    return value
