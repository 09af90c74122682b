"""The interface of adapters: a `Peer` plays the environment of a library or server (the foreign side).

`task_app.environments.foreign.environment` turns a Peer into our `Environment`, and handles the common parts:
seeds, refused calls, finite numbers, sizes, the end.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from shared_schemas.messages import ToolSpec
from task_app.errors import EpisodeFailed
from task_app.settings import Reach


class ForeignFailed(EpisodeFailed, code="foreign_environment_failed", status=502):
    """The foreign side hangs, has closed, or breaks its protocol, so the rollout fails.

    `unquoted` is the sentence without words of the foreign side; None if `detail` has none of them.
    """

    def __init__(self, detail: str, *, unquoted: str | None = None) -> None:
        super().__init__(detail)
        self.unquoted = detail if unquoted is None else unquoted


class ForeignDeadline(ForeignFailed, code="foreign_environment_deadline", status=504):
    """The foreign side did not answer in time."""


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
    """The same content as plain JSON."""
    reward: float = 0.0
    """Reward of this env step."""
    terminated: bool = False
    truncated: bool = False
    refused: str | None = None
    """For a call that was not executed, the reason, in words for the model."""
    achievements: Mapping[str, int] | None = None
    """Counters of all achievements; None if there are none."""
    system: str = ""
    """The system message of the episode, if the foreign side has one."""


class Peer(Protocol):
    """Plays a foreign environment, one episode at a time; it is never called from two threads at once.

    Every method may raise ForeignFailed; after that only `close` is called.
    """

    def open(self) -> tuple[ToolSpec, ...]:
        """Connect to the foreign side, also again after `close`, and return its tools."""

    def reset(self, seed: int) -> Shown:
        """Start the world of the seed."""

    def carry_out(self, calls: Sequence[Call]) -> Iterator[Shown]:
        """Execute the calls of a decision; yield the outcome of each call, up to the end of the episode."""

    def close(self) -> None:
        """Release all resources, also after a failure."""


@runtime_checkable
class SpokenPeer(Peer, Protocol):
    """A Peer that accepts a text without a call."""

    def say(self, text: str) -> Shown:
        """Send the text, and return the outcome."""
