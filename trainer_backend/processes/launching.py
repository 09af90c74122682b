"""Launchers start the processes of a run. Two of them are defined here: `local` and `external`.

A role is a program of the run, such as the learner or a gateway. A launcher starts the process of a role and
returns a handle. The caller decides what happens when the process ends; most callers start a new process.

`local` starts child processes. `external` does so too, except for the learner: Slurm, Kubernetes or Compose
starts the learner, and the launcher only has the learner's address.
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
    """Where a process of a role runs."""

    host: str | None = None
    """The address to listen on. None: the process is on this machine, and listens on the loopback address or
    an inherited socket."""
    rank: int = 0
    """Index of the process's node among the nodes of the role."""
    meeting: tuple[str, int] = ("", 0)
    """Host and port of the rendezvous, if the role has several nodes."""
    port: int = 0
    """A free port of the host; 0: the command chooses a port."""


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources that a group of roles needs, for a launcher that chooses machines."""

    group: str
    """Name of the roles that are placed together: `learner`, `gateways` or `vllm`."""
    count: int = 1
    """Number of nodes or replicas in the group."""
    processes: int = 1
    """Number of processes in each node or replica. Each process gets one CPU, and also one accelerator if
    `device` selects accelerators."""
    device: str = "auto"
    """The job's `model.device`. `auto` selects accelerators if the cluster has any."""


@dataclass(frozen=True, slots=True)
class Role:
    """A program of the run, with everything that a launcher needs to start its process."""

    name: str
    """Unique among the roles of a run."""
    command: Callable[[Place], Sequence[str]]
    """Returns the command line for a process at a given place."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that are added to those of the machine."""
    log_file: Path | None = None
    """File for the stderr of the process; None: it shares the stderr of this process."""
    withheld: frozenset[str] = frozenset()
    """Names of environment variables of this process that a child does not get."""
    replica: int | None = None
    """Index of the role in its group of replicas; None: the role uses all nodes of its group."""
    resources: Resources | None = None
    """What the role needs, for a launcher that chooses machines; None: it always runs on this machine."""
    has_ready_line: bool = True
    """Whether the process prints its address to stdout when it is ready. If not, stdout goes to the log."""
    descriptors: Sequence[int] = ()
    """File descriptors that a child inherits."""
    is_ours: bool = True
    """Whether the program ends when its standard input closes. Other programs run under a guard process that
    ends them."""


class Launcher(Protocol):
    async def start(self, role: Role) -> Process:
        """Start the process of a role.

        Raises:
            JobError: the role can never be placed.
            NotPlaced: no machine had free resources for the role in time.
        """

    def key(self, variable: str) -> str:
        """Return the key for calls to a role, which reads it from the environment variable `variable`."""


class LocalLauncher:
    """Starts each role as a child of this process."""

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
        await asyncio.Event().wait()  # only a failed call shows that the process has ended
        raise AssertionError("the event is never set")

    def signal(self, number: int) -> None:
        """Do nothing: this run does not control the process."""

    async def end(self, grace_s: float) -> bool:
        return False


class ExternalLauncher:
    """Starts roles as children of this process, except the roles in `urls`.

    Another system starts those roles; `urls` contains their addresses by role name.
    """

    def __init__(self, urls: Mapping[str, str]) -> None:
        self._urls = urls

    async def start(self, role: Role) -> Process:
        url = self._urls.get(role.name)
        return await LOCAL.start(role) if url is None else Elsewhere(url)

    def key(self, variable: str) -> str:
        """Return the key in the environment variable `variable`, or in the file that `{variable}_FILE` names.

        Raises:
            JobError: neither variable is set, or the key cannot be used.
        """
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
    """A process ended before it was ready, or was not ready in time.

    `code` is the exit code of a process that ended, else None.
    """

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text)
        self.code = code


async def read_address(process: Process, log_file: Path, within_s: float) -> str:
    """Wait until a process is ready and return its address.

    Raises:
        NotReady: the process ended, or was not ready within `within_s` seconds.
    """
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
