"""The same rows as files and folders of every layout, written with pyarrow alone."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Rows = Sequence[Mapping[str, Any]]


def jsonl(path: Path, rows: Rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def parquet(path: Path, rows: Rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=2)
    return path


def saved(folder: Path, rows: Rows, *, split: str | None, shards: int = 2) -> Path:
    """As `Dataset.save_to_disk` leaves a folder (datasets 2 to 4)."""
    folder.mkdir(parents=True)
    names = [f"data-{shard:05d}-of-{shards:05d}.arrow" for shard in range(shards)]
    table = pa.Table.from_pylist(list(rows))
    size = -(-len(rows) // shards)
    for shard, name in enumerate(names):
        part = table.slice(shard * size, size)
        with pa.ipc.new_stream(str(folder / name), table.schema) as stream:
            stream.write_table(part, max_chunksize=3)
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "0123456789abcdef",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": split,
    }
    (folder / "state.json").write_text(json.dumps(state))
    info = {"citation": "", "description": "", "features": None, "homepage": "", "license": ""}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return folder


def saved_dict(folder: Path, splits: Mapping[str, Rows]) -> Path:
    """As `DatasetDict.save_to_disk` leaves it."""
    for name, rows in splits.items():
        saved(folder / name, rows, split=name)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    return folder
