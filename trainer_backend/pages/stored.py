"""Stored rollouts for the pages: read from Parquet files, and replayed on a task app for their pictures."""

import asyncio
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import httpx
from pydantic import SecretStr

from shared_schemas.messages import ToolCall
from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import StepData, Trajectory
from trainer_backend.collect.client import TaskAppClient
from trainer_backend.collect.sources import row_of
from trainer_backend.collect.task_apps import task_apps
from trainer_backend.collect.wire import TaskAppLost
from trainer_backend.errors import RunDirectoryError, TaskAppError
from trainer_backend.job.schema import JobConfig
from trainer_backend.job.tables import ServicesTable
from trainer_backend.rundir.layout import open_run
from trainer_backend.rundir.rollout_files import read_decisions, read_rollout

# Pictures of a recorded episode: a task app plays it again, decision by decision, and draws.
#
# Environments are reproducible, so seed and tool calls are enough. Every decision is held against the
# record;
# a replay that departs from it is refused, because its pictures would show another episode.

FRAME_SIDE = 144  # Crafter's textures are 16 pixels wide and 9 cells fill a side: nothing is lost or blurred


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
    with tempfile.TemporaryDirectory() as folder:
        async with task_apps(job, Path(folder) / "task_app.log") as apps:
            for client in apps[:-1]:
                with suppress(TaskAppLost):  # the next one plays it from its beginning
                    return await _replay(job, client, episode, turns)
            return await _replay(job, apps[-1], episode, turns)


async def _replay(
    job: JobConfig, client: TaskAppClient, episode: Trajectory, turns: Collection[int]
) -> list[Frame]:
    timeout_s = job.services.request_timeout_s
    return await replay(client, episode, turns, config=job.rollout.env_config, timeout_s=timeout_s)


async def replay(
    client: TaskAppClient,
    episode: Trajectory,
    turns: Collection[int],
    *,
    config: Mapping[str, Any],
    timeout_s: float,
) -> list[Frame]:
    """Play the episode again up to the last of `turns`; a frame after each of them.

    Raises:
        NoPictures: nothing is drawn there, or the replay departs from the record.
        TaskAppError: a request failed.
    """
    wanted = frozenset(turns)
    frames = []
    async with EnvironmentClient(
        client.url, client.api_key, env_name=episode.env_name, config=config, seed=episode.seed,
        timeout_s=timeout_s, name=client.name,
    ) as environment:  # fmt: skip
        if 0 in wanted:
            frames.append(Frame(0, await environment.frame(FRAME_SIDE)))
        for step in episode.steps[: max(wanted, default=0)]:
            # An invalid decision ran one no-op, which is also what no call at all runs.
            calls = () if step.step_info.invalid_reason is not None else step.tool_calls
            _compare(step, await environment.step(calls))
            if step.turn in wanted:
                frames.append(Frame(step.turn, await environment.frame(FRAME_SIDE)))
    return frames


def _compare(step: StepData, answer: Mapping[str, Any]) -> None:
    after = step.next_observation or step.observation_data
    executed = tuple(answer["info"]["executed_actions"])
    counts = answer["observation"]["achievements_counts"]
    if executed != step.step_info.executed_actions or counts != after.achievements_counts:
        raise NoPictures(f"the replay departed from the recorded episode at decision {step.turn}")


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


_NOT_FOUND = 404


class NoPictures(TaskAppError):
    """An episode has no pictures, and a retry would not change that."""

    code = "no_pictures"


class EnvironmentClient:
    """Use as an async context manager: it creates the environment, and terminates it at the end.

    Args:
        url, api_key, name: of the task app, as its TaskAppClient has them.
        env_name, config, seed: what to create.
        timeout_s: deadline of one request.
    """

    def __init__(
        self, url: str, api_key: SecretStr, *, env_name: str, config: Mapping[str, Any], seed: int,
        timeout_s: float, name: str = "",
    ) -> None:  # fmt: skip
        self._url = url
        self._wanted = {"env_name": env_name, "config": dict(config), "seed": seed}
        headers = {"X-API-Key": api_key.get_secret_value()} | ({"Host": name} if name else {})
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout_s)
        # Whom a certificate must be for, where that is not the host of the URL.
        self._extensions = {"sni_hostname": name.rpartition(":")[0]} if name else {}
        self._env_id = ""

    async def __aenter__(self) -> Self:
        try:
            self._env_id = (await self._post("/env/create", self._wanted))["env_id"]
        except BaseException:
            await self._http.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                await self._post("/env/terminate", {"env_id": self._env_id})
        finally:
            await self._http.aclose()

    async def step(self, calls: Sequence[ToolCall]) -> dict[str, Any]:
        """Carry out one decision and return the reply of POST /env/step.

        Raises:
            TaskAppLost: the task app does not answer, or fails internally; another one may work.
        """
        wire = [call.model_dump(mode="json") for call in calls]
        return await self._post("/env/step", {"env_id": self._env_id, "tool_calls": wire})

    async def frame(self, side: int) -> bytes:
        """A PNG of `side` x `side` pixels.

        Raises:
            NoPictures: the environment, or this task app, draws none.
            TaskAppError: another request failed.
        """
        path = f"/env/{self._env_id}/frame"
        reply = await self._send("GET", path, params={"width": side, "height": side})
        if reply.status_code == _NOT_FOUND:
            raise NoPictures(f"{self._url} draws no pictures of this environment")
        self._check("GET", path, reply)
        return reply.content

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        reply = await self._send("POST", path, json=dict(body))
        self._check("POST", path, reply)
        try:
            return dict(reply.json())
        except ValueError as error:
            raise TaskAppError(f"{self._url}: POST {path} did not answer with JSON: {error}") from error

    async def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            return await self._http.request(method, path, extensions=self._extensions, **options)
        except httpx.HTTPError as error:
            told = str(error) or type(error).__name__
            raise TaskAppLost(f"{self._url}: {method} {path}: {told}") from error

    def _check(self, method: str, path: str, reply: httpx.Response) -> None:
        if reply.is_error:
            told = f"status {reply.status_code}: {reply.text[:200]}"
            raise (TaskAppLost if reply.is_server_error else TaskAppError)(
                f"{self._url}: {method} {path}: {told}"
            )
