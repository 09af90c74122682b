"""The settings of the task app, with their environment variables, bounds and defaults.

For example, `TURNWISE_MAX_SESSIONS` sets the field `max_sessions`. Lists are comma separated. The variables
for API keys have no such prefix, because other task apps use the same names: `ENVIRONMENT_API_KEY` contains
the key, or `ENVIRONMENT_API_KEY_FILE` names a file that contains it. `ENVIRONMENT_API_KEY_ALIASES` lists
further keys. `--help` imports this module, so keep its imports few.
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator

from service_kit.errors import ServiceError, SettingsError
from service_kit.keys import TASK_APP_KEY
from service_kit.settings import (
    BodySeconds,
    Flag,
    HeaderBytes,
    HeaderSeconds,
    Key,
    Port,
    ServiceSettings,
    SettingsTable,
    Variable,
    split_list,
)
from shared_schemas.chat import StructuredOutput
from shared_schemas.prefixes import MODULE
from shared_schemas.urls import HOST_OR_IPV6, LOOPBACK
from task_app.environments.foreign.mcp_servers import Servers, read_servers

# Settings that name a Python interpreter are called after a library installed there, with this suffix.
_PYTHON = "_python"
_LAST_PORT = 65_535


def _check_host(host: str) -> str:
    if len(host) > 300 or not re.fullmatch(HOST_OR_IPV6, host):
        raise ValueError("expected host or host:port")
    return host


Host = Annotated[str, AfterValidator(_check_host)]


def _refuse_own_key(name: str) -> str:
    if name.startswith(TASK_APP_KEY):
        raise ValueError(f"{name} is a key of this service; its owner can use the whole service")
    return name


def _check_url(url: str) -> str:
    from task_app.policies.openai_config import chat_completions_url

    try:
        chat_completions_url(url, allowed_hosts=(urlsplit(url).netloc,))
    except (ServiceError, ValueError) as exc:
        raise ValueError(f"it is no http or https URL with a host, or holds a password: {exc}") from exc
    return url


InferenceUrl = Annotated[str, Field(max_length=2_000), AfterValidator(_check_url)]

VariableName = Annotated[
    str, Field(max_length=200, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$"), AfterValidator(_refuse_own_key)
]

Module = Annotated[str, Field(max_length=200, pattern=MODULE)]

Seconds = Annotated[float, Field(gt=0, le=86_400)]
Bytes = Annotated[int, Field(ge=1_024, le=1 << 30)]


class _Keys(Key):
    """Annotates the field of API keys: reads the variables `name` (one key) and `<name>_ALIASES` (a list)."""

    def read(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        primary = super().read(environ)
        keys = [primary.get_secret_value()] if primary else []
        return tuple(dict.fromkeys([*keys, *split_list(environ.get(f"{self.name}_ALIASES", ""))]))


class Reach(SettingsTable):
    """Settings for environments of other libraries: allowed hosts and modules, interpreters, and limits."""

    allowed_environment_hosts: tuple[Host, ...] = Field(
        default=LOOPBACK, description="hosts (or host:port) that the URL in an env_name may name"
    )
    gymnasium_modules: tuple[Module, ...] = Field(
        default=(), description="modules imported for the environments that they register with gymnasium"
    )
    verifiers_python: Path | None = Field(
        default=None,
        description="the Python that has verifiers, for env_name verifiers:MODULE; absent: this one",
    )
    textarena_python: Path | None = Field(
        default=None, description="the one that has textarena, for env_name textarena:ID"
    )
    reasoning_gym_python: Path | None = Field(
        default=None, description="the one that has reasoning-gym, for env_name reasoning_gym:NAME"
    )
    verifiers_modules: tuple[Module, ...] = Field(
        default=(), description="tasksets that it may import; they run in its process"
    )
    mcp_servers: Annotated[Servers, BeforeValidator(read_servers)] = Field(
        default_factory=dict,
        repr=False,
        description="the file of MCP servers, processes or URLs with headers, for env_name mcp:NAME",
    )
    environment_deadline_s: Seconds = Field(
        default=60.0, description="for one answer of a foreign environment"
    )
    max_environment_bytes: Bytes = Field(
        default=4 << 20, description="of one answer of a foreign environment"
    )

    def python_with(self, library: str) -> str:
        """Return the setting `<library>_python`, or without it the Python interpreter of this process."""
        return str(getattr(self, library + _PYTHON) or sys.executable)


class Settings(Reach, ServiceSettings):
    """All settings of the task app. `GET /info` shows those that `limits` returns."""

    prefix: ClassVar[str] = "TURNWISE_"

    port: Port = 8001
    api_keys: Annotated[tuple[SecretStr, ...], _Keys(TASK_APP_KEY)] = Field(default=(), repr=False)
    allowed_inference_hosts: Annotated[
        tuple[Host, ...], Flag("--allow-inference-host"), Variable("TURNWISE_ALLOWED_INFERENCE_HOSTS")
    ] = Field(
        default=LOOPBACK,
        description="host or host:port that an inference_url may name, as those of "
        "TURNWISE_ALLOWED_INFERENCE_HOSTS may be; may be repeated",
    )
    plugins: Annotated[tuple[Path, ...], Flag("--plugins")] = Field(
        default=(),
        description="a Python file with environments or policies of your own (docs/plugins.md); "
        "may be repeated",
    )
    interaction_config_path: Annotated[
        Path | None, Flag("--interactions"), Variable("TURNWISE_INTERACTION_CONFIG_PATH")
    ] = Field(default=None, description="the YAML or TOML file of interactions (docs/plugins.md)")
    state_dir: Annotated[Path | None, Flag(), Variable("TURNWISE_STATE_DIR")] = Field(
        default=None,
        description="write sessions there: after a restart or a kill each continues from its last decision",
    )
    replicas: Annotated[int | None, Flag()] = Field(
        default=None,
        ge=1,
        le=256,
        description="serve so many task apps on consecutive ports, and restart each when it dies",
    )
    exit_with_parent: Annotated[bool, Flag("--exit-with-parent")] = Field(
        default=False, description="end when standard input closes"
    )
    inference_url: InferenceUrl | None = Field(
        default=None, description="for policies that name none; /info shows it as inference.base_url"
    )
    inference_model: str | None = Field(
        default=None, min_length=1, max_length=500, description="its model; /info: inference.default_model"
    )
    open_routes: tuple[Literal["metrics", "openenv"], ...] = Field(
        default=(),
        description="routes without a key: /metrics for a scraper, /openenv for clients without headers",
    )
    max_reply_bytes: Bytes = Field(
        default=16 << 20,
        description="of an inference server; also of the trajectory of a capture that is opened by hand",
    )
    max_rollouts_per_request: int = Field(default=1_024, ge=1, le=100_000)
    max_rollouts_held: int = Field(
        default=8_192, ge=1, le=1_000_000, description="queued, running and finished but not acknowledged"
    )
    max_held_bytes: int = Field(
        default=1 << 30,
        ge=1,
        le=1 << 40,
        description="of rollout requests and results, and of captures; beyond it no more are accepted",
    )
    max_concurrent_rollouts: int = Field(default=64, ge=1, le=10_000)
    max_page_rollouts: int = Field(default=256, ge=1, le=10_000)
    max_page_bytes: int = Field(
        default=32 << 20, ge=1, le=1 << 36, description="limit of a page, which has at least one rollout"
    )
    finished_expiry_s: float = Field(
        default=21_600.0, gt=0.0, le=1e9, description="an unacknowledged result is forgotten after this"
    )
    max_sessions: int = Field(default=1_024, ge=1, le=1_000_000, description="environments, and policies")
    session_idle_s: float = Field(default=1_800.0, gt=0.0, le=1e9)
    session_wait_s: float = Field(
        default=30.0, gt=0.0, le=3_600.0, description="wait for an earlier request on the same session"
    )
    request_deadline_s: Seconds = Field(
        default=120.0, description="limit of a reply, except whole rollouts and long polls"
    )
    policy_deadline_s: Seconds = Field(default=100.0, description="for one decision of /policy/step")
    plugin_stuck_after_s: Seconds = Field(
        default=200.0,
        description="a reset or slow step that runs longer counts as hung; where foreign environments start "
        "slowly or environment_deadline_s is long, it has to be longer than both",
    )
    max_plugin_threads: int = Field(
        default=16, ge=1, le=1_000, description="resets and slow steps at once, and hung ones at once"
    )
    max_reward_processes: int = Field(
        default=2, ge=1, le=1_000, description="child processes of each reward function"
    )
    max_reward_batch: int = Field(
        default=64, ge=1, le=10_000, description="episodes in one call of a batch reward function"
    )
    max_reward_bytes: Bytes = Field(
        default=1 << 20, description="of the answer to one call of a reward function"
    )
    reward_deadline_s: Seconds = Field(
        default=30.0, description="for one call of a reward function, whose process is then killed"
    )
    reward_start_s: Seconds = Field(default=60.0, description="for its process to start and import the file")
    reward_variables: tuple[VariableName, ...] = Field(
        default=(), description="further environment variables for its process"
    )
    interaction_deadline_s: Seconds = Field(default=60.0, description="for one call of an interaction")
    max_interaction_bytes: Bytes = Field(default=1 << 20, description="of one answer of an interaction")
    structured_output: StructuredOutput = Field(
        default=StructuredOutput.DROP,
        description="what becomes of a captured agent's response_format where tokens are recorded, since a "
        "grammar would change what is trained: drop says so in a header and in /metrics",
    )
    max_idempotency_keys: int = Field(default=65_536, ge=1, le=10_000_000)
    max_idempotency_bytes: int = Field(
        default=128 << 20, ge=1_024, le=1 << 40, description="of the answers stored for retries"
    )
    idempotency_s: float = Field(
        default=3_600.0, gt=0.0, le=1e9, description="how long an Idempotency-Key is stored"
    )
    journal_snapshot_every: int = Field(
        default=32, ge=1, le=100_000, description="decisions between two snapshots of a session"
    )
    max_header_bytes: HeaderBytes = 64 << 10
    max_header_s: HeaderSeconds = 20.0
    max_body_s: BodySeconds = 60.0
    sweep_every_s: float = Field(default=30.0, gt=0.0, le=1e6, description="interval of expiry")
    max_snapshot_bytes: Bytes = Field(default=8 << 20, description="of a snapshot before compression")
    max_snapshots_held: int = Field(
        default=1_024, ge=1, le=1_000_000, description="by snapshot_id; the least recently used goes first"
    )
    max_snapshots_bytes: int = Field(default=64 << 20, ge=1_024, le=1 << 40, description="of all snapshots")
    max_wait_s: float = Field(default=30.0, ge=0.0, le=600.0, description="of one long poll")
    max_calls_per_step: int = Field(default=16, ge=1, le=1_000)
    max_steps_per_request: int = Field(default=1_024, ge=1, le=100_000, description="of /env/step_many")
    max_frames: int = Field(
        default=240, ge=2, le=10_000, description="of one /rollouts/{rollout_id}/frames, or of one /replay"
    )
    max_replay_s: float = Field(default=20.0, gt=0.0, le=600.0, description="of an episode for its frames")
    max_seeds_per_request: int = Field(default=64, ge=1, le=10_000)
    drain_s: float = Field(
        default=5.0, ge=0.0, le=600.0, description="for running rollouts after a stop signal"
    )

    @property
    def inference_hosts(self) -> tuple[str, ...]:
        """Return the hosts that an inference_url may name, including the host of `self.inference_url`."""
        own = () if self.inference_url is None else (urlsplit(self.inference_url).netloc,)
        return (*self.allowed_inference_hosts, *own)

    def limits(self) -> dict[str, Any]:
        """Return the settings that `GET /info` shows to clients: all except keys, paths and the address."""
        hidden = {"api_keys", "state_dir", "interaction_config_path", "mcp_servers", "host", "port"}
        hidden |= {"plugins", "replicas", "exit_with_parent"}
        hidden |= {name for name in type(self).model_fields if name.endswith(_PYTHON)}
        return self.model_dump(mode="json", exclude=hidden)

    @model_validator(mode="after")
    def _check_last_port(self) -> Self:
        if self.replicas and self.port and self.port + self.replicas - 1 > _LAST_PORT:
            raise SettingsError(
                f"{self.replicas} replicas from port {self.port} on go beyond port {_LAST_PORT}",
                where="--replicas",
            )
        return self
