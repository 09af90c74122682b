"""The interface of an adapter: a `Peer` speaks to one foreign environment in its own protocol.

`task_app.environments.foreign.environment` makes an environment of ours of it, which does what is the same
for all: seeds, refused calls, finite numbers, sizes, the end.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from shared_schemas.messages import ToolSpec
from task_app.errors import EpisodeFailed
from task_app.settings import Reach


class ForeignFailed(EpisodeFailed, code="foreign_environment_failed", status=502):
    """The foreign side hangs, has closed, or breaks its protocol: the rollout fails, and earns nothing.

    `unquoted` is the sentence without what the foreign side said; without it, the sentence quotes nothing.
    """

    def __init__(self, detail: str, *, unquoted: str | None = None) -> None:
        super().__init__(detail)
        self.unquoted = detail if unquoted is None else unquoted


class ForeignDeadline(ForeignFailed, code="foreign_environment_deadline", status=504):
    """The foreign side did not answer in time."""


LOCAL = Reach()


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call whose arguments keep the tool's schema."""

    tool: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Shown:
    """The state of the foreign side after a reset or a call."""

    text: str
    """For the model."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """The same as plain JSON."""
    reward: float = 0.0
    """Reward of this env step."""
    terminated: bool = False
    truncated: bool = False
    refused: str | None = None
    """Why the foreign side did not carry out the call, in words for the model: a no-op."""
    achievements: Mapping[str, int] | None = None
    """Counters of all achievements; None where it says nothing about them."""
    system: str = ""
    """The system message of the episode, if it brings its own."""


class Peer(Protocol):
    """One episode at a time of a foreign environment; never called from two threads at once.

    Every method may raise ForeignFailed; after that only `close` is called.
    """

    def open(self) -> tuple[ToolSpec, ...]:
        """Reach the foreign side, also again after `close`, and return the tools that it offers."""

    def reset(self, seed: int) -> Shown:
        """Start the world of the seed."""

    def carry_out(self, calls: Sequence[Call]) -> Iterator[Shown]:
        """Carry out the calls of one decision; yield the outcome of each, up to the end of the episode."""

    def close(self) -> None:
        """Release all resources; also after a failure."""


@runtime_checkable
class SpokenPeer(Peer, Protocol):
    """A Peer that takes words without a call."""

    def say(self, text: str) -> Shown:
        """Say the words, and return the outcome."""
