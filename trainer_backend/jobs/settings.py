"""What the operator of a trainer service has decided: addresses, bounds, keys."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr

from service_kit.errors import SettingsError
from service_kit.keys import TRAINER_KEY, key_from_environ
from service_kit.server import is_wildcard
from shared_schemas.urls import is_loopback
from trainer_backend.collect.endpoints import VARIABLE
from trainer_backend.job.addresses import fault_in
from trainer_backend.jobs.options import Flags as Flags  # with what is made of them
from trainer_backend.jobs.slots import ANSWER_S


@dataclass(frozen=True, slots=True)
class Rules:
    """
    Attributes:
        max_jobs: that run at a time.
        restarts: of a job that crashes, with no iteration in between.
        first_wait_s: before the first of them; each next one waits twice as long. Long enough that a disk
            that is full, or a descriptor that is missing, for a moment costs no job all of its restarts.
        grace_s: for a process to save what is finished and end.
        held_s: for a run directory that somebody trains in to be let go: that of a killed service needs a
            moment, a person's may need hours.
        round_s: between two rounds where nothing happens.
    """

    max_jobs: int = 1
    restarts: int = 3
    grace_s: float = 100.0
    held_s: float = 60.0
    round_s: float = 1.0
    first_wait_s: float = 5.0


TASK_URL_VARIABLE = "TASK_URL"
_DATABASE = "turnwise.db"
# A folder of jobs beside the code, with files that they name; written by nobody but the operator.
_ROOTS = (Path("configs"),)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a posted job may name (posted.py).

    Attributes:
        data_dir: where its run directory will be; models and data in it may be named, code may not.
        roots: folders whose files may be named, absolute, without links.
        task_urls: of jobs that name none the first; empty: each starts its own.
        given_urls: those that TASK_URL names, and nobody has to name.
        inference_hosts: that a warm-up's teacher may ask; `host` stands for all its ports.
        key_variables: environment variables that a key may be taken from.
        models: patterns of names on the hub: with the operator's access, and onto the operator's disk.
        gateway_host: where the gateway of every job listens.
    """

    data_dir: Path
    roots: tuple[Path, ...] = ()
    given_urls: tuple[str, ...] = ()
    task_urls: frozenset[str] = frozenset()
    inference_hosts: frozenset[str] = frozenset()
    key_variables: frozenset[str] = frozenset()
    models: tuple[str, ...] = ()
    gateway_host: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Settings:
    """
    Attributes:
        api_key: None: nobody but this machine may ask.
        max_connections: that are open at a time; fewer where the process may have few files open.
        max_header_s: for the head of a request to arrive.
        max_body_bytes, max_body_s: of a request's body.
        heartbeat_s: of an open event stream.
        max_streams: event streams that are open at a time.
        max_queued: jobs that wait for their turn.
        store_s: for the store to answer whoever asks: a request, the supervisor, the watcher.
    """

    flags: Flags
    database_url: str
    bounds: Bounds
    rules: Rules
    api_key: SecretStr | None = None
    max_connections: int = 400
    max_header_s: float = 15.0
    max_body_bytes: int = 1 << 20
    max_body_s: float = 30.0
    heartbeat_s: float = 15.0
    max_streams: int = 64
    max_queued: int = 1000
    store_s: float = ANSWER_S


def settings_from(flags: Flags, environ: Mapping[str, str]) -> Settings:
    """
    Raises:
        SettingsError: a flag or a variable is wrong, or the service would be open to the network.
    """
    key = key_from_environ(environ, TRAINER_KEY)
    if key is None and not is_loopback(flags.host):
        raise SettingsError(
            f"--host is {flags.host!r}, which others can reach, and there is no key",
            hint=f"Set {TRAINER_KEY} or {TRAINER_KEY}_FILE, or listen on 127.0.0.1.",
        )
    given = tuple(part.strip() for part in environ.get(TASK_URL_VARIABLE, "").split(",") if part.strip())
    task_urls = (*given, *(flags.task_urls or ()))
    for url in task_urls:
        if fault := fault_in(url):
            raise SettingsError(
                f"a task app's address {fault}", where=f"{TASK_URL_VARIABLE} or --allow-task-url"
            )
    if is_wildcard(flags.gateway_host):
        raise SettingsError(
            f"--gateway-host is {flags.gateway_host!r}, which is no address that a task app could call",
            hint="Name this machine as the task apps know it.",
        )
    for name in flags.key_variables or ():
        if not VARIABLE.fullmatch(name):
            raise SettingsError("takes the name of a variable, in capitals", where="--allow-key-variable")
    data_dir = flags.data_dir.resolve()
    bounds = Bounds(
        data_dir=data_dir,
        roots=tuple(root.resolve() for root in flags.roots or _ROOTS),
        given_urls=given,
        task_urls=frozenset(url.rstrip("/") for url in task_urls),
        inference_hosts=frozenset(host.lower() for host in flags.inference_hosts or ()),
        key_variables=frozenset(flags.key_variables or ()),
        models=tuple(flags.models or ()),
        gateway_host=flags.gateway_host,
    )
    rules = Rules(flags.max_jobs if flags.jobs else 0, flags.restarts, flags.stop_grace_s)
    database = flags.database_url or f"sqlite:///{data_dir / _DATABASE}"
    return Settings(flags, database, bounds, rules, key)
