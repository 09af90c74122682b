"""The interface of adapters: a `Peer` plays the environment of a library or server (the foreign side).

`task_app.environments.foreign.environment` turns a Peer into our `Environment`. It also does what all peers
need: it refuses invalid calls, rejects numbers that are not finite, and cuts texts that are too long.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from shared_schemas.messages import ToolSpec
from task_app.errors import EpisodeFailed
from task_app.settings import Reach


class ForeignFailed(EpisodeFailed, code="foreign_environment_failed", status=502):
    """Fails the rollout, because the foreign side hangs, has closed, or breaks its protocol.

    `unquoted` is `detail` without words of the foreign side. Omit it if `detail` contains no such words.
    """

    def __init__(self, detail: str, *, unquoted: str | None = None) -> None:
        super().__init__(detail)
        self.unquoted = detail if unquoted is None else unquoted


class ForeignDeadline(ForeignFailed, code="foreign_environment_deadline", status=504):
    """Fails the rollout, because the foreign side did not answer in time."""


LOCAL = Reach()


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call whose arguments fit the tool's schema."""

    tool: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Shown:
    """The outcome of a reset or a call."""

    text: str
    """Text for the model."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Plain JSON values for `Observation.data`, such as the observation that `text` describes."""
    reward: float = 0.0
    """Reward of this env step."""
    terminated: bool = False
    truncated: bool = False
    refused: str | None = None
    """Why the call was not executed, in words for the model; None if it was executed."""
    achievements: Mapping[str, int] | None = None
    """Counters of all achievements; None if the foreign side sent no counters."""
    system: str = ""
    """The system message of the episode, if the foreign side has one."""


class Peer(Protocol):
    """Plays a foreign environment, one episode at a time; it is never called from two threads at once.

    Every method may raise ForeignFailed. The next call after that is `close`.
    """

    def open(self) -> tuple[ToolSpec, ...]:
        """Connect to the foreign side and return its tools. May be called again after `close`."""

    def reset(self, seed: int) -> Shown:
        """Start the episode that `seed` determines, and return what the model sees first."""

    def carry_out(self, calls: Sequence[Call]) -> Iterator[Shown]:
        """Execute the calls of a decision in order, and yield the outcome of each call.

        The caller stops reading at an outcome that ends the episode.
        """

    def close(self) -> None:
        """Release all resources, also after a failure."""


@runtime_checkable
class SpokenPeer(Peer, Protocol):
    """A Peer that also accepts an answer in words, without a tool call."""

    def say(self, text: str) -> Shown:
        """Send the model's answer to the foreign side, and return the outcome of the answer."""
