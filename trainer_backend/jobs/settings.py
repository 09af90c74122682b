"""The settings of a trainer service.

Every `turnwise` command imports this module to build its options, so this module imports little.
"""

from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, SecretStr, ValidationInfo, field_validator, model_validator

from service_kit.errors import SettingsError
from service_kit.keys import TRAINER_KEY
from service_kit.settings import VARIABLE_NAME, Flag, Key, Port, ServiceSettings, SettingsTable, Variable
from shared_schemas.urls import is_loopback, is_wildcard
from trainer_backend.job.addresses import fault_in

STORE_S = 20.0


class SupervisorSettings(SettingsTable):
    """Settings of the supervisor: how many jobs run at a time, and when a job is restarted."""

    max_jobs: Annotated[int, Flag()] = Field(
        default=1, ge=1, description="jobs that run at a time; others wait"
    )
    restarts: Annotated[int, Flag()] = Field(
        default=3,
        ge=0,
        description="restarts of a job that crashes without finishing an iteration in between",
    )
    stop_grace_s: Annotated[float, Flag()] = Field(
        default=100.0, ge=0, description="seconds for a job to save finished work before it is killed"
    )
    first_wait_s: float = Field(
        default=5.0,
        description="before the first restart; each further one waits twice as long. It is long enough for a "
        "moment without disk space or file descriptors not to use up all restarts.",
    )
    lock_wait_s: float = Field(
        default=60.0,
        description="for another trainer to release a run directory; a killed service needs a moment, a "
        "person's run may need hours",
    )
    round_s: float = Field(default=1.0, description="between two rounds without events")
    store_s: float = Field(
        default=STORE_S,
        description="deadline of the store and the disk; a round that misses it is repeated later",
    )


def _check_task_app(url: str) -> str:
    if fault := fault_in(url):  # the message repeats no password
        raise SettingsError(f"a task app's address {fault}", where="TASK_URL or --allow-task-url")
    return url


def _check_variable(name: str) -> str:
    if not VARIABLE_NAME.fullmatch(name):  # the message omits it: it may be the key itself
        raise SettingsError("takes the name of a variable, in capitals", where="--allow-key-variable")
    return name


Folder = Annotated[Path, AfterValidator(Path.resolve)]
Address = Annotated[str, AfterValidator(lambda address: address.rstrip("/"))]
TaskApp = Annotated[str, AfterValidator(_check_task_app)]


class Bounds(SettingsTable):
    """The files, addresses, models and keys that a posted job may name (posted.py)."""

    data_dir: Annotated[Folder, Flag()] = Field(
        default=Path("runs"), description="where run directories are, and the store"
    )
    roots: Annotated[tuple[Folder, ...], Flag("--allow-root")] = Field(
        default=(Path("configs"),),
        description="a folder that posted jobs may name files in; may be repeated; absent: configs",
    )
    default_urls: Annotated[tuple[TaskApp, ...], Variable("TASK_URL")] = Field(
        default=(),
        description="task apps for jobs that name none; if there are none either, a job starts its own",
    )
    task_urls: Annotated[frozenset[TaskApp], Flag("--allow-task-url")] = Field(
        default=frozenset(),
        description="a task app that posted jobs may name, in addition to those of TASK_URL; it is sent their"
        " key",
    )
    inference_hosts: Annotated[
        frozenset[Annotated[str, AfterValidator(str.lower)]], Flag("--allow-inference-host")
    ] = Field(
        default=frozenset(), description="host or host:port that an inference_url of a posted job may name"
    )
    key_variables: Annotated[
        frozenset[Annotated[str, AfterValidator(_check_variable)]], Flag("--allow-key-variable")
    ] = Field(
        default=frozenset(), description="an environment variable that a posted job may take a key from"
    )
    models: Annotated[tuple[str, ...], Flag("--allow-model")] = Field(
        default=(),
        description="models of the hub that posted jobs may name, such as 'Qwen/*'; may be repeated",
    )
    plugins: Annotated[tuple[Folder, ...], Flag("--plugins")] = Field(
        default=(),
        description="a Python file with estimators, losses, aggregations or schedules that posted jobs may "
        "name; may be repeated",
    )
    clusters: Annotated[frozenset[Address], Flag("--allow-cluster")] = Field(
        default=frozenset(),
        description="a learner.url or cluster.ray_address that posted jobs may name; the one is sent the "
        "learner's key, the other starts processes; may be repeated",
    )
    gateway_host: Annotated[str, Flag(), Variable("GATEWAY_HOST")] = Field(
        default="127.0.0.1", description="where task apps reach the gateways of jobs"
    )

    @field_validator("task_urls")
    @classmethod
    def _add_defaults(cls, urls: frozenset[str], info: ValidationInfo) -> frozenset[str]:
        return frozenset(url.rstrip("/") for url in (*info.data.get("default_urls", ()), *urls))


class Settings(SupervisorSettings, Bounds, ServiceSettings):
    """The settings of the service, and its limits on requests and jobs."""

    port: Port = 8100
    api_key: Annotated[SecretStr | None, Key(TRAINER_KEY)] = Field(
        default=None, description="absent: the service answers this machine only"
    )
    database_url: Annotated[str, Flag(), Variable("TURNWISE_DATABASE_URL")] = Field(
        default_factory=lambda settings: find_database(settings["data_dir"]),
        repr=False,
        description="sqlite:///FILE or postgresql://USER:PASSWORD@HOST/DATABASE; absent: "
        "DATA_DIR/turnwise.db",
    )
    jobs: Annotated[bool, Flag("--jobs/--no-jobs")] = Field(
        default=True, description="--no-jobs only shows the runs of DATA_DIR"
    )
    public_url: Annotated[str | None, Flag(), Variable("PUBLIC_URL")] = Field(
        default=None,
        description="where browsers find the dashboard, for the log; absent: the address that is listened on",
    )
    key_command: Annotated[str | None, Flag(), Variable("KEY_COMMAND")] = Field(
        default=None, description="a command that prints the key, for the log and the page that asks for it"
    )
    exit_with_parent: Annotated[bool, Flag()] = Field(
        default=False, description="end when standard input closes"
    )
    max_connections: int = 400
    heartbeat_s: float = Field(default=15.0, description="interval of comments in an event stream")
    max_streams: int = Field(default=64, description="open event streams")
    max_queued: int = Field(default=1000, description="jobs that wait for their turn")

    @property
    def bounds(self) -> Bounds:
        """The fields of `Bounds` alone, for the process that parses posted jobs. They contain no key."""
        return Bounds.model_construct(**{name: getattr(self, name) for name in Bounds.model_fields})

    @model_validator(mode="after")
    def _check_hosts(self) -> Self:
        if self.api_key is None and not is_loopback(self.host):
            raise SettingsError(
                f"--host is {self.host!r}, which others can reach, and there is no key",
                hint=f"Set {TRAINER_KEY} or {TRAINER_KEY}_FILE, or listen on 127.0.0.1.",
            )
        if is_wildcard(self.gateway_host):
            raise SettingsError(
                f"--gateway-host is {self.gateway_host!r}, which is no address that a task app could call",
                hint="Name this machine by an address that the task apps can reach.",
            )
        return self


def find_database(data_dir: Path) -> str:
    """Return the default database URL for a data directory."""
    return f"sqlite:///{data_dir.resolve() / 'turnwise.db'}"
