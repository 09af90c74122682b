"""Stored rollouts for the pages: read from Parquet files, and replayed on a task app for their pictures."""

import asyncio
import base64
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Generic, TypeVar

from shared_schemas.replay import ReplayRequest, ReplayTurn
from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import Trajectory
from trainer_backend.collect.client import TaskAppClient
from trainer_backend.collect.sources import row_of
from trainer_backend.collect.task_apps import task_apps
from trainer_backend.collect.wire import NoPictures, TaskAppLost
from trainer_backend.errors import RunDirectoryError
from trainer_backend.job.schema import JobConfig
from trainer_backend.job.tables import ServicesTable
from trainer_backend.rundir.layout import open_run
from trainer_backend.rundir.rollout_files import read_decisions, read_rollout


@dataclass(frozen=True, slots=True)
class Frame:
    """A picture after a decision; `turn` 0 is the start of the episode."""

    turn: int
    png: bytes


FrameSource = Callable[[JobConfig, Trajectory, Collection[int]], Sequence[Frame]]


def played_frames(job: JobConfig, episode: Trajectory, turns: Collection[int]) -> Sequence[Frame]:
    """Frames after the given turns, from the job's task app (its own child process, or [services]).

    Blocks, and needs a thread without a running event loop.

    Raises:
        TrainerError: no task app, no pictures there, or a replay that departs from the record.
    """
    return asyncio.run(_with_task_app(job, episode, turns))


async def _with_task_app(job: JobConfig, episode: Trajectory, turns: Collection[int]) -> list[Frame]:
    config = job.rollout.env_config
    with tempfile.TemporaryDirectory() as folder:
        async with task_apps(job, Path(folder) / "task_app.log") as apps:
            for client in apps[:-1]:
                with suppress(TaskAppLost):  # another task app can draw it too
                    return await replay(client, episode, turns, config=config)
            return await replay(apps[-1], episode, turns, config=config)


async def replay(
    client: TaskAppClient, episode: Trajectory, turns: Collection[int], *, config: Mapping[str, Any]
) -> list[Frame]:
    """Let a task app play the episode again up to the last of `turns`; a frame after each of them.

    Raises:
        NoPictures: the environment draws none, or the replay departs from the record.
        TaskAppError: the request failed.
    """
    record = ReplayRequest(
        env_name=episode.env_name, config=dict(config), seed=episode.seed,
        turns=tuple(ReplayTurn.of(step) for step in episode.steps[: max(turns)]), frames=tuple(turns),
    )  # fmt: skip
    frames = await client.replay(record)
    return [Frame(frame.turn, base64.b64decode(frame.png)) for frame in frames]


_KEPT = 12  # episodes; a frame is some three kilobytes, and an episode has fifty


def can_be_drawn(rollout: Rollout) -> bool:
    """Whether a task app could play it again: a world of a seed, of an environment that has pictures."""
    episode = rollout.trajectory
    return bool(
        episode
        and episode.achievements_counts
        and episode.parent_rollout_id is None
        and row_of(rollout.group_id) is None
    )


class Frames:
    """Draws episodes, one at a time, and keeps the last few.

    Args:
        source: draws the turns of an episode; by default a task app that is started for it does.
    """

    def __init__(self, source: FrameSource = played_frames) -> None:
        self._source = source
        self._kept: Kept[Mapping[int, bytes] | str] = Kept(_KEPT)
        self._one_at_a_time = asyncio.Lock()

    def known(self, run_dir: Path, rollout: Rollout) -> Mapping[int, bytes] | str | None:
        """Return the cached pictures, or the sentence why there are none; None: `of` would replay."""
        return self._kept.known((str(run_dir), rollout.rollout_id))

    async def of(self, run_dir: Path, rollout: Rollout) -> Mapping[int, bytes]:
        """By turn a PNG of what the game showed after it; turn 0 is the start.

        Only the replay has a thread: who waits for one holds none of those that make the other pages.

        Raises:
            NoPictures: nothing is drawn there, or the replay departs from the record; it is not played again.
            TrainerError: no task app.
        """
        key = (str(run_dir), rollout.rollout_id)
        async with self._one_at_a_time:  # a page asks for several frames at once, and they are one replay
            found = await asyncio.to_thread(self._kept.get, key, lambda: self._drawn(run_dir, rollout))
        if isinstance(found, str):
            raise NoPictures(found)
        return found

    def _drawn(self, run_dir: Path, rollout: Rollout) -> Mapping[int, bytes] | str:
        episode = rollout.trajectory
        if episode is None:
            return {}
        turns = range(len(episode.steps) + 1)
        job = _by_itself(open_run(run_dir).job())
        try:
            return {frame.turn: frame.png for frame in self._source(job, episode, turns)}
        except NoPictures as error:
            return str(error)


def _by_itself(job: JobConfig) -> JobConfig:
    """Return the job with its own task app, which has only built-in plug-ins.

    A viewer of a run must neither run the code that its job names nor send a key to a host that it names.
    """
    talking = job.multi_turn.model_copy(update={"interaction_config_path": None})
    return job.model_copy(update={"services": ServicesTable(), "multi_turn": talking})


# The last few rollouts are kept in memory, since a reader turns from decision to decision.

Value = TypeVar("Value")


class Kept(Generic[Value]):
    """A thread-safe cache of the `most` last used values; two threads may make one value twice."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self._lock = Lock()

    def known(self, key: Hashable) -> Value | None:
        """Return the value of a key, None if it is not in the cache."""
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
