"""The protocol of launchers, and two of them: `local` starts children of this process; under `external`,
Slurm, Kubernetes or Compose starts the learner, and the launcher only has its address.

A role is a program of the run, such as the learner or a gateway. A launcher starts its process and returns a
handle. The caller decides what happens when the process ends; most start another one.
"""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from service_kit.errors import SettingsError
from service_kit.keys import key_from_environ
from service_kit.process import PIPE, Child, Process, last_line, name_exit, without
from trainer_backend.errors import JobError

# The name of the learner's role.
LEARNER = "learner"
PACKAGE = "turnwise"


@dataclass(frozen=True, slots=True)
class Place:
    host: str | None = None
    """The address to listen on; None: this machine, with the loopback or an inherited socket."""
    rank: int = 0
    """Index among the nodes of the role."""
    meeting: tuple[str, int] = ("", 0)
    """Host and port of the rendezvous of several nodes."""
    port: int = 0
    """A free port of the host; 0: the command names one."""


@dataclass(frozen=True, slots=True)
class Resources:
    """The needs of the nodes or replicas of a role, for a launcher that chooses machines."""

    group: str
    """Name of the roles that are placed together: `learner`, or all replicas."""
    count: int = 1
    """Nodes or replicas of the group."""
    processes: int = 1
    """Processes in each node or replica. Each one gets a CPU, and an accelerator if `device` selects one."""
    device: str = "auto"
    """The device of [model]; `auto`: an accelerator if the cluster has any."""


@dataclass(frozen=True, slots=True)
class Role:
    name: str
    """Unique among the roles of a run."""
    command: Callable[[Place], Sequence[str]]
    """Makes the command line for a place."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to the machine's own."""
    log_file: Path | None = None
    """Receives stderr; None: stderr of this process."""
    withheld: frozenset[str] = frozenset()
    """Variables of this process that a child does not get."""
    replica: int | None = None
    """Index in its group; None: a single role on all nodes of the group."""
    resources: Resources | None = None
    """The role's needs, for a launcher that chooses machines; None: the role is always on this machine."""
    has_ready_line: bool = True
    """Whether the process prints its address when it is ready; otherwise its stdout goes to the log."""
    descriptors: Sequence[int] = ()
    """Open files that a child inherits."""
    is_ours: bool = True
    """Whether the process ends when its standard input closes; other programs run under a guard process."""


class Launcher(Protocol):
    async def start(self, role: Role) -> Process:
        """Start the process of a role; JobError: it can never be placed; NotPlaced: no place in time."""

    def key(self, variable: str) -> str:
        """Return the key that a listening role reads from this variable."""


class LocalLauncher:
    """Starts children of this process."""

    async def start(self, role: Role) -> Child:
        with nullcontext() if role.log_file is None else role.log_file.open("ab") as log:
            return await Child.start(
                role.command(Place()),
                stdout=PIPE if role.has_ready_line else log,
                stderr=log,
                env={**without(role.withheld), **role.environment},
                descriptors=role.descriptors,
                is_ours=role.is_ours,
            )

    def key(self, variable: str) -> str:
        return secrets.token_urlsafe(32)


LOCAL = LocalLauncher()


class Elsewhere(Process):
    """A process that another system starts and ends; only its address is known."""

    pid = 0

    def __init__(self, url: str) -> None:
        self._url = url

    async def address(self) -> str:
        return self._url

    async def lines(self) -> AsyncIterator[str]:
        no_lines: tuple[str, ...] = ()
        for line in no_lines:
            yield line

    async def ended(self) -> int:
        await asyncio.Event().wait()  # a failed call shows its end
        raise AssertionError("the event is never set")

    def signal(self, number: int) -> None:
        """Do nothing: this run does not control the process."""

    async def end(self, grace_s: float) -> bool:
        return False


class ExternalLauncher:
    """Knows the addresses of roles that another system starts; starts other roles as children."""

    def __init__(self, urls: Mapping[str, str]) -> None:
        self._urls = urls

    async def start(self, role: Role) -> Process:
        url = self._urls.get(role.name)
        return await LOCAL.start(role) if url is None else Elsewhere(url)

    def key(self, variable: str) -> str:
        """Return the key from the environment; JobError without one."""
        try:
            key = key_from_environ(os.environ, variable)
        except SettingsError as error:
            raise JobError(error.detail) from error
        if key is None:
            raise JobError(
                f"cluster.launcher is 'external', and the environment has no key: set {variable}, or "
                f"{variable}_FILE, here and where the process is started"
            )
        return key.get_secret_value()


class NotReady(Exception):
    """A process ended with exit code `code` before it was ready, or (`code` None) was not ready in time."""

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text)
        self.code = code


async def read_address(process: Process, log_file: Path, within_s: float) -> str:
    """Return the address of a process once it is ready; raise NotReady if it ended or took too long."""
    try:
        async with asyncio.timeout(within_s):
            address = await process.address()
    except TimeoutError as error:
        word = last_line(log_file)
        raise NotReady(f"did not start within {within_s:g} s; the last line of its log: {word!r}") from error
    if address is None:
        code = await process.ended()
        raise NotReady(f"ended with {name_exit(code)} before it was ready: {last_line(log_file)!r}", code)
    return address
