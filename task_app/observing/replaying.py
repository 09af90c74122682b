"""A finished rollout played again on a fresh environment, for its pictures, and held against the record.

Environments are reproducible, so seed and tool calls are enough. A replay that departs from the record is
refused: its pictures would show another episode.
"""

import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from PIL import Image

from service_kit.errors import RequestDeadline
from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import StepData, Trajectory
from task_app.episode.actions import tool_request
from task_app.errors import Conflict, InvalidRequest, UnknownId, boundary
from task_app.plugins import PlugBoards
from task_app.protocols import Environment
from task_app.rollouts.results import Record
from task_app.sessions.switches import take_step_rewards

# Pictures of an environment, for people: what can be drawn, PNG of a moment, animated GIF of an episode.

_PALETTE_FROM = 8  # pictures: dawn to night, when an episode is that long
Picture = npt.NDArray[np.uint8]


@runtime_checkable
class Pictured(Protocol):
    """An `Environment` that can be drawn. Drawing changes nothing, and may take milliseconds."""

    def frame(self, width: int, height: int) -> npt.NDArray[np.uint8]:
        """[height, width, 3] RGB picture of the episode as it is now."""


def png(picture: Picture) -> bytes:
    """[height, width, 3] RGB -> a PNG file."""
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG", optimize=True)
    return file.getvalue()


def animated_gif(pictures: Sequence[Picture], *, frame_s: float) -> bytes:
    """Pictures of equal size, shown `frame_s` seconds each, again and again -> a GIF file.

    One palette for all, from a few of the pictures: a palette each would triple the file, and make things
    that stand still flicker.

    Raises:
        ValueError: there is no picture.
    """
    if not pictures:
        raise ValueError("an animated GIF needs at least one picture")
    few = np.concatenate(pictures[:: -(-len(pictures) // _PALETTE_FROM)])
    palette = Image.fromarray(few).quantize(256, dither=Image.Dither.NONE)
    frames = [
        Image.fromarray(picture).quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures
    ]
    file = io.BytesIO()
    duration_ms = round(1_000 * frame_s)
    frames[0].save(
        file, "GIF", save_all=True, append_images=frames[1:], duration=duration_ms, loop=0, disposal=1
    )
    return file.getvalue()


class ReplayDeparts(Conflict):
    code = "replay_departs"


@dataclass(frozen=True, slots=True)
class Replay:
    """An environment in which nothing was played yet, and the episode to play in it."""

    environment: Environment
    episode: Trajectory
    seed: int

    def every(self, at_most: int) -> int:
        """The smallest n so that the start, every n-th decision and the last are at most so many frames."""
        last = len(self.episode.steps)
        return next(n for n in range(1, last + 2) if len(_turns(last, n)) <= max(2, at_most))

    def turns(self, every: int) -> list[int]:
        return _turns(len(self.episode.steps), every)

    def only(self, turn: int) -> list[int]:
        """Raises InvalidRequest when the episode has no such turn."""
        last = len(self.episode.steps)
        if turn > last:
            raise InvalidRequest(f"turn is {turn}; the episode has 0 (its start) to {last}", where="turn")
        return [turn]

    def pictures(
        self, turns: Sequence[int], side: int, *, until_s: float, clock: Callable[[], float] = time.monotonic
    ) -> list[Picture]:
        """The picture after each of the turns. Takes milliseconds a decision: call it in a thread.

        Args:
            turns: rising, from 0 (the start).
            side: of the square pictures, in pixels.
            until_s: on `clock`; later than this the replay gives up.

        Raises:
            ReplayDeparts, RequestDeadline, CriticalError: there are no pictures.
        """
        environment, wanted = self.environment, frozenset(turns)
        assert isinstance(environment, Pictured), "replay_of checks it"
        with boundary("environment.reset"):
            environment.reset(self.seed)
        found = [environment.frame(side, side)] if 0 in wanted else []
        for step in self.episode.steps[: max(turns)]:
            if clock() > until_s:
                raise RequestDeadline(
                    f"the replay had reached decision {step.turn} when its time was over",
                    hint="ask for a single turn near the start, or for smaller pictures",
                )
            self._play(step)
            if step.turn in wanted:
                with boundary("environment.frame"):
                    found.append(environment.frame(side, side))
        return found

    def _play(self, step: StepData) -> None:
        if step.action_taken.get("type") == "terminate":
            return
        requests = tuple(tool_request(call) for call in step.tool_calls)
        refused = step.step_info.invalid_reason if not requests else None
        with boundary("environment.step"):
            outcome = self.environment.step(requests, invalid_reason=refused)
        did = (outcome.executed_actions, outcome.env_rewards)
        if did != (step.step_info.executed_actions, step.env_rewards):
            raise ReplayDeparts(
                f"the replay departed from the recorded episode at decision {step.turn}",
                hint="is the environment reproducible? equal seeds and calls must give equal episodes",
            )


def replay_of(record: Record, boards: PlugBoards) -> Replay:
    """Return everything needed to replay a rollout.

    Raises:
        Conflict: it has not finished, or began at a snapshot, which is not kept.
        UnknownId: its environment draws no pictures.
    """
    rollout_id = record.rollout_id
    if record.status != "finished":
        raise Conflict(f"rollout {rollout_id!r} is {record.status}; only a finished one has frames")
    if record.seed is None:
        raise Conflict(
            f"rollout {rollout_id!r} began at a snapshot, which is not kept, and cannot be replayed"
        )
    config, _ = take_step_rewards(record.env.config, where="env.config")
    environment = boards.environment(record.env.env_name, config, where="env.")
    if not isinstance(environment, Pictured):
        hint = f"environment {environment.name!r} draws none"
        raise UnknownId("picture of rollout", rollout_id, where="rollout_id", hint=hint)
    episode = Rollout.model_validate_json(record.ended_json).trajectory
    assert episode is not None, "a finished rollout has a trajectory"
    return Replay(environment, episode, record.seed)


def _turns(last: int, every: int) -> list[int]:
    return sorted({*range(0, last + 1, every), last})
