"""Plays recorded episodes again, in order to draw pictures or to take snapshots.

Environments are reproducible, so a replay needs only the start of the episode and its decisions. If a result
differs from the recorded result, the replay ends with the error `ReplayDeparts`.
"""

import io
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from service_kit.errors import RequestDeadline
from shared_schemas.plain_text import encodable
from shared_schemas.replay import ReplayRequest, ReplayTurn
from shared_schemas.rollouts import EnvSpec, Rollout
from task_app.environment_calls import reset_environment, take_decision
from task_app.episode.actions import tool_request
from task_app.episode.release import close
from task_app.errors import (
    Conflict,
    EpisodeOver,
    InvalidRequest,
    SnapshotRefused,
    TaskAppError,
    UnknownId,
    boundary,
)
from task_app.plugins import PlugBoards
from task_app.protocols import (
    AnsweredEnvironment,
    ConversationalEnvironment,
    Environment,
    RestorableEnvironment,
)
from task_app.rollouts.results import Record
from task_app.sessions.snapshots import EnvironmentFacts, EnvironmentSnapshot
from task_app.sessions.switches import take_step_rewards
from task_app.snapshots.envelope import from_text
from task_app.snapshots.starts import require_reseedable, require_restorable, reseed, restore

if TYPE_CHECKING:  # importing numpy takes a tenth of the start-up, and only pictures need it
    import numpy as np
    import numpy.typing as npt

_PALETTE_FROM = 8  # number of pictures for the palette, spread over an episode with day and night
Picture: TypeAlias = "npt.NDArray[np.uint8]"


@runtime_checkable
class Pictured(Protocol):
    """An `Environment` that can be drawn. Drawing changes nothing, and may take milliseconds."""

    def frame(self, width: int, height: int) -> Picture:
        """Draw the current state as RGB, [height, width, 3]."""


def png(picture: Picture) -> bytes:
    """Convert an RGB picture [height, width, 3] to a PNG file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG", optimize=True)
    return file.getvalue()


def animated_gif(pictures: Sequence[Picture], *, frame_s: float) -> bytes:
    """Convert pictures of equal size to a GIF file that shows each picture for `frame_s` seconds and repeats.

    All frames share one palette, which is made from a few of the pictures. A palette for each frame would
    triple the size of the file, and static objects would flicker.
    """
    if not pictures:
        raise ValueError("an animated GIF needs at least one picture")
    import numpy as np
    from PIL import Image

    few = np.concatenate(pictures[:: -(-len(pictures) // _PALETTE_FROM)])
    palette = Image.fromarray(few).quantize(256, dither=Image.Dither.NONE)
    first, *rest = (
        Image.fromarray(picture).quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures
    )
    file, ms = io.BytesIO(), round(1_000 * frame_s)
    first.save(file, "GIF", save_all=True, append_images=rest, duration=ms, loop=0, disposal=1)
    return file.getvalue()


class ReplayDeparts(Conflict, code="replay_departs"):
    """A result of the replay differs from the recorded result."""


class NoPictures(TaskAppError, code="no_pictures", status=404):
    """The environment draws no pictures."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Plays a recorded episode in a fresh environment. `moments` may be called once."""

    environment: Environment
    spec: EnvSpec
    """The name and the config of the environment, with every setting written out."""
    record: Sequence[ReplayTurn]
    seed: int
    snapshot_of_start: EnvironmentSnapshot | None = None
    """The snapshot at which the episode began; None if it began in the world of `seed`."""
    draws_seed: int | None = None
    """Seed of the random numbers after the snapshot; None: the generator of the snapshot continues."""

    def every(self, at_most: int) -> int:
        """Return the smallest n for which `turns(n)` has at most `max(2, at_most)` turns.

        `turns(n)` consists of the start, every n-th decision, and the last decision.
        """
        return next(every for every in count(1) if len(self.turns(every)) <= max(2, at_most))

    def turns(self, every: int) -> list[int]:
        last = len(self.record)
        return sorted({*range(0, last + 1, every), last})

    def only(self, turn: int) -> list[int]:
        """Return a list with this one turn. Raises InvalidRequest if the episode has no such turn."""
        last = len(self.record)
        if turn > last:
            raise InvalidRequest(f"turn is {turn}; the episode has 0 (its start) to {last}", where="turn")
        return [turn]

    def moments(
        self, turns: Collection[int], *, until_s: float, clock: Callable[[], float] = time.monotonic
    ) -> Iterator[EnvironmentFacts]:
        """Play the recorded decisions, and yield the facts after each of the `turns`; turn 0 is the start.

        `turns` must not be empty. While the caller handles the yielded facts, `picture` and `snapshot` show
        the same moment. A decision takes milliseconds, so iterate in a thread.

        Raises:
            ReplayDeparts: a result differs from the recorded result.
            RequestDeadline: `clock()` exceeds `until_s` before the last of the turns.
            CriticalError: the environment failed.
        """
        try:
            moment = self._begin()
            if 0 in turns:
                yield moment
            for recorded in self.record[: max(turns)]:
                if clock() > until_s:
                    raise RequestDeadline(
                        f"the replay had reached decision {moment.turn + 1} when its time was over",
                        hint="ask for a single turn near the start, or for smaller pictures",
                    )
                moment = self._play_turn(moment, recorded)
                if moment.turn in turns:
                    yield moment
        finally:
            close(self.environment)

    def _begin(self) -> EnvironmentFacts:
        """Bring the environment to the start of the episode, which is turn 0, and return its facts."""
        snapshot = self.snapshot_of_start
        if snapshot is None:
            reset_environment(self.environment, self.seed)
            return EnvironmentFacts.begin(self.spec, self.seed)
        restore(self.environment, snapshot.state)
        if self.draws_seed is not None:
            reseed(self.environment, self.draws_seed)
        return snapshot.facts.model_copy(update={"turn": 0, "step_rewards": None})

    def picture(self, side: int) -> Picture:
        """Draw the current state of the environment as a square with sides of `side` pixels."""
        assert isinstance(self.environment, Pictured), "build_replay and replay_in check it"
        with boundary("environment.frame"):
            return self.environment.frame(side, side)

    def snapshot(self, moment: EnvironmentFacts, *, at_most_bytes: int) -> str:
        """Take a snapshot from which rollouts can start. It does not contain the settings of step rewards."""
        assert isinstance(self.environment, RestorableEnvironment), "replay_in checks it"
        with boundary("environment.snapshot"):
            state = self.environment.snapshot()
        return EnvironmentSnapshot(moment, state).text(at_most_bytes=at_most_bytes)

    def _play_turn(self, moment: EnvironmentFacts, recorded: ReplayTurn) -> EnvironmentFacts:
        if recorded.terminate:
            return moment.model_copy(update={"turn": moment.turn + 1, "over": True})
        requests = tuple(tool_request(call) for call in recorded.tool_calls)
        refused = recorded.invalid_reason if not requests else None
        try:
            if recorded.text is not None and isinstance(self.environment, AnsweredEnvironment):
                outcome = take_decision(self.environment.answer, recorded.text)
            else:
                outcome = take_decision(self.environment.step, requests, invalid_reason=refused)
        except EpisodeOver as exc:
            raise _departure(moment.turn + 1) from exc
        is_same_result = recorded.result is None or encodable(outcome.result) == recorded.result
        played = outcome.executed_actions, outcome.env_rewards
        if not is_same_result or played != (recorded.executed_actions, recorded.env_rewards):
            raise _departure(moment.turn + 1)
        return moment.after(requests, outcome)


def _departure(turn: int) -> ReplayDeparts:
    return ReplayDeparts(
        f"the replay departed from the recorded episode at decision {turn}",
        hint="is the environment reproducible, and of the same version? equal seeds and calls must give "
        "equal episodes",
    )


def build_replay(record: Record, boards: PlugBoards) -> Replay:
    """Prepare the replay of a rollout of this service.

    Raises:
        Conflict: the rollout has not finished, or it began at a snapshot (the service does not store these
            snapshots).
        UnknownId: the rollout's environment draws no pictures.
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
    episode = Rollout.model_validate_json(record.result_json).trajectory
    assert episode is not None, "a finished rollout has a trajectory"
    spec = EnvSpec(env_name=record.env.env_name, config=config)
    turns = [ReplayTurn.of(step) for step in episode.steps]
    return Replay(environment, boards.resolve(spec), turns, record.seed)


def replay_in(request: ReplayRequest, boards: PlugBoards, *, at_most_bytes: int) -> Replay:
    """Prepare the replay of an episode whose record is in the request.

    `at_most_bytes` limits the size of the snapshot at which the episode began.

    Raises:
        InvalidRequest: the environment or its config is invalid, or the request asks for snapshots of a
            conversation.
        SnapshotRefused: the snapshot is of another environment or config.
        NoPictures: pictures are requested, and the environment draws none.
        NotRestorable: the request contains or asks for snapshots, and the environment has none.
        NotReseedable: the request contains `draws_seed`, and the environment cannot use it.
    """
    config, _ = take_step_rewards(request.config, where="config")
    environment = boards.environment(request.env_name, config)
    if request.frames and not isinstance(environment, Pictured):
        raise NoPictures(f"environment {environment.name!r} draws no pictures", where="env_name")
    if request.snapshots:
        require_restorable(environment, where="snapshots")
        if isinstance(environment, ConversationalEnvironment):
            raise InvalidRequest(
                f"{environment.name!r} is a conversation, which no snapshot holds", where="snapshots"
            )
    spec = EnvSpec(env_name=request.env_name, config=config)
    resolved, start = boards.resolve(spec), request.start
    if start is None or start.snapshot is None:
        seed = request.seed if start is None or start.seed is None else start.seed
        return Replay(environment, resolved, request.turns, seed)
    require_restorable(environment, where="start.snapshot")
    if start.draws_seed is not None:
        require_reseedable(environment, where="start.draws_seed")
    data = from_text(start.snapshot, where="start.snapshot")
    snapshot = EnvironmentSnapshot.open(data, at_most_bytes=at_most_bytes)
    if snapshot.facts.env != resolved:
        raise SnapshotRefused("the snapshot is of another environment or config", where="start.snapshot")
    return Replay(environment, resolved, request.turns, snapshot.facts.seed, snapshot, start.draws_seed)
