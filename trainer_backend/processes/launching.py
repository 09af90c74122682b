"""The protocol of launchers, and two: `local`, whose processes are children of this one, and `external`.

A launcher starts the process of a role, and gives it back as a handle. What a role does when its process ends
is up to the role: most start another one. Under `external` others start the learner, as Slurm, Kubernetes or
Compose do, and the launcher has its address alone.
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
    """The address that it listens on; None: it runs on this machine, and listens on the loopback or an
    inherited socket."""
    rank: int = 0
    """Its number among the nodes of its role."""
    meeting: tuple[str, int] = ("", 0)
    """Host and port where the processes of several nodes meet."""
    port: int = 0
    """A free port of the host; 0: its command names one."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What the nodes of a role, or its replicas, must have; read where machines are chosen."""

    group: str
    """Roles that are placed together: `learner`, or all replicas."""
    count: int = 1
    """How many nodes or replicas the group has."""
    processes: int = 1
    """Processes that compute in each; a CPU for each of them, and an accelerator where it has one."""
    device: str = "auto"
    """The device of [model]; `auto` is an accelerator where the cluster has some."""


@dataclass(frozen=True, slots=True)
class Role:
    """A process of a run."""

    name: str
    """For people, and to tell the roles of a run apart."""
    command: Callable[[Place], Sequence[str]]
    """Makes its command line for a place."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to those of its machine."""
    log_file: Path | None = None
    """Receives its stderr; None: this process's own."""
    withheld: frozenset[str] = frozenset()
    """Variables of this process that it does not get."""
    replica: int | None = None
    """Its number in its group; None: it is on all nodes of the group, as one."""
    resources: Resources | None = None
    """None: it runs on this machine, whatever the launcher."""
    has_ready_line: bool = True
    """Whether it prints its address when it is ready; otherwise its stdout is a log too."""
    descriptors: Sequence[int] = ()
    """Open files that a child inherits."""
    is_ours: bool = True
    """Whether it ends by itself when its standard input closes; another program gets a guard."""


class Launcher(Protocol):
    """Starts the processes of a run."""

    async def start(self, role: Role) -> Process:
        """Start the process of a role, where it has room; JobError: never; NotPlaced: it had none in time."""

    def key(self, variable: str) -> str:
        """Return the key of a role that listens, which it reads from this variable."""


class LocalLauncher:
    """Children of this process, on this machine."""

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
    """A process that others start, end, and start again; only its address is known."""

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
        await asyncio.Event().wait()  # its end shows in a failed call
        raise AssertionError("the event is never set")

    def signal(self, number: int) -> None:
        """Do nothing: it is not this run's to end."""

    async def end(self, grace_s: float) -> bool:
        return False


class ExternalLauncher:
    """Addresses, by role, of processes that others start; the other roles are children of this process."""

    def __init__(self, urls: Mapping[str, str]) -> None:
        self._urls = urls

    async def start(self, role: Role) -> Process:
        url = self._urls.get(role.name)
        return await LOCAL.start(role) if url is None else Elsewhere(url)

    def key(self, variable: str) -> str:
        """Return the key that both sides were given. A JobError says that there is none."""
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
    """A process that has no address. `code` is its exit code; None: it was not ready in time."""

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text)
        self.code = code


async def read_address(process: Process, log_file: Path, within_s: float) -> str:
    """The address of a process once it is ready; NotReady: it has ended, or was not ready in time."""
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
