"""Single rollouts from a run's Parquet files, the last few kept: pages turn from decision to decision."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Generic, TypeVar

from shared_schemas.rollouts import Rollout
from trainer_backend.errors import RunDirectoryError
from trainer_backend.rundir.rollout_files import read_decisions, read_rollout

Value = TypeVar("Value")


class Kept(Generic[Value]):
    """The `most` values that were asked for last; safe from many threads, two of which may make one twice."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self._lock = Lock()

    def known(self, key: Hashable) -> Value | None:
        """What is kept of a key; None where nothing is."""
        with self._lock:
            return self._values.get(key)

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of a key, made where it is not kept; what `make` raises is kept by nobody."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = make()
        with self._lock:
            self._values[key] = value
            while len(self._values) > self._most:
                self._values.popitem(last=False)
        return value


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """A rollout as it was collected, and the columns of its decisions; empty where it has none."""

    rollout: Rollout
    columns: list[dict[str, Any]]


class StoredRollouts:
    """Reads rollouts, and keeps the last few."""

    def __init__(self, most: int = 8) -> None:
        self._kept: Kept[StoredRollout] = Kept(most)

    def read(self, path: Path, rollout_id: str) -> StoredRollout:
        """
        Raises:
            RunDirectoryError: the file is gone, or is none of ours, or holds no such rollout.
        """
        try:
            key = (str(path), path.stat().st_mtime_ns, rollout_id)
            return self._kept.get(key, lambda: _read(path, rollout_id))
        except (OSError, RunDirectoryError) as error:
            raise RunDirectoryError(
                f"{path} cannot be read for rollout {rollout_id}: {error}",
                hint="Were the files of this run moved or removed?",
            ) from error


def _read(path: Path, rollout_id: str) -> StoredRollout:
    return StoredRollout(read_rollout(path, rollout_id), read_decisions(path, rollout_id))
