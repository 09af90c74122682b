"""Digests that show whether a checkpoint's files have changed since they were written.

They detect errors of disks and copies, not attacks, so the cheap crc32 is enough. Threads compute the digests
of a file while the next file is written, so that saving takes no longer.
"""

import json
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from trainer_backend.errors import CheckpointError
from trainer_backend.rundir.checkpoint_paths import TRAINING_FOLDER, read_iteration, whole_checkpoints
from trainer_backend.rundir.files import flush

FILE = "digests.json"
# Bytes of a file that each crc32 covers.
_PIECE_BYTES = 64 * 2**20
_READ_BYTES = 2**20
_THREADS = 4


class Digests:
    """Computes digests of files in a folder, and flushes these files, while other files are being written."""

    def __init__(self, folder: Path, pool: ThreadPoolExecutor) -> None:
        self._folder, self._pool = folder, pool
        self._pieces: dict[str, list[Future[str]]] = {}
        self._flushes: list[Future[None]] = []

    def take(self) -> None:
        """Start to compute digests of files that are new since the last call. They must be complete."""
        for path in sorted(self._folder.rglob("*")):
            name = path.relative_to(self._folder).as_posix()
            if path.is_file() and name not in self._pieces:
                self._pieces[name] = _pieces(path, self._pool)
                self._flushes.append(self._pool.submit(flush, path))

    def write(self) -> None:
        """Write digests.json and flush the folder. Call it when all other files in it are complete."""
        self.take()
        crc32 = {name: [piece.result() for piece in pieces] for name, pieces in self._pieces.items()}
        for pending in self._flushes:
            pending.result()
        path = self._folder / FILE
        path.write_text(json.dumps({"piece_bytes": _PIECE_BYTES, "crc32": crc32}), encoding="utf-8")
        for part in (path, *(path for path in self._folder.rglob("*") if path.is_dir()), self._folder):
            flush(part)


def read_digest(checkpoint: Path) -> str | None:
    """Return one digest for all weights of a model checkpoint, adapters included; None without digests."""
    try:
        crc32 = json.loads((checkpoint / FILE).read_text(encoding="utf-8"))["crc32"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    weights = [
        f"{name} {_as_text(pieces)}"
        for name, pieces in sorted(crc32.items())
        if name.endswith(".safetensors") and not name.startswith(f"{TRAINING_FOLDER}/")
    ]
    return f"{zlib.crc32(' '.join(weights).encode()):08x}"


@contextmanager
def collect_digests(folder: Path) -> Iterator[Digests]:
    """Yield a `Digests` for a folder that is being written. Its threads end with the context."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="turnwise-digests") as pool:
        yield Digests(folder, pool)


def refuse_damaged(checkpoint: Path) -> None:
    """Raise CheckpointError if the checkpoint is damaged. The error tells how to use an older one."""
    damage = find_damage(checkpoint)
    if damage is None:
        return
    hint, run = "No older one is whole: put a copy of it back, or begin a new run.", checkpoint.parent.parent
    for iteration, folder in reversed(whole_checkpoints(checkpoint.parent)):
        if iteration < read_iteration(checkpoint) and find_damage(folder) is None:
            hint = (
                f"{folder.name} is whole. To go on from there: `mv {checkpoint} {checkpoint}_damaged`, then "
                f"`turnwise train --resume {run}`, which does again what came after iteration {iteration}."
            )
            break
    raise CheckpointError(f"the checkpoint is damaged: {damage}", where=str(checkpoint), hint=hint)


def find_damage(checkpoint: Path) -> str | None:
    """Describe the first file that is missing or differs from its digest; None if there is none."""
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
                return (
                    f"{name} has the crc32 {_as_text(now)}, and had {_as_text(expected)} when it was written"
                )
    return None


def _as_text(pieces: Sequence[str]) -> str:
    """Combine the digests of a file's pieces into one digest."""
    return pieces[0] if len(pieces) == 1 else f"{zlib.crc32(''.join(pieces).encode()):08x}"


def _pieces(path: Path, pool: ThreadPoolExecutor, piece_bytes: int = _PIECE_BYTES) -> list[Future[str]]:
    starts = range(0, path.stat().st_size, piece_bytes)
    return [pool.submit(_crc32, path, start, piece_bytes) for start in starts]


def _crc32(path: Path, start: int, length: int) -> str:
    value, rest = 0, length
    with path.open("rb") as file:
        file.seek(start)
        while data := file.read(min(_READ_BYTES, rest)):
            value, rest = zlib.crc32(data, value), rest - len(data)
    return f"{value:08x}"
