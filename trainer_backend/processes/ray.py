"""`[cluster] launcher = "ray"`: Ray selects the nodes of roles and detects lost nodes.

    orchestrator -- start, lines, end --> Host (an actor per node and role) -- child process, as under "local"
          \\-- beat --> Supervisor (detached) -- owns the placement groups and the hosts

Rollouts and weights never travel through Ray: roles listen on their node's address, and weights are files.
If the orchestrator is killed, the supervisor keeps the reserved nodes for `LEASE_S` seconds, so that the next
start of the run gets the same nodes. Without a new start in this time, the supervisor ends the processes,
releases the nodes, and ends itself.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from service_kit.release import version

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # if no Ray runs, a call does not start one

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from service_kit.process import Child, Process
from trainer_backend.errors import JobError, NotPlaced
from trainer_backend.processes.launching import LOCAL, PACKAGE, Place, Resources, Role

Result = TypeVar("Result")

NAMESPACE = "turnwise"
# Seconds for which nodes stay reserved without an orchestrator, and its number of heartbeats in that time.
LEASE_S, _BEATS = 30.0, 15
_LOOK_S, _STOP_S, _ANSWER_S, _CONNECT_S = 1.0, 10.0, 60.0, 10.0
_PACKAGE_FOLDER = Path(__file__).parents[1]
# The exit code that is returned for a process if its node or its actor is lost.
_LOST = -signal.SIGKILL


@dataclass(frozen=True, slots=True)
class Node:
    host: str
    """The address at which other nodes reach this node."""
    port: int
    """A free port of this node."""
    python: str
    folder: str
    """`python` and `folder` are the paths of the interpreter and of the package on this node."""
    release: str


class Host:
    """A Ray actor that runs the processes of one role on its node, one after another."""

    def __init__(self) -> None:
        self._child: Child | None = None

    async def node(self) -> Node:
        host: str = ray.util.get_node_ip_address()
        with socket.create_server((host, 0)) as holder:
            port = holder.getsockname()[1]
        return Node(host, port, sys.executable, str(_PACKAGE_FOLDER), version())

    async def start(self, role: Role) -> int:
        """End the previous process, start a new one, and return the id of the new process.

        Raises:
            OSError: the program cannot be run, or the log cannot be written.
            NotADirectoryError: the folder of the log does not exist on this node.
        """
        await self.end(_STOP_S)
        if role.log_file is not None and not role.log_file.parent.is_dir():
            raise NotADirectoryError(f"does not see {role.log_file.parent}")
        try:
            self._child = await LOCAL.start(role)
        except OSError as error:  # Ray's pickle drops the file name
            program, *_ = role.command(Place())
            raise OSError(f"{error.filename or program}: {error.strerror or error}") from error
        return self._child.pid

    async def line(self) -> str | None:
        """Return the next line of the process's stdout; None at the end of the output."""
        if self._child is None:
            return None
        async for line in self._child.lines():
            return line
        return None

    async def ended(self) -> int:
        if (child := self._child) is None:
            return _LOST
        code = await child.ended()
        child.kill_rest()
        return code

    async def signal(self, number: int) -> None:
        if self._child is not None:
            self._child.signal(number)

    async def end(self, grace_s: float) -> bool:
        if self._child is None:
            return False
        was_killed = await self._child.end(grace_s)
        self._child.kill_rest()
        return was_killed


class Supervisor:
    """A detached Ray actor that owns the placement groups of a run and the Host actors in them."""

    def __init__(self, run: str, lease_s: float) -> None:
        self._run, self._lease_s = run, lease_s
        self._hosts: dict[str, list[Any]] = {}
        self._groups: dict[str, PlacementGroup] = {}
        self._needs: dict[str, Any] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._lease = asyncio.Lock()
        self._heard = time.monotonic()
        self._watch: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Register a new orchestrator, and end the processes that an earlier orchestrator started."""
        await self.beat()
        async with self._lease:  # waits for an end that has begun, which would end new processes
            await self._end_processes()

    async def beat(self) -> None:
        """Record that the orchestrator is alive."""
        self._heard = time.monotonic()
        if self._watch is None:  # at the first beat, and after a restart of this actor
            self._watch = asyncio.ensure_future(self._end_without_orchestrator())

    async def hosts(self, resources: Resources, bundle: Mapping[str, float], strategy: str) -> list[Any]:
        """Wait until all nodes or replicas of a group are placed; return a Host actor for each of them."""
        name, need = resources.group, (resources, dict(bundle), strategy)
        if self._needs.setdefault(name, need) != need:  # an earlier start of the run had other needs
            self._give_back(name)
            self._needs[name] = need
        async with self._locks.setdefault(name, asyncio.Lock()):
            if name in self._hosts:
                return self._hosts[name]
            group = self._groups[name] = self._group(resources, bundle, strategy)
            await group.ready()
            self._hosts[name] = [
                ray.remote(Host)
                .options(
                    num_cpus=bundle["CPU"],
                    num_gpus=bundle.get("GPU", 0),
                    max_restarts=-1,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        group, placement_group_bundle_index=number
                    ),
                )
                .remote()
                for number in range(resources.count)
            ]
        return self._hosts[name]

    async def close(self) -> None:
        """End the processes, and release the reserved nodes."""
        await self._end_processes()
        for name in list(self._needs):
            self._give_back(name)

    def _give_back(self, name: str) -> None:
        # A caller that still waits for this group gets an error.
        for host in self._hosts.pop(name, ()):
            ray.kill(host)
        if name in self._groups:
            remove_placement_group(self._groups.pop(name))
        del self._needs[name]

    def _group(self, resources: Resources, bundle: Mapping[str, float], strategy: str) -> PlacementGroup:
        name, bundles = f"{self._run}/{resources.group}", [dict(bundle)] * resources.count
        with suppress(ValueError):  # there is no such group
            group: PlacementGroup = get_placement_group(name)  # from before a restart of this supervisor
            if group.bundle_specs == bundles:
                return group
            remove_placement_group(group)
        return placement_group(bundles, strategy=strategy, name=name)

    async def _end_processes(self) -> None:
        ends = [host.end.remote(_STOP_S) for hosts in self._hosts.values() for host in hosts]
        with suppress(TimeoutError):
            async with asyncio.timeout(3 * _STOP_S):
                await asyncio.gather(*ends, return_exceptions=True)

    async def _end_without_orchestrator(self) -> None:
        while True:
            while time.monotonic() - self._heard < self._lease_s:
                await asyncio.sleep(self._lease_s / _BEATS)
            async with self._lease:
                await self.close()
                if time.monotonic() - self._heard >= self._lease_s:  # and no new orchestrator has begun
                    ray.kill(ray.get_runtime_context().current_actor)
                    return


class RayProcess(Process):
    """The processes of a role, one on each of its nodes. When one process ends, the others are ended too."""

    def __init__(self, hosts: Sequence[Any], pid: int) -> None:
        self._hosts, self._pid = list(hosts), pid
        self._over: set[int] = set()

    @property
    def pid(self) -> int:
        return self._pid

    async def lines(self) -> AsyncIterator[str]:
        with suppress(RayError):
            while (line := await answer(self._hosts[0].line.remote())) is not None:
                yield line

    async def ended(self) -> int:
        ends = [asyncio.ensure_future(self._await_end(number)) for number in range(len(self._hosts))]
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if len(ends) > 1:
            await self.end(_STOP_S)
            await asyncio.gather(*ends)
        return done.pop().result()

    def signal(self, number: int) -> None:
        for host in self._hosts:
            host.signal.remote(number)

    async def end(self, grace_s: float) -> bool:
        # An actor whose node was lost would answer only after its restart.
        alive = [host for number, host in enumerate(self._hosts) if number not in self._over]
        ends = [answer(host.end.remote(grace_s), grace_s + _ANSWER_S) for host in alive]
        return True in await asyncio.gather(*ends, return_exceptions=True)

    async def _await_end(self, number: int) -> int:
        code = _LOST
        with suppress(RayError):
            code = await answer(self._hosts[number].ended.remote())
        self._over.add(number)
        return code


class RayLauncher:
    """Starts roles on nodes that Ray chooses. Roles without `resources` start as children of this process.

    Args:
        wait_s: how many seconds a start waits for free resources.
        say: receives a line of text when a start has to wait.
        lease_s: if this process is killed, how many seconds the run's nodes stay reserved.
    """

    def __init__(self, run: str, wait_s: float, say: Callable[[str], None], lease_s: float = LEASE_S) -> None:
        self._run, self._wait_s, self._say, self._lease_s = run, wait_s, say, lease_s
        self._closing = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="ray-beat", daemon=True)
        self._supervisor: Any = None
        self._beginning = asyncio.Lock()
        self._bundles: dict[str, dict[str, float]] = {}

    async def open(self, address: str) -> None:
        """Connect to Ray, and take over the nodes that an earlier start of the run has reserved.

        Raises:
            JobError: Ray does not run at this address, or has another version.
            NotPlaced: Ray starts no actor.
        """
        await _refuse_silence(address)
        await asyncio.to_thread(_connect, address)
        # Ray replaces the handler of SIGTERM, which stops the run, by one that prints a stack. Undo that.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        try:
            await self._begin()
        except (RayError, TimeoutError) as error:
            ray.shutdown()
            raise NotPlaced(
                f"Ray at {address!r} did not start an actor within {_ANSWER_S:g} s: {_first_line(error)}",
                hint="`ray status` shows whether its nodes live.",
            ) from error
        self._heart.start()

    async def close(self) -> None:
        """End the processes that Ray runs, and release their nodes."""
        self._closing.set()
        await asyncio.to_thread(self._heart.join)
        with suppress(RayError, TimeoutError):
            await answer(self._supervisor.close.remote(), _ANSWER_S)
            ray.kill(self._supervisor)
        ray.shutdown()

    def key(self, variable: str) -> str:
        return LOCAL.key(variable)

    async def start(self, role: Role) -> Process:
        if role.resources is None:
            return await LOCAL.start(role)
        group = role.resources.group
        # Computed only at the first start: while a node is lost, `make_bundle` might raise a JobError.
        bundle = self._bundles[group] = self._bundles.get(group) or make_bundle(role.resources)
        deadline, is_told = time.monotonic() + self._wait_s, False
        while True:
            try:
                return await self._start(role, role.resources, bundle)
            except (RayError, TimeoutError) as error:
                fault = _first_line(error) or f"no answer within {self._wait_s:g} s"
                if time.monotonic() > deadline:
                    raise NotPlaced(
                        f"Ray had no place for {role.name} within {self._wait_s:g} s (cluster.wait_s): "
                        f"{fault}",
                        hint=f"It needs {in_words(bundle)}; `ray status` shows what there is.",
                    ) from error
                if not is_told:
                    self._say(f"waiting for Ray to place {role.name}, at most {self._wait_s:g} s: {fault}")
                    is_told = True
                await asyncio.sleep(_LOOK_S)

    async def _begin(self) -> None:
        """Find the run's supervisor or start it, and end the processes of an earlier orchestrator."""
        options = {"name": self._run, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
        deadline = time.monotonic() + _ANSWER_S
        while True:
            actor = ray.remote(Supervisor).options(**options, max_restarts=-1, num_cpus=0)
            self._supervisor = actor.remote(self._run, self._lease_s)
            try:
                await answer(self._supervisor.begin.remote(), _ANSWER_S)
                return
            except ActorDiedError:  # its lease has ended, and its name will be free soon
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_LOOK_S)

    async def _hosts(self, resources: Resources, bundle: Mapping[str, float], strategy: str) -> list[Any]:
        supervisor = self._supervisor
        try:
            hosts: list[Any] = await answer(
                supervisor.hosts.remote(resources, bundle, strategy), self._wait_s
            )
        except ActorDiedError:  # this process was paused for longer than the lease
            async with self._beginning:
                if self._supervisor is supervisor:  # unless another role has replaced it
                    await self._begin()
            raise
        return hosts

    async def _start(self, role: Role, resources: Resources, bundle: Mapping[str, float]) -> RayProcess:
        strategy = "PACK" if role.replica is None else "SPREAD"
        hosts = await self._hosts(resources, bundle, strategy)
        if role.replica is not None:
            hosts = [hosts[role.replica]]
        nodes: list[Node] = await asyncio.gather(*(answer(host.node.remote(), _ANSWER_S) for host in hosts))
        refuse_other_release(nodes)
        log_file = role.log_file
        assert log_file is not None, "the output of a process elsewhere would be lost"
        meeting = (nodes[0].host, nodes[0].port)
        pids = []
        for rank, (host, node) in enumerate(zip(hosts, nodes, strict=True)):
            command = role.command(Place(node.host, rank, meeting, node.port))
            log = log_file if rank == 0 else log_file.with_suffix(f".{rank}.log")
            words = [on_node(word, node) for word in command]
            own = replace(
                role, command=partial(_given, words), log_file=log.absolute(), descriptors=(),
                environment={name: on_node(value, node) for name, value in role.environment.items()},
            )  # fmt: skip
            try:
                pids.append(await answer(host.start.remote(own), _ANSWER_S))
            except RayTaskError as error:
                raise _no_start(role, node, error) from error
        return RayProcess(hosts, pids[0])

    def _beat(self) -> None:
        while not self._closing.wait(self._lease_s / _BEATS):
            with suppress(RayError):
                ray.get(self._supervisor.beat.remote(), timeout=self._lease_s)


async def _refuse_silence(address: str) -> None:
    """Raise JobError if nothing listens at an address. Ray itself would try to connect for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():  # "auto"
        return
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError) as error:
        raise _no_ray(address, error) from error
    writer.close()


def _connect(address: str) -> None:
    where = f"cluster.ray_address = {address!r}"
    try:
        ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise _no_ray(address, error) from error
    except (RuntimeError, ValueError) as error:  # another version of Ray or Python; no such address
        raise JobError(f"{where}: {' '.join(str(error).split())}") from error


def _no_ray(address: str, error: Exception) -> JobError:
    return JobError(
        f"cluster.ray_address = {address!r}: there is no Ray: {_first_line(error) or type(error).__name__}",
        hint="Start one with `ray start --head`, or start the run on a node of it (docs/cluster.md).",
    )


def make_bundle(resources: Resources) -> dict[str, float]:
    """Return the Ray resources that each node or replica of a group needs.

    Raises:
        JobError: the group can never be placed.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    has_gpus = any(node.get("GPU") for node in nodes)
    uses_gpus = resources.device == "cuda" or (resources.device == "auto" and has_gpus)
    bundle = dict.fromkeys(["CPU", "GPU"] if uses_gpus else ["CPU"], float(resources.processes))
    if fault := never_fits(nodes, bundle, resources.count):
        raise JobError(f"{resources.group} can never be placed by Ray: {fault}")
    return bundle


def never_fits(nodes: Sequence[Mapping[str, float]], bundle: Mapping[str, float], count: int) -> str | None:
    """Return why `count` bundles do not fit even if the nodes run no process; None if they fit. Pure."""
    rooms = [min(int(node.get(name, 0) // need) for name, need in bundle.items()) for node in nodes]
    if sum(rooms) >= count:
        return None
    there = "; ".join(in_words({name: node.get(name, 0) for name in bundle}) for node in nodes)
    needed = f"it needs {count} times {in_words(bundle)}, each on one node"
    return f"{needed}, and the nodes have {there or 'nothing'}"


def in_words(bundle: Mapping[str, float]) -> str:
    """Describe a bundle in words: "2 CPU" for `{"CPU": 2.0}`."""
    return " and ".join(f"{amount:g} {name}" for name, amount in bundle.items())


def on_node(value: str, node: Node) -> str:
    """Translate the path of the interpreter, or a path in the package, to the path on a node. Pure.

    Any other value is returned unchanged.
    """
    if value == sys.executable:
        return node.python
    if value == str(_PACKAGE_FOLDER) or value.startswith(f"{_PACKAGE_FOLDER}{os.sep}"):
        return node.folder + value.removeprefix(str(_PACKAGE_FOLDER))
    return value


def _no_start(role: Role, node: Node, error: RayTaskError) -> JobError:
    where, fault = f"{role.name} cannot be started at {node.host}", error.cause
    if not isinstance(fault, NotADirectoryError):
        return JobError(f"{where}: {fault}")
    return JobError(
        f"{where}, which {fault}",
        hint="Weights and checkpoints are files: put job.runs_dir on a disk that all nodes have mounted "
        "under the same path.",
    )


def refuse_other_release(nodes: Sequence[Node]) -> None:
    for node in nodes:
        if node.release != (own := version()):
            raise JobError(
                f"the node {node.host} has {PACKAGE} {node.release}, and this machine has {own}",
                hint="Install the same release on all machines of a run.",
            )


def _given(words: Sequence[str], place: Place) -> Sequence[str]:
    return words


async def answer(reference: Any, within_s: float | None = None) -> Any:
    async with asyncio.timeout(within_s):
        return await asyncio.wrap_future(reference.future())


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
