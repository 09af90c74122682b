"""Every setting of the task app with its environment variable, bounds and default.

`TURNWISE_MAX_SESSIONS` sets the field `max_sessions`, and so on; lists are comma separated. The keys have the
names that task apps have always used: `ENVIRONMENT_API_KEY` (or `ENVIRONMENT_API_KEY_FILE`, a file that holds
it), and `ENVIRONMENT_API_KEY_ALIASES` for more keys.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError

from service_kit.errors import SettingsError
from service_kit.keys import TASK_APP_KEY, key_from_environ
from shared_schemas.base import Body
from shared_schemas.chat import StructuredOutput
from shared_schemas.prefixes import MODULE
from shared_schemas.urls import HOST_OR_IPV6
from task_app.environments.foreign.mcp_servers import Servers, read_servers
from task_app.environments.foreign.peer import LOOPBACK, Reach
from task_app.errors import TaskAppError
from task_app.policies.openai_config import chat_completions_url

PREFIX = "TURNWISE_"
ALIASES_VARIABLE = f"{TASK_APP_KEY}_ALIASES"

_LISTS = (
    "allowed_inference_hosts", "allowed_environment_hosts", "gymnasium_modules", "verifiers_modules",
    "open_routes",
    "reward_variables",
)  # fmt: skip
# Ends the names of the settings that name a Python, after the library that it has.
_PYTHON = "_python"
Host = Annotated[str, Field(min_length=1, max_length=300, pattern=HOST_OR_IPV6)]


def _refuse_own_key(name: str) -> str:
    if name.startswith(TASK_APP_KEY):
        raise ValueError(f"{name} is a key of this service; its owner can use the whole service")
    return name


def _check_url(url: str) -> str:
    try:
        chat_completions_url(url, allowed_hosts=(urlsplit(url).netloc,))
    except (TaskAppError, ValueError) as exc:
        raise ValueError(f"it is no http or https URL with a host, or holds a password: {exc}") from exc
    return url


InferenceUrl = Annotated[str, Field(max_length=2_000), AfterValidator(_check_url)]

Variable = Annotated[
    str, Field(max_length=200, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$"), AfterValidator(_refuse_own_key)
]


Module = Annotated[str, Field(max_length=200, pattern=MODULE)]


class Settings(Body):
    """The settings; `GET /info` shows all but the keys and paths."""

    api_keys: tuple[SecretStr, ...] = Field(default=(), repr=False)
    allowed_inference_hosts: tuple[Host, ...] = Field(
        default=LOOPBACK,
        description="hosts (or host:port) that an inference_url may name",
    )
    inference_url: InferenceUrl | None = Field(
        default=None,
        description="for policies that name none; /info shows it as inference.base_url",
    )
    inference_model: str | None = Field(
        default=None, min_length=1, max_length=500, description="its model; /info: inference.default_model"
    )
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
    environment_deadline_s: float = Field(
        default=60.0, gt=0.0, le=86_400.0, description="for one answer of a foreign environment"
    )
    max_environment_bytes: int = Field(
        default=4 << 20, ge=1_024, le=1 << 30, description="of one answer of a foreign environment"
    )
    open_routes: tuple[Literal["metrics", "openenv"], ...] = Field(
        default=(),
        description="routes without a key: /metrics for a scraper, /openenv for clients without headers",
    )
    max_body_bytes: int = Field(default=1 << 20, ge=1_024, le=1 << 30)
    max_reply_bytes: int = Field(
        default=16 << 20,
        ge=1_024,
        le=1 << 30,
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
    request_deadline_s: float = Field(
        default=120.0,
        gt=0.0,
        le=86_400.0,
        description="limit of a reply, except whole rollouts and long polls",
    )
    policy_deadline_s: float = Field(
        default=100.0, gt=0.0, le=86_400.0, description="for one decision of /policy/step"
    )
    plugin_stuck_after_s: float = Field(
        default=200.0,
        gt=0.0,
        le=86_400.0,
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
    max_reward_bytes: int = Field(
        default=1 << 20, ge=1_024, le=1 << 30, description="of the answer to one call of a reward function"
    )
    reward_deadline_s: float = Field(
        default=30.0,
        gt=0.0,
        le=86_400.0,
        description="for one call of a reward function, whose process is then killed",
    )
    reward_start_s: float = Field(
        default=60.0, gt=0.0, le=86_400.0, description="for its process to start and import the file"
    )
    reward_variables: tuple[Variable, ...] = Field(
        default=(), description="further environment variables for its process"
    )
    interaction_config_path: Path | None = Field(
        default=None, description="the file of interactions, like --interactions"
    )
    interaction_deadline_s: float = Field(
        default=60.0, gt=0.0, le=86_400.0, description="for one call of an interaction"
    )
    max_interaction_bytes: int = Field(
        default=1 << 20, ge=1_024, le=1 << 30, description="of one answer of an interaction"
    )
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
    state_dir: Path | None = Field(
        default=None, description="folder for sessions, which then survive the process"
    )
    journal_snapshot_every: int = Field(
        default=32, ge=1, le=100_000, description="decisions between two snapshots of a session"
    )
    max_connections: int = Field(
        default=4_096, ge=1, le=1_000_000, description="fewer if the process may open only few files"
    )
    max_header_bytes: int = Field(
        default=64 << 10, ge=1_024, le=1 << 24, description="of a request line and its headers"
    )
    max_header_s: float = Field(
        default=20.0, gt=0.0, le=3_600.0, description="from the start of a connection to complete headers"
    )
    max_body_s: float = Field(default=60.0, gt=0.0, le=3_600.0, description="for a body to arrive")
    sweep_every_s: float = Field(default=30.0, gt=0.0, le=1e6, description="interval of expiry")
    max_snapshot_bytes: int = Field(
        default=8 << 20, ge=1_024, le=1 << 30, description="of a snapshot before compression"
    )
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
    log_level: Literal["debug", "info", "warning", "error", "critical"] = "info"
    log_format: Literal["text", "json"] = Field(default="text", description="json: one object a line")
    drain_s: float = Field(
        default=5.0, ge=0.0, le=600.0, description="for running rollouts after a stop signal"
    )

    @property
    def inference_hosts(self) -> tuple[str, ...]:
        """Hosts that an inference_url may name, with the operator's own server."""
        own = () if self.inference_url is None else (urlsplit(self.inference_url).netloc,)
        return (*self.allowed_inference_hosts, *own)

    @property
    def reach(self) -> Reach:
        """How far foreign environments reach."""
        return Reach(
            hosts=self.allowed_environment_hosts,
            deadline_s=self.environment_deadline_s,
            max_bytes=self.max_environment_bytes,
            modules=self.gymnasium_modules,
            tasksets=self.verifiers_modules,
            mcp_servers=self.mcp_servers,
            pythons={
                name.removesuffix(_PYTHON): str(value)
                for name, value in self
                if name.endswith(_PYTHON) and value is not None
            },
        )

    def with_hosts(self, hosts: Iterable[str]) -> "Settings":
        """These settings with more hosts that an inference_url may name."""
        try:
            return Settings(
                **{**dict(self), "allowed_inference_hosts": (*self.allowed_inference_hosts, *hosts)}
            )
        except ValidationError as exc:
            host = exc.errors(include_url=False)[0]["input"]
            raise SettingsError(
                f"{host!r} is no inference host; expected host or host:port", where="--allow-inference-host"
            ) from exc

    def limits(self) -> dict[str, Any]:
        """The limits for `/info`, without keys and paths."""
        hidden = {"api_keys", "state_dir", "interaction_config_path", "mcp_servers"}
        hidden |= {name for name in type(self).model_fields if name.endswith(_PYTHON)}
        return self.model_dump(mode="json", exclude=hidden)


def settings_from_environ(environ: Mapping[str, str]) -> Settings:
    """Read the settings from environment variables."""
    _check_spelling(environ)
    values: dict[str, Any] = {"api_keys": _keys(environ)}
    for name in Settings.model_fields:
        text = environ.get(PREFIX + name.upper())
        if name != "api_keys" and text is not None:
            values[name] = _split(text) if name in _LISTS else text.strip()
    try:
        return Settings.model_validate(values)
    except ValidationError as exc:
        error = exc.errors(include_url=False)[0]
        variable = PREFIX + str(error["loc"][0]).upper()
        raise SettingsError(f"{variable} is {error['input']!r}: {error['msg']}") from exc


def _check_spelling(environ: Mapping[str, str]) -> None:
    """Refuse a misspelt name; other TURNWISE_ variables belong to other services."""
    ours = {PREFIX + name.upper() for name in Settings.model_fields if name != "api_keys"}
    for name in sorted(environ):
        close = get_close_matches(name, ours, n=1, cutoff=0.9)
        if name.startswith(PREFIX) and name not in ours and close:
            raise SettingsError(f"{name} is unknown. Did you mean {close[0]!r}?")


def _keys(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The primary key and its aliases, without blanks and repetitions."""
    primary = key_from_environ(environ, TASK_APP_KEY)
    keys = [primary.get_secret_value() if primary else "", *_split(environ.get(ALIASES_VARIABLE, ""))]
    return tuple(dict.fromkeys(key for key in keys if key))


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
