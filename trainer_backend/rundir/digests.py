"""Digests of a checkpoint's files: is each of them still what was written?

Against disks and copies that change or lose bytes, not against people: crc32, which sees every flipped bit
and costs a fraction of what a cryptographic digest does. A file is taken in pieces, on several threads, while
the next one is still being written, so that the weights of a large model are digested in the time that the
disk needs for them anyhow.
"""

import json
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from trainer_backend.errors import CheckpointError
from trainer_backend.rundir.checkpoint_paths import iteration_of, whole_checkpoints
from trainer_backend.rundir.files import flush

FILE = "digests.json"
# crc32 of how many bytes at a time; also how closely damage is located.
_PIECE_BYTES = 64 * 2**20
_READ_BYTES = 2**20
_THREADS = 4


class Digests:
    """Digests and flushes the files of a folder, each once it is finished."""

    def __init__(self, folder: Path, pool: ThreadPoolExecutor) -> None:
        self._folder, self._pool = folder, pool
        self._pieces: dict[str, list[Future[str]]] = {}
        self._flushed: list[Future[None]] = []

    def take(self) -> None:
        """Begin to digest all new files; every file in the folder must be finished."""
        for path in sorted(self._folder.rglob("*")):
            name = path.relative_to(self._folder).as_posix()
            if path.is_file() and name not in self._pieces:
                self._pieces[name] = _pieces(path, self._pool)
                self._flushed.append(self._pool.submit(flush, path))

    def write(self) -> None:
        """All of the folder is finished: its digests beside it, all of it on disk.

        Raises:
            OSError: a file cannot be read, or not be flushed.
        """
        self.take()
        crc32 = {name: [piece.result() for piece in pieces] for name, pieces in self._pieces.items()}
        for done in self._flushed:
            done.result()
        path = self._folder / FILE
        path.write_text(json.dumps({"piece_bytes": _PIECE_BYTES, "crc32": crc32}), encoding="utf-8")
        for part in (path, *(found for found in self._folder.rglob("*") if found.is_dir()), self._folder):
            flush(part)


@contextmanager
def digests_of(folder: Path) -> Iterator[Digests]:
    """For a folder that is being written; its threads have ended when the context is left."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="turnwise-digests") as pool:
        yield Digests(folder, pool)


def refuse_damaged(checkpoint: Path) -> None:
    """
    Raises:
        CheckpointError: a file is missing, or not what was written; it names the newest older checkpoint that
            is whole, and how to go on from there.
    """
    damage = damage_of(checkpoint)
    if damage is None:
        return
    older = (
        (iteration, folder)
        for iteration, folder in reversed(whole_checkpoints(checkpoint.parent))
        if iteration < iteration_of(checkpoint) and damage_of(folder) is None
    )
    raise CheckpointError(
        f"the checkpoint is damaged: {damage}",
        where=str(checkpoint),
        hint=_way_on(checkpoint, next(older, None)),
    )


def damage_of(checkpoint: Path) -> str | None:
    """The first file that is not as it was written, and how; None where all are."""
    try:
        stored = json.loads((checkpoint / FILE).read_bytes())
        piece_bytes, digests = int(stored["piece_bytes"]), dict(stored["crc32"])
    except FileNotFoundError:
        return f"{FILE} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{FILE} cannot be read: {error}"
    with ThreadPoolExecutor(_THREADS) as pool:
        for name, expected in digests.items():
            path = checkpoint / name
            if not path.is_file():
                return f"{name} is missing"
            now = [piece.result() for piece in _pieces(path, pool, piece_bytes)]
            if now != expected:
                return f"{name} has the crc32 {_shown(now)}, and had {_shown(expected)} when it was written"
    return None


def _way_on(checkpoint: Path, older: tuple[int, Path] | None) -> str:
    if older is None:
        return "No older one is whole: put a copy of it back, or begin a new run."
    iteration, folder = older
    run = checkpoint.parent.parent
    return (
        f"{folder.name} is whole. To go on from there: `mv {checkpoint} {checkpoint}_damaged`, then "
        f"`turnwise train --resume {run}`, which does again what came after iteration {iteration}."
    )


def _shown(pieces: Sequence[str]) -> str:
    """Of many pieces one number."""
    return pieces[0] if len(pieces) == 1 else f"{zlib.crc32(''.join(pieces).encode()):08x}"


def _pieces(path: Path, pool: ThreadPoolExecutor, piece_bytes: int = _PIECE_BYTES) -> list[Future[str]]:
    starts = range(0, path.stat().st_size, piece_bytes)
    return [pool.submit(_crc32, path, start, piece_bytes) for start in starts]


def _crc32(path: Path, start: int, length: int) -> str:
    value, left = 0, length
    with path.open("rb") as file:
        file.seek(start)
        while data := file.read(min(_READ_BYTES, left)):
            value, left = zlib.crc32(data, value), left - len(data)
    return f"{value:08x}"
