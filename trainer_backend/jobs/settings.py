"""The settings of a trainer service: addresses, bounds of posted jobs, keys."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr

from service_kit.errors import SettingsError
from service_kit.keys import TRAINER_KEY, key_from_environ
from service_kit.server import is_wildcard
from shared_schemas.urls import is_loopback
from trainer_backend.collect.endpoints import VARIABLE
from trainer_backend.errors import JobError
from trainer_backend.job.addresses import fault_in
from trainer_backend.jobs.options import Flags as Flags  # with what is made of them
from trainer_backend.jobs.slots import ANSWER_S
from trainer_backend.operator_plugins import load_packages, load_plugins


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of the supervisor.

    Attributes:
        max_jobs: how many jobs run at a time.
        restarts: how often a job is restarted that crashes without finishing an iteration in between.
        first_wait_s: before the first restart; each further one waits twice as long. It is long enough for a
            moment without disk space or file descriptors not to use up all restarts.
        grace_s: for a process to save its finished work and end.
        lock_wait_s: for another trainer to release a run directory; a killed service needs a moment, a
            person's run may need hours.
        round_s: between two rounds without events.
    """

    max_jobs: int = 1
    restarts: int = 3
    grace_s: float = 100.0
    lock_wait_s: float = 60.0
    round_s: float = 1.0
    first_wait_s: float = 5.0


TASK_URL_VARIABLE = "TASK_URL"
_DATABASE = "turnwise.db"
# A folder of jobs and their files beside the code; only the operator writes there.
_ROOTS = (Path("configs"),)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a posted job may name (posted.py).

    Attributes:
        data_dir: the parent of its run directory; the job may name models and data in it, but no code.
        roots: folders whose files it may name, absolute, without links.
        task_urls: task apps that it may name; if it names none and there are none, it starts its own.
        default_urls: the task apps of TASK_URL, used by jobs that name none.
        inference_hosts: hosts that a warm-up's teacher may call; `host` allows all its ports.
        key_variables: environment variables that may hold its keys.
        models: patterns of models on the hub, downloaded with the operator's access to the operator's disk.
        clusters: learners and Rays that its roles may be at, by learner.url and cluster.ray_address.
        gateway_host: the address of every job's gateway.
        plugins: files of `job.trainer_plugins` that every job has; a job may name no others.
    """

    data_dir: Path
    roots: tuple[Path, ...] = ()
    default_urls: tuple[str, ...] = ()
    task_urls: frozenset[str] = frozenset()
    inference_hosts: frozenset[str] = frozenset()
    key_variables: frozenset[str] = frozenset()
    models: tuple[str, ...] = ()
    clusters: frozenset[str] = frozenset()
    gateway_host: str = "127.0.0.1"
    plugins: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the service; its limits on requests and jobs.

    Attributes:
        api_key: None: the service answers this machine only.
        max_connections: open connections; fewer if the process may open few files.
        max_header_s: for the head of a request to arrive.
        max_body_bytes, max_body_s: size and time limit of a request's body.
        heartbeat_s: interval of comments in an event stream.
        max_streams: open event streams.
        max_queued: jobs that wait for their turn.
        store_s: deadline of the store for requests, supervisor and watcher.
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
    """Read the settings from the options and the environment."""
    key = key_from_environ(environ, TRAINER_KEY)
    if key is None and not is_loopback(flags.host):
        raise SettingsError(
            f"--host is {flags.host!r}, which others can reach, and there is no key",
            hint=f"Set {TRAINER_KEY} or {TRAINER_KEY}_FILE, or listen on 127.0.0.1.",
        )
    default_urls = tuple(
        part.strip() for part in environ.get(TASK_URL_VARIABLE, "").split(",") if part.strip()
    )
    task_urls = (*default_urls, *(flags.task_urls or ()))
    for url in task_urls:
        if fault := fault_in(url):
            raise SettingsError(
                f"a task app's address {fault}", where=f"{TASK_URL_VARIABLE} or --allow-task-url"
            )
    if is_wildcard(flags.gateway_host):
        raise SettingsError(
            f"--gateway-host is {flags.gateway_host!r}, which is no address that a task app could call",
            hint="Name this machine by an address that the task apps can reach.",
        )
    for name in flags.key_variables or ():
        if not VARIABLE.fullmatch(name):
            raise SettingsError("takes the name of a variable, in capitals", where="--allow-key-variable")
    data_dir = flags.data_dir.resolve()
    bounds = Bounds(
        data_dir=data_dir,
        roots=tuple(root.resolve() for root in flags.roots or _ROOTS),
        default_urls=default_urls,
        task_urls=frozenset(url.rstrip("/") for url in task_urls),
        inference_hosts=frozenset(host.lower() for host in flags.inference_hosts or ()),
        key_variables=frozenset(flags.key_variables or ()),
        models=tuple(flags.models or ()),
        clusters=frozenset(address.rstrip("/") for address in flags.clusters or ()),
        gateway_host=flags.gateway_host,
        plugins=_plugin_files(flags.plugins or ()),
    )
    rules = Rules(flags.max_jobs if flags.jobs else 0, flags.restarts, flags.stop_grace_s)
    database = flags.database_url or f"sqlite:///{data_dir / _DATABASE}"
    return Settings(flags, database, bounds, rules, key)


def _plugin_files(files: Sequence[Path]) -> tuple[Path, ...]:
    """The files, absolute; a fault in one, or in a package, ends the start and not the first job."""
    try:
        load_packages()
        load_plugins(files, option="--plugins")
    except JobError as error:
        raise SettingsError(str(error)) from error
    return tuple(file.resolve() for file in files)
