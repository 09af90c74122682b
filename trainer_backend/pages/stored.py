"""Reads stored rollouts from Parquet files for the pages, and lets task apps draw pictures of them."""

import asyncio
import base64
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from cachetools import LRUCache

from shared_schemas.prefixes import PREFIXES
from shared_schemas.replay import ReplayRequest, ReplayTurn
from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import Trajectory
from trainer_backend.collect.client import TaskAppClient
from trainer_backend.collect.sources import read_row_id
from trainer_backend.collect.task_apps import task_apps
from trainer_backend.collect.wire import NoPictures, Refused, ReplayDeparts, TaskAppLost
from trainer_backend.errors import RunDirectoryError
from trainer_backend.job.tables import ServicesTable
from trainer_backend.rundir.layout import open_run
from trainer_backend.rundir.rollout_files import read_decisions, read_rollout

# A function that draws pictures of an episode, and returns them as PNG by turn; turn 0 is the start.
FrameSource = Callable[[ServicesTable, Mapping[str, Any], Trajectory, Collection[int]], Mapping[int, bytes]]


def played_frames(
    services: ServicesTable, config: Mapping[str, Any], episode: Trajectory, turns: Collection[int]
) -> dict[int, bytes]:
    """Return the frames after the given turns as PNG, drawn by a task app that replays the episode.

    The task app is one of those in [services]; if there are none, a child process is started. Call this on a
    thread without an event loop, because it blocks. If it raises NoPictures, a retry would fail too.
    """

    async def frames() -> dict[int, bytes]:
        with tempfile.TemporaryDirectory() as folder:
            async with task_apps(services, Path(folder) / "task_app.log") as apps:
                for client in apps.serving[:-1]:
                    with suppress(TaskAppLost):  # try the next task app
                        return await replay(client, episode, turns, config=config)
                return await replay(apps.serving[-1], episode, turns, config=config)

    return asyncio.run(frames())


async def replay(
    client: TaskAppClient, episode: Trajectory, turns: Collection[int], *, config: Mapping[str, Any]
) -> dict[int, bytes]:
    """Let a task app replay the episode, and return the frame after each of the turns as PNG.

    Raises:
        ReplayDeparts: the replay differs from the record.
        NoPictures: the environment draws no pictures.
        TaskAppError: any other error.
    """
    recorded = [ReplayTurn.of(step) for step in episode.steps[: max(turns)]]
    if not episode.achievements_counts:
        # Without counters of achievements, all actions and rewards may be equal: also compare the results.
        results = [step.step_info.tool_result for step in episode.steps]
        recorded = [
            turn.model_copy(update={"result": result})
            for turn, result in zip(recorded, results, strict=False)
        ]
    record = ReplayRequest(
        env_name=episode.env_name, config=dict(config), seed=episode.seed, turns=tuple(recorded),
        frames=tuple(turns),
    )  # fmt: skip
    try:
        frames = await client.replay(record)
    except ReplayDeparts:
        raise
    except NoPictures as error:
        raise NoPictures(_draws_none(episode.env_name)) from error
    return {frame.turn: base64.b64decode(frame.png) for frame in frames}


_CACHED = 40  # episodes (some fifty frames of 3 kB each) and environments that draw nothing
# Names of environments, and prefixes of names, that draw nothing: no task app is started for them.
WORDS = ("dialogue", "documents", "orders")
PREFIXES_OF_WORDS = ("agent:", *(f"{name}:" for name, prefix in PREFIXES.items() if not prefix.draws))


def why_undrawn(rollout: Rollout) -> str:
    """Return the reason why no task app can draw an episode, or an empty text if it may be possible."""
    episode, row = rollout.trajectory, read_row_id(rollout.group_id)
    if episode is None:
        return "the rollout has no episode"
    if row is not None:
        return f"the episode began at row {row!r} of the data set; only those of seeds can be played again"
    if episode.parent_rollout_id is not None:
        return (
            f"the episode began at a snapshot of rollout {episode.parent_rollout_id}, which is not kept; "
            "only episodes that began at their seed can be played again"
        )
    if episode.env_name in WORDS or episode.env_name.startswith(PREFIXES_OF_WORDS):
        return _draws_none(episode.env_name)
    return ""


def _draws_none(env_name: str) -> str:
    return (
        f"{env_name!r} draws none; pictures come from environments with frame(width, height), and from those "
        'of gymnasium with the render mode "rgb_array" unless env_config has text = "ansi"'
    )


class Frames:
    """Draws the frames of episodes, one episode at a time, and caches the frames of the last episodes.

    `source` draws the frames of an episode, by default with a new task app. `may_run` decides which files of
    a job's `task_plugins` this task app may load; by default it may load none.
    """

    def __init__(
        self, source: FrameSource = played_frames, *, may_run: Callable[[Path], bool] = lambda file: False
    ) -> None:
        self._source, self._may_run = source, may_run
        self._cache: LRUCache[tuple[str, str, int], Mapping[int, bytes] | str] = LRUCache(_CACHED)
        self._guard = Lock()  # of the cache
        self._lock = asyncio.Lock()

    def cached(self, run_dir: Path, rollout: Rollout) -> Mapping[int, bytes] | str | None:
        """Return the cached frames, or the cached reason why there are none; None if nothing is cached."""
        keys = (str(run_dir), rollout.rollout_id, 0), _environment(run_dir, rollout)
        with self._guard:
            return next((self._cache[key] for key in keys if key in self._cache), None)

    async def of(self, run_dir: Path, rollout: Rollout) -> Mapping[int, bytes]:
        """Return the pictures of an episode as PNG by turn; turn 0 is the start of the episode.

        Raises:
            NoPictures: the episode has no pictures. The reason is cached, so later requests do not replay it.
            TrainerError: no task app could be started or asked. A later request tries again.
        """
        # A page requests several frames at once. The first request draws all of them with one replay. The
        # others wait for the lock, which occupies no thread.
        async with self._lock:
            frames = await asyncio.to_thread(self.cached, run_dir, rollout)
            if frames is None:
                key = str(run_dir), rollout.rollout_id, 0
                try:
                    frames = await asyncio.to_thread(self._draw, run_dir, rollout)
                except NoPictures as error:  # the reason holds for every episode of the environment
                    key, frames = _environment(run_dir, rollout), str(error)
                with self._guard:
                    self._cache[key] = frames
        if isinstance(frames, str):
            raise NoPictures(frames)
        return frames

    def _draw(self, run_dir: Path, rollout: Rollout) -> Mapping[int, bytes] | str:
        if reason := why_undrawn(rollout):
            return reason
        episode = rollout.trajectory
        assert episode is not None, "why_undrawn has refused it"
        named = open_run(run_dir).job()
        # Viewing a run must not execute code of another user's job, nor send a key to a host that it names.
        plugins = tuple(file for file in named.services.task_plugins if self._may_run(file))
        own = ServicesTable(task_plugins=plugins)
        try:
            return self._source(own, named.rollout.env_config, episode, range(len(episode.steps) + 1))
        except ReplayDeparts as error:
            return str(error)
        except Refused as error:
            left_out = sorted({*named.services.task_plugins} - {*plugins})
            return _why_refused(error, episode.env_name, left_out)


def _environment(run_dir: Path, rollout: Rollout) -> tuple[str, str, int]:
    """Return the cache key of a run's environment. The key changes when the file job.toml is replaced."""
    job = run_dir / "job.toml"
    name = rollout.trajectory.env_name if rollout.trajectory is not None else ""
    return str(run_dir), name, job.stat().st_mtime_ns if job.exists() else 0


def _why_refused(error: Refused, env_name: str, left_out: Sequence[Path]) -> str:
    """Return the reason why the task app that draws for the pages refuses an episode."""
    if left_out:
        return (
            f"{env_name!r} comes from {', '.join(map(str, left_out))}, and a page runs code from the folders "
            f"of --allow-root alone: turnwise trainer --allow-root {left_out[0].parent}"
        )
    hint = f"; {error.finding.hint}" if error.finding.hint else ""
    return f"the task app of this page cannot play {env_name!r}: {error.finding.detail}{hint}"


StoredRollout = tuple[Rollout, list[dict[str, Any]]]


def read_stored(path: Path, rollout_id: str) -> StoredRollout:
    """Return a rollout, and the stored columns of each of its decisions. A failed rollout has no columns."""
    try:
        return _read(path, path.stat().st_mtime_ns, rollout_id)
    except (OSError, RunDirectoryError) as error:
        raise RunDirectoryError(
            f"{path} cannot be read for rollout {rollout_id}: {error}",
            hint="Were the files of this run moved or removed?",
        ) from error


@lru_cache(maxsize=8)  # a reader looks at one decision of an episode after another
def _read(path: Path, modified_ns: int, rollout_id: str) -> StoredRollout:
    return read_rollout(path, rollout_id), read_decisions(path, rollout_id)
