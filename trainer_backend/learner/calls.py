"""The calls to a learner in a process of its own: their arguments and results as JSON, and their errors.

    POST /calls/{name}      headers: the key, the session of the orchestrator, the number of the call
                            body: the arguments, a JSON array, and the bytes of what it names (core.columns)
    POST /stop              ends the call with that number after its next progress
    POST /leave             the run has ended: the learner may serve another one
    GET  /about             `About`: what is there, for which run, and what it does

A reply is a stream of lines, each a kind, a space and JSON: `progress [3, 10]` any number of times, then one
`result ...` or `error ...`. Numbers come back bit for bit, NaN and infinity too. No torch here: both sides
read it.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter

from shared_schemas.base import Body
from shared_schemas.json_text import encodable
from shared_schemas.trajectory import Trajectory
from trainer_backend.core import columns
from trainer_backend.core.critic import OfEpisode
from trainer_backend.core.kl_reward import ScoredTokens
from trainer_backend.core.prompt_lengths import LongPrompt
from trainer_backend.core.segments import Segment
from trainer_backend.errors import LearnerFailed, TrainerError
from trainer_backend.protocols import CreditedEpisode, Hardware, Progress, WeightPart

# The environment variable with the key of a learner's process.
LEARNER_KEY = "TURNWISE_LEARNER_KEY"
# Where an orchestrator may have that of somebody else's learner.
KEYS_OF_THE_LEARNER = frozenset({LEARNER_KEY, f"{LEARNER_KEY}_FILE"})
SESSION_HEADER, NUMBER_HEADER = "X-Turnwise-Session", "X-Turnwise-Call"
# An update's body holds all tokens of an iteration, at 4 to 12 bytes each, and a reply a number for each of
# them. Only the orchestrator and its learner send them.
MOST_BODY_BYTES = 16 << 30
LineKind = Literal["progress", "result", "error"]


class About(Body):
    """What answers at a learner's address."""

    version: str
    """Version of the package."""
    run: str = ""
    """The run that it works for; empty: none yet."""
    call: str = ""
    """The call that it is busy with, "3, 'update'"; empty: none."""


@dataclass(frozen=True, slots=True)
class CallTypes:
    """How the arguments of a call, and its result in a tuple of one, are written and read."""

    arguments: TypeAdapter[tuple[Any, ...]]
    result: TypeAdapter[tuple[Any]]
    reports: bool = False
    """Whether it reports its progress and heeds a stop."""

    def body(self, arguments: tuple[Any, ...]) -> bytes:
        """The arguments of a call as they are sent."""
        return columns.encoded(self.arguments, arguments)

    def arguments_of(self, body: bytes) -> tuple[Any, ...]:
        """What `body` wrote; raises pydantic's ValidationError where that does not fit."""
        arguments: tuple[Any, ...] = columns.decoded(self.arguments, body)
        return arguments


def _types(arguments: Any, result: Any, *, reports: bool = False) -> CallTypes:
    config = ConfigDict(ser_json_inf_nan="constants")
    return CallTypes(
        TypeAdapter(arguments, config=config), TypeAdapter(tuple[result], config=config), reports
    )


_Episodes = tuple[dict[str, list[Segment]]]
_Metrics = dict[str, float]
# By name: `open` comes first, then `fresh` or `resumed`, and then the methods of `protocols.Learner`;
# `gradient_cosines` needs `open` alone.
CALLS = {
    "open": _types(tuple[str], None),
    "sees": _types(tuple[Path, str], bool),
    "fixed_folders": _types(tuple[Path | None], dict[str, Path]),
    "plan_memory": _types(tuple[Path | None, list[Path]], str),
    "fresh": _types(tuple[list[Trajectory], Path | None], None),
    "resumed": _types(tuple[Path], Progress),
    "gradient_cosines": _types(
        tuple[Path, list[CreditedEpisode], dict[str, list[OfEpisode]]],
        list[tuple[str, str, float]],
        reports=True,
    ),
    "warm_up": _types(tuple[list[Trajectory]], _Metrics, reports=True),
    "values": _types(_Episodes, dict[str, OfEpisode]),
    "score": _types(_Episodes, dict[str, ScoredTokens]),
    "update": _types(tuple[list[CreditedEpisode], int, int | None], _Metrics),
    "save": _types(tuple[Path, Progress], None),
    "publish": _types(tuple[Path, WeightPart], None),
    "offer": _types(tuple[str], tuple[str, int]),
    "broadcast": _types(tuple[int, float], int, reports=True),
    "find_long": _types(tuple[list[list[dict[str, Any]]], int], list[LongPrompt]),
    "logprobs_of": _types(tuple[list[int]], list[float]),
    "hardware": _types(tuple[()], Hardware),
}


def session_of(run: str, start: str) -> str:
    """The name of an orchestrator: its run, and which of the run's starts it is."""
    return f"{run}/{start}"


def run_of(session: str) -> str:
    """The run of a session."""
    return session.rpartition("/")[0]


def line_of(kind: LineKind, body: bytes) -> bytes:
    """A line of a reply; JSON holds no line break."""
    return kind.encode() + b" " + body + b"\n"


class ErrorBody(Body):
    """An error of a call."""

    classes: tuple[str, ...]
    """Names of its class and those above it, the nearest first."""
    code: str
    detail: str
    where: str | None = None
    hint: str | None = None
    steps_taken: int | None = None
    """The steps that an UpdateStopped had taken."""
    errno: int | None = None
    """The errno of the system's error behind it, which says whether another attempt may help."""
    rollout_ids: tuple[str, ...] = ()
    """Ids of the rollouts at fault."""

    @classmethod
    def of(cls, error: TrainerError) -> "ErrorBody":
        return cls(
            classes=tuple(kind.__name__ for kind in type(error).__mro__ if issubclass(kind, TrainerError)),
            code=error.code,
            detail=encodable(error.detail),
            where=error.where and encodable(error.where),
            hint=error.hint,
            steps_taken=getattr(error, "steps_taken", None),
            errno=error.__cause__.errno if isinstance(error.__cause__, OSError) else None,
            rollout_ids=error.rollout_ids,
        )

    def error(self) -> TrainerError:
        """The same error, of the nearest class that this process knows."""
        known = {kind.__name__: kind for kind in TrainerError.tree()}
        kind = next((known[name] for name in self.classes if name in known), LearnerFailed)
        error = kind.__new__(kind)  # some have arguments of their own
        TrainerError.__init__(error, self.detail, where=self.where, hint=self.hint, code=self.code)
        error.rollout_ids = self.rollout_ids
        if self.steps_taken is not None:
            error.steps_taken = self.steps_taken  # type: ignore[attr-defined]
        if self.errno is not None:
            error.__cause__ = OSError(self.errno, os.strerror(self.errno))
        return error
