"""Pictures of a recorded episode: a task app plays it again, decision by decision, and draws.

Environments are reproducible, so seed and tool calls are enough. Every decision is held against the record;
a replay that departs from it is refused, because its pictures would show another episode.
"""

import asyncio
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared_schemas.trajectory import StepData, Trajectory
from trainer_backend.collect.answers import TaskAppLost
from trainer_backend.collect.client import TaskAppClient
from trainer_backend.collect.environment_client import EnvironmentClient, NoPictures
from trainer_backend.jobfile.schema import JobConfig
from trainer_backend.services.task_apps import task_apps

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
