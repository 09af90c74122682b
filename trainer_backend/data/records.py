"""Reads the rows of a JSONL, Parquet or Arrow file as dictionaries of columns."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from shared_schemas.json_text import each_key_once
from shared_schemas.plain_text import decode_text
from trainer_backend.errors import DataError


class Record(NamedTuple):
    where: str  # the file and the line or row, for error messages
    columns: Mapping[str, Any]


def read_records(path: Path) -> Iterator[Record]:
    """Yield the rows of a file in order. The suffix of its name determines the format."""
    reader = READERS.get(path.suffix)
    if reader is None:
        raise DataError(f"its name ends in {path.suffix!r}; known: {', '.join(READERS)}", where=str(path))
    try:
        yield from reader(path)
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise DataError(f"cannot be read as {path.suffix[1:]}: {error}", where=str(path)) from error


def _jsonl(path: Path) -> Iterator[Record]:
    """Read one JSON object per line; blank lines are skipped."""
    # Invalid UTF-8 becomes surrogates here, so that decode_text fails at a line that the error can name.
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path}: line {number}"
                try:
                    text = decode_text(line.encode(errors="surrogateescape"))
                except ValueError as error:
                    raise DataError(str(error), where=where) from error
                yield Record(where, _object(text.rstrip(), where))


def _object(line: str, where: str) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    try:
        value = json.loads(line, parse_constant=refuse, object_pairs_hook=each_key_once)
    except json.JSONDecodeError as error:
        raise DataError(f"no JSON: {error.msg}, in column {error.colno}", where=where) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"no JSON: {error}", where=where) from error
    if "\\u" in line:  # perhaps half a surrogate pair, which cannot be encoded to be sent
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise DataError(f"{half} is half a character, which no text can hold", where=where) from error
    if not isinstance(value, dict):
        raise DataError(f"a {type(value).__name__}; a row is a JSON object", where=where)
    return value


def _parquet(path: Path) -> Iterator[Record]:
    with pq.ParquetFile(path) as file:
        yield from _rows(path, file.schema_arrow, file.iter_batches())


def _arrow(path: Path) -> Iterator[Record]:
    """Read the Arrow stream format that `datasets` writes, with one batch at a time in memory."""
    with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
        yield from _rows(path, stream.schema, stream)


def _rows(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Iterator[Record]:
    for name, count in Counter(schema.names).items():
        if count > 1:
            raise DataError(f"has {count} columns {name!r}; each has its own name", where=str(path))
    number = 0
    for batch in batches:
        for columns in batch.to_pylist():
            yield Record(f"{path}: row {number}", columns)
            number += 1


READERS: Mapping[str, Callable[[Path], Iterator[Record]]] = {
    ".jsonl": _jsonl,
    ".parquet": _parquet,
    ".arrow": _arrow,
}
