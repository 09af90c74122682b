"""Pure: the replies of the routes about the task app itself, as /openapi.json declares them."""

from typing import Annotated, Any

from pydantic import Field, JsonValue

from shared_schemas.base import Reply
from shared_schemas.messages import ToolSpec
from task_app.routes.wire import LegacyObservation

SeedRange = Annotated[list[int], Field(min_length=2, max_length=2, description="the first and the last")]


class RootReply(Reply):
    """The service answers."""

    status: str
    service: str


class HealthAuth(Reply):
    required: bool


class HealthService(Reply):
    base_url: str


class HealthReply(Reply):
    """The service is healthy; `authorized` where the request has a key."""

    healthy: bool
    status: str
    auth: HealthAuth
    service: HealthService
    authorized: bool | None = None


class ServiceInfo(Reply):
    name: str
    task: tuple[str, ...]
    version: str
    base_url: str
    endpoints: dict[str, tuple[str, ...]] = Field(description="all routes by their first word")
    instance_id: str


class DatasetInfo(Reply):
    seed_range: SeedRange
    splits: tuple[str, ...] = ()
    seed: int | None = Field(default=None, description="of a task")


class InferenceEndpoints(Reply):
    chat_completions: str


class InferenceInfo(Reply):
    base_url: str | None
    endpoints: InferenceEndpoints
    default_model: str | None
    supports_proxy: bool
    allowed_hosts: tuple[str, ...]


class Capabilities(Reply):
    """What requests may use and name."""

    supports_rollout: bool
    supports_env_lifecycle: bool
    supports_decision_rewards: bool
    requires_api_key_header: bool
    environments: tuple[str, ...]
    policies: tuple[str, ...]
    interactions: tuple[str, ...]
    number_interactions: tuple[str, ...]
    reward_functions: dict[str, str]


Limits = Annotated[
    dict[str, JsonValue], Field(description="the operator's settings, as docs/operations.md names them")
]


class PrefixInfo(Reply):
    """Environments of another library: how `env_name` names them, and the JSON Schema of their config."""

    env_name: str
    plays: str
    how: str
    config: dict[str, Any]


class InfoReply(Reply):
    """What the service offers; `environments` and `policies` hold the JSON Schemas of their configs."""

    service: ServiceInfo
    dataset: DatasetInfo
    rubrics: None = Field(description="there is no judge here")
    inference: InferenceInfo
    capabilities: Capabilities
    limits: Limits
    environments: dict[str, dict[str, Any]]
    environment_prefixes: dict[str, PrefixInfo]
    policies: dict[str, dict[str, Any]]


class TaskName(Reply):
    id: str
    name: str
    outcome: str = Field(description="what its outcome_reward measures")


class ActionSpace(Reply):
    type: str
    tools: tuple[ToolSpec, ...]


class TaskInference(Reply):
    model: str | None
    inference_url: str | None
    supports_proxy: bool


class _AboutTask(Reply):
    """The facts that all tasks of an environment share."""

    task: TaskName
    environment: str
    environments: tuple[str, ...]
    action_space: ActionSpace
    dataset: DatasetInfo
    rubric: dict[str, Any] = Field(description="always empty; there is no judge here")
    inference: TaskInference
    capabilities: Capabilities
    limits: Limits


class TaskSet(Reply):
    id: str
    name: str
    version: str
    splits: tuple[str, ...]
    default_split: str
    description: str
    seed_range: SeedRange
    default_seed: int
    config: dict[str, Any]


class TaskSetInfo(_AboutTask):
    """The set of tasks of an environment."""

    taskset: TaskSet


class TaskObservation(LegacyObservation):
    seed: int


class TaskMetadata(Reply):
    seed: int


class TaskInfo(_AboutTask):
    """The task of a seed, with the first observation of its world."""

    observation: TaskObservation
    task_metadata: TaskMetadata
