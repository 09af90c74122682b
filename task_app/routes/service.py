"""Routes about the task app itself: /, /health, /info, /task_info, and /metrics for Prometheus."""

from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Annotated, Any

from fastapi import Query, Request
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric
from pydantic import Field, JsonValue
from pydantic_core import to_json
from starlette.responses import Response

from service_kit.errors import NoKeyConfigured
from service_kit.keys import presented_keys
from service_kit.observed import METRICS_CONTENT, metrics_response
from shared_schemas.base import Reply
from shared_schemas.json_text import encodable_json
from shared_schemas.messages import ToolSpec
from shared_schemas.prefixes import PREFIXES
from task_app.environment_calls import list_tools, reset_environment
from task_app.environments.foreign.kinds import FOREIGN
from task_app.episode.release import begin_close
from task_app.errors import InvalidRequest, ShuttingDown
from task_app.protocols import Environment
from task_app.routes.wire import LegacyObservation, Router, legacy_observation, observation_json
from task_app.services import Services, get_services

router = Router(tags=["service"])

SERVICE = "turnwise-task-app"

SeedRange = Annotated[list[int], Field(min_length=2, max_length=2, description="the first and the last")]


class RootReply(Reply):
    """The name of the service, as a sign that it answers."""

    status: str
    service: str


class HealthAuth(Reply):
    required: bool


class HealthService(Reply):
    base_url: str


class HealthReply(Reply):
    """The service is healthy; `authorized` is null if the request has no key."""

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
    """The optional features of the service, and the names of plug-ins that requests may use."""

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
    """Environments whose `env_name` begins with a prefix: the name's form, and the config's schema."""

    env_name: str
    plays: str
    how: str
    config: dict[str, Any]


class InfoReply(Reply):
    """The service's plug-ins and limits; each environment and policy with the JSON Schema of its config."""

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
    """The fields that are the same for all tasks of an environment."""

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
    """The set of an environment's tasks."""

    taskset: TaskSet


class TaskObservation(LegacyObservation):
    seed: int


class TaskMetadata(Reply):
    seed: int


class TaskInfo(_AboutTask):
    """The task of one seed, with the first observation after a reset with this seed."""

    observation: TaskObservation
    task_metadata: TaskMetadata


@router.head("/", include_in_schema=False)
@router.get("/")
async def show_root() -> RootReply:
    return RootReply(status="ok", service=SERVICE)


@router.get("/health", response_model_exclude_none=True)
async def show_health(request: Request) -> HealthReply:
    """Tell whether the service is healthy and, if the request has an API key, whether the key is valid."""
    keys = get_services(request).keys
    if not keys.configured and keys.needed:
        raise NoKeyConfigured(keys.variable)
    if get_services(request).draining:
        raise ShuttingDown(
            "draining: running work may end and be fetched, nothing new is taken", code="draining"
        )
    headers = request.scope["headers"]
    return HealthReply(
        healthy=True,
        status="healthy",
        auth=HealthAuth(required=keys.configured),
        service=HealthService(base_url=str(request.base_url).rstrip("/")),
        authorized=(keys.match(headers) or not keys.configured) if presented_keys(headers) else None,
    )


@router.get("/metrics", response_class=Response, responses={200: {"content": METRICS_CONTENT}})
async def show_metrics(request: Request) -> Response:
    """Return counts, latencies and the current state in Prometheus' text format (docs/operations.md)."""
    services, sockets = get_services(request), request.app.state.openenv_sockets.open
    return metrics_response(
        lambda: families(services, version=request.app.version, sockets=sockets),
        accept=request.headers.get("accept", ""),
    )


info_router = Router(tags=["info"])

SEED_RANGE = [0, 2**31 - 2]
# A seed in a query string, where every number is text. Seeds in bodies have the type
# shared_schemas.rollouts.Seed.
QuerySeed = Annotated[int, Field(ge=SEED_RANGE[0], le=SEED_RANGE[1])]


@info_router.get("/info", response_model=InfoReply)
async def show_info(request: Request) -> Response:
    """Return the service's plug-ins and limits."""
    return _reply_json(_describe_service(get_services(request), request))


def _reply_json(content: Any) -> Response:
    """Return a JSON response with settings of plug-ins.

    An infinite default becomes null, because JSON has no infinity, and lone surrogates are replaced.
    """
    return Response(to_json(encodable_json(content), inf_nan_mode="null"), media_type="application/json")


def _describe_service(services: Services, request: Request) -> dict[str, Any]:
    endpoints: dict[str, list[str]] = {}  # by their first word: `env`, `policy`, `rollout` and so on
    for path in request.app.state.paths:
        endpoints.setdefault(path.split("/")[1] or "root", []).append(path)
    return {
        "service": {
            "name": SERVICE,
            "task": sorted(services.boards.playable),
            "version": request.app.version,
            "base_url": str(request.base_url).rstrip("/"),
            "endpoints": endpoints,
            "instance_id": services.instance_id,
        },
        "dataset": {"seed_range": SEED_RANGE, "splits": ["train"]},
        "rubrics": None,
        "inference": {
            "base_url": services.settings.inference_url,
            "endpoints": {"chat_completions": "/v1/chat/completions"},
            "default_model": services.settings.inference_model,
            "supports_proxy": False,
            "allowed_hosts": list(services.settings.inference_hosts),
        },
        "capabilities": _list_capabilities(services),
        "limits": services.settings.limits(),
        "environments": {
            name: plugin.config.model_json_schema() for name, plugin in services.boards.playable.items()
        },
        "environment_prefixes": {
            name: {
                "env_name": f"{name}:{prefix.argument}",
                "plays": prefix.plays,
                "how": prefix.how,
                "config": FOREIGN[name].config.model_json_schema(),
            }
            for name, prefix in PREFIXES.items()
        },
        "policies": {
            name: plugin.config.model_json_schema() for name, plugin in services.boards.policies.items()
        },
    }


@info_router.get("/task_info", response_model=TaskSetInfo | TaskInfo | tuple[TaskInfo, ...])
async def show_task_info(
    request: Request,
    seed: Annotated[tuple[QuerySeed, ...], Query()] = (),
    seeds: Annotated[tuple[QuerySeed, ...], Query()] = (),
    env_name: Annotated[str | None, Query(max_length=200)] = None,
) -> Response:
    """Describe the tasks of an environment, or the tasks of given seeds.

    Without a seed, return the task set; with one seed, its task; with several, a list of their tasks. Seeds
    are given as `seed` or `seeds`, also repeatedly. Without `env_name`, the first environment is described.
    """
    services = get_services(request)
    seeds_in_order = (*seed, *seeds)
    if len(seeds_in_order) > services.settings.max_seeds_per_request:
        raise InvalidRequest(
            f"{len(seeds_in_order)} seeds; at most {services.settings.max_seeds_per_request}", where="seed"
        )
    boards = services.boards
    name = boards.environment_name(env_name) if env_name else next(iter(boards.environments))
    environment = boards.environment(name, {})
    if not seeds_in_order:
        about = _describe_tasks(services, environment, await services.fetch_tools(environment))
        taskset = {
            "id": f"{name}_procedural",
            "name": name,
            "version": "1.0.0",
            "splits": ["train"],
            "default_split": "train",
            "description": f"one task a seed; scored by the {environment.outcome_definition}",
            "seed_range": SEED_RANGE,
            "default_seed": 0,
            "config": boards.environment_plugin(name).config().model_dump(mode="json"),
        }
        return _reply_json({**about, "taskset": taskset, "environments": sorted(boards.playable)})
    try:
        tasks = [await _describe_task(services, environment, number) for number in seeds_in_order]
    finally:
        begin_close(environment)
    return _reply_json(tasks[0] if len(tasks) == 1 else tasks)


def _list_capabilities(services: Services) -> dict[str, Any]:
    return {
        "supports_rollout": True,
        "supports_env_lifecycle": True,
        "supports_decision_rewards": True,
        "requires_api_key_header": True,
        "environments": sorted(services.boards.playable),
        "policies": sorted(services.boards.policies),
        "interactions": sorted(services.boards.interactions),
        "number_interactions": sorted(
            name for name, entry in services.boards.interactions.items() if entry.ground_truth_is_number
        ),
        "reward_functions": {name: plug.mode for name, plug in services.boards.reward_functions.items()},
    }


def _describe_tasks(
    services: Services, environment: Environment, tools: Sequence[ToolSpec]
) -> dict[str, Any]:
    """Return the JSON of `_AboutTask`: the fields that are the same for all tasks of an environment."""
    return {
        "task": {"id": environment.name, "name": environment.name, "outcome": environment.outcome_definition},
        "environment": environment.name,
        "environments": [environment.name],
        "action_space": {"type": "tool_calls", "tools": [tool.model_dump(mode="json") for tool in tools]},
        "dataset": {"seed_range": SEED_RANGE},
        "rubric": {},  # the contract wants an object; there is no judge here
        "inference": {
            "model": services.settings.inference_model,
            "inference_url": services.settings.inference_url,
            "supports_proxy": False,
        },
        "capabilities": _list_capabilities(services),
        "limits": services.settings.limits(),
    }


async def _describe_task(services: Services, environment: Environment, seed: int) -> dict[str, Any]:
    observation = await services.threads.run("environment.reset", reset_environment, environment, seed)
    return {
        **_describe_tasks(services, environment, list_tools(environment)),
        "observation": {"seed": seed, **legacy_observation(observation_json(observation))},
        "dataset": {"seed": seed, "seed_range": SEED_RANGE},
        "task_metadata": {"seed": seed},
    }


def families(services: Services, *, version: str, sockets: int) -> Iterator[Metric]:
    facts = {"version": version, "instance_id": services.instance_id}
    yield InfoMetricFamily("turnwise_task_app", "Which task app this is.", facts)
    yield from _make_gauges(services, sockets)
    yield services.metrics.requests.reply_family("turnwise_http_requests")
    latency = HistogramMetricFamily(
        "turnwise_http_request_seconds", "From the request's head to the answer's end.", labels=["route"]
    )
    for route, histogram in services.metrics.requests.latency.items():
        latency.add_metric([route], buckets=histogram.cumulative(), sum_value=histogram.sum_s)
    yield latency
    yield from services.metrics.registry.collect()


def _make_gauges(services: Services, sockets: int) -> Iterator[Metric]:
    runner = services.runner
    sessions: dict[str, Sized] = {
        "env": services.environments,
        "policy": services.policies,
        "interaction": services.interaction_sessions,
        "capture": services.captures.sessions,
    }
    counts = {kind: len(live) for kind, live in sessions.items()}
    yield _make_gauge("turnwise_sessions", "Live sessions.", counts, "kind")
    sentence = "Interactions that are not finalised yet, of rollouts and sessions."
    yield _make_gauge("turnwise_interactions", sentence, len(services.interactions))
    yield _make_gauge("turnwise_rollouts", "Rollouts that have not ended.", runner.unfinished(), "state")
    sentence = "Rollouts held: not ended, or not acknowledged."
    yield _make_gauge("turnwise_rollouts_held", sentence, len(runner.results))
    sentence = "Bytes of rollout requests and results that are not acknowledged, and of captures."
    yield _make_gauge("turnwise_held_bytes", sentence, services.captures.held.total)
    yield _make_gauge("turnwise_openenv_sockets", "Open sockets of OpenEnv clients.", sockets)


def _make_gauge(name: str, sentence: str, counts: Mapping[str, int] | int, *label: str) -> Metric:
    """Return a gauge with a single count, or with one count per value of the label."""
    if isinstance(counts, int):
        return GaugeMetricFamily(name, sentence, counts)
    family = GaugeMetricFamily(name, sentence, labels=label)
    for value, count in counts.items():
        family.add_metric([value], count)
    return family
