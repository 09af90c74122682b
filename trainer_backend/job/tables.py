"""The tables of a job TOML about models, processes and records; `schema` has the others."""

import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator
from pydantic.fields import FieldInfo

from shared_schemas.base import Body
from shared_schemas.prefixes import MODULE
from shared_schemas.urls import HOST_OR_IPV6
from trainer_backend.job.addresses import checked_url, fault_in

# What every table of a job is.


class Table(Body):
    """A table of the job; no number in it may be infinite or NaN."""

    model_config = ConfigDict(allow_inf_nan=False)


# One or two parts; a path would begin with / or . or ~ or have more of them.
HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9_][\w.-]*", re.ASCII)


class ModelTable(Table):
    """[model]"""

    preset: str | None = Field(default=None, description="a small model built from its config")
    path: Path | None = Field(default=None, description="a local Hugging Face folder")
    name: str | None = Field(
        default=None,
        description="a model of the Hugging Face hub, such as `Qwen/Qwen3-0.6B`, or of its cache",
    )
    revision: str | None = Field(
        default=None, min_length=1, description="branch, tag or commit of `name`; absent: main"
    )
    tool_call_format: str | None = Field(
        default=None, description="the model's syntax of tool calls; absent: read from its chat template"
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="passed to the chat template, such as `enable_thinking = false`"
    )
    vocab_size: int = Field(
        default=1024,
        ge=300,
        le=65536,
        description="size of the tokenizer that a preset trains on the job's prompts",
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = Field(
        default="auto", description="device of training and serving; auto takes cuda, then mps, then cpu"
    )

    @property
    def source(self) -> str:
        """The model's name for messages: the preset, the folder, or the name with its revision."""
        name = f"{self.name} at {self.revision}" if self.revision else self.name
        return str(self.preset or self.path or name)

    @field_validator("name")
    @classmethod
    def _is_a_hub_name(cls, name: str | None) -> str | None:
        if name is not None and not HUB_NAME.fullmatch(name):
            raise ValueError(
                "a model of the hub is named as 'Qwen/Qwen3-0.6B' is; for a folder, did you mean model.path?"
            )
        return name


# Keys of [services] that are settings of the task app, under its own names.
TASK_APP_SETTINGS = (
    "gymnasium_modules", "verifiers_modules", "verifiers_python", "textarena_python",
    "reasoning_gym_python", "mcp_servers", "allowed_environment_hosts",
)  # fmt: skip
Module = Annotated[str, Field(max_length=200, pattern=MODULE)]
Host = Annotated[str, Field(min_length=1, max_length=300, pattern=HOST_OR_IPV6)]


class ServicesTable(Table):
    """[services]"""

    # No repr: a user name and password given here by mistake must not appear in an error.
    task_url: tuple[str, ...] = Field(
        default=(),
        max_length=256,
        repr=False,
        description="task apps, one URL or a list; `dns+http://name:port` is all addresses of a name "
        "(docs/operations.md); absent: the job starts one of its own",
    )
    task_api_key: SecretStr | None = Field(
        default=None,
        description="their key; absent: the environment variable ENVIRONMENT_API_KEY, or the file that "
        "ENVIRONMENT_API_KEY_FILE names",
    )
    task_plugins: tuple[Path, ...] = Field(
        default=(),
        max_length=64,
        description="Python files with environments or policies of your own, for the task app that the job "
        "starts (docs/plugins.md)",
    )
    task_plugins_sha256: tuple[str, ...] = Field(
        default=(),
        max_length=64,
        description="SHA-256 of each file of task_plugins; a run refuses a file with another one",
    )
    gymnasium_modules: tuple[Module, ...] = Field(
        default=(),
        max_length=64,
        description="modules that the task app that the job starts imports for the environments that they "
        "register with gymnasium; like the next six, absent: as its environment variable says "
        "(docs/foreign.md)",
    )
    verifiers_modules: tuple[Module, ...] = Field(
        default=(), max_length=64, description="tasksets that it may play as `verifiers:MODULE`"
    )
    verifiers_python: Path | None = Field(
        default=None, description="the Python of the environment that has verifiers"
    )
    textarena_python: Path | None = Field(
        default=None, description="the one that has textarena, for `textarena:ID`"
    )
    reasoning_gym_python: Path | None = Field(
        default=None, description="the one that has reasoning-gym, for `reasoning_gym:NAME`"
    )
    mcp_servers: Path | None = Field(default=None, description="the file of MCP servers, for `mcp:NAME`")
    allowed_environment_hosts: tuple[Host, ...] = Field(
        default=(), max_length=64, description="hosts (or host:port) that the URL in an env_name may name"
    )
    task_apps: int = Field(
        default=1,
        ge=1,
        le=64,
        description="task apps that the job starts, a process each; more than one pays where episodes take "
        "longer than the model, as a scripted teacher's do",
    )
    gateway_host: str = Field(
        default="127.0.0.1", description="address that the job's own gateway listens on"
    )
    gateway_port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="0 takes a free port; further gateways take the ports after it",
    )
    gateways: int = Field(
        default=1,
        ge=1,
        le=64,
        description="gateways, a process each; a rollout asks one of them all. More than one needs [cluster]",
    )
    request_timeout_s: float = Field(
        default=60.0, gt=0, description="time limit of a control request to a task app"
    )
    iteration_timeout_s: float = Field(
        default=1800.0, gt=0, description="time limit of collecting an iteration"
    )
    task_app_wait_s: float = Field(
        default=60.0,
        ge=0,
        le=86_400,
        description="how long to wait for a task app of task_url to come back when none answers",
    )

    @field_validator("task_url")
    @classmethod
    def _each_address_once(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if fault := fault_in(url):
                raise ValueError(f"task_url {fault}")
        duplicates = [url for url, count in Counter(url.rstrip("/") for url in urls).items() if count > 1]
        if duplicates:
            raise ValueError(f"task_url names {duplicates[0]} twice, and each task app is asked once")
        return urls

    @property
    def task_app_variables(self) -> dict[str, str]:
        """The environment variables of the task app that the job starts, for the keys that are given."""
        variables = {}
        for name in TASK_APP_SETTINGS:
            value = getattr(self, name)
            if value:
                text = ",".join(value) if isinstance(value, tuple) else str(value)
                variables[f"TURNWISE_{name.upper()}"] = text
        return variables


class ClusterTable(Table):
    """[cluster]: the job's roles run as processes of their own; absent: all in one."""

    launcher: Literal["local", "external", "ray"] = Field(
        default="local",
        description="who starts them. local: this process, on this machine; external: somebody else starts "
        "the learner, which has `learner.url`, and the vLLM servers of `inference.urls`; ray: Ray, on "
        "the nodes where it has room (docs/cluster.md)",
    )
    ray_address: str = Field(
        default="auto",
        pattern=r"^(auto|(\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5})$",
        description="with launcher = 'ray': the address of Ray's head, `host:6379`; auto: the one of this "
        "machine",
    )
    wait_s: float = Field(
        default=600.0,
        gt=0,
        le=604_800,
        description="how long to wait, at the start and each time that a process is lost: with launcher = "
        "'external' for the learner of `learner.url`, with launcher = 'ray' for a place",
    )

    @field_validator("ray_address")
    @classmethod
    def _has_a_port(cls, address: str) -> str:
        if address != "auto" and not 0 < int(address.rpartition(":")[2]) < 65536:
            raise ValueError(f"ray_address is {address!r}, and ports are from 1 to 65535")
        return address


_VLLM_NAME = re.compile(r"[a-zA-Z][\w-]*", re.ASCII)
_OF_THE_CONTRACT = "without it, exact tokens and log-probs could not be had"
# Arguments of vLLM's server that a run sets, with the reason.
VLLM_OWN = {
    **dict.fromkeys(("model", "served_model_name", "tokenizer"), "it is the model of [model]"),
    **dict.fromkeys(("host", "port", "uds"), "it starts its servers on free ports of the loopback"),
    "api_key": "it would be the one who has to know the key",
    "max_model_len": "it is inference.max_model_len",
    "dtype": "it is the learner's precision, or the canary would fail",
    "enable_scale_out": _OF_THE_CONTRACT,
    "logprobs_mode": _OF_THE_CONTRACT,
    "max_logprobs": _OF_THE_CONTRACT,
    "generation_config": _OF_THE_CONTRACT,
    "enable_prompt_tokens_details": "metrics of reused prompt tokens are made of it",
    "hf_overrides": "it is the model of [model], and vLLM ignores names that the model's config lacks",
    "worker_extension_cls": "it loads the weights",
    "weight_transfer_config": "it is weight_transfer.backend",
}

# For a sample, and to find a wedged server beside it; the most that a task app waits for an answer.
_SAMPLE_S, _LONGEST_REQUEST_S = 180.0, 3_600.0


class InferenceTable(Table):
    """[inference]"""

    engine: Literal["local", "vllm"] = Field(
        default="local",
        description="where the actor samples. local: in the trainer's process; vllm: at vLLM servers "
        "(docs/vllm.md)",
    )
    urls: tuple[str, ...] = Field(
        default=(),
        max_length=256,
        repr=False,
        description="vLLM servers, a replica of the actor each; absent: the run starts `replicas` of its own",
    )
    replicas: int = Field(
        default=1, ge=1, le=256, description="vLLM servers that the run starts where `urls` is empty"
    )
    vllm_python: Path | None = Field(
        default=None,
        description="the Python of the environment that has vLLM, for servers that the run starts",
    )
    vllm: dict[str, Any] = Field(
        default_factory=dict,
        description="arguments of servers that the run starts, under vLLM's own names, such as "
        "`tensor_parallel_size = 2`",
    )
    weight_update: Literal["wait", "keep"] = Field(
        default="wait",
        description="at a vLLM server: wait lets running requests end before new weights are loaded; keep "
        "has them go on with the new weights",
    )
    replica_wait_s: float = Field(
        default=300.0,
        gt=0,
        le=86_400,
        description="how long a vLLM server may take to start or to load weights, and how long the run waits "
        "when none serves; then it saves and ends. A server of the run's own that stays away so long is "
        "started anew, and the run waits as long again",
    )
    own_process: bool = Field(
        default=False,
        description="the local engine runs beside its gateway, in a process of its own, and not in the "
        "gateway's: parsing and rendering requests then hold up no step of it. It needs [cluster]",
    )
    threads: int = Field(default=1, ge=1, le=256, description="torch threads while rollouts are collected")
    max_running: int = Field(default=64, ge=1, le=4096, description="requests that are decoded together")
    max_model_len: int = Field(default=1024, ge=32, description="prompt + response, in tokens")
    kept_prefixes: int | None = Field(
        default=None,
        ge=0,
        le=4096,
        description="finished prompts + responses whose keys and values are kept for prompts that begin like "
        "them; absent: as many as max_running; 0: every prompt is computed anew",
    )
    cache_gib: float | None = Field(
        default=None,
        gt=0,
        description="on CUDA: the most GiB of keys and values; requests that do not fit wait. Absent: what "
        "max_running and kept_prefixes can take, as far as the device has it",
    )
    deterministic: bool = Field(
        default=False,
        description="decode one request at a time and keep nothing of finished ones: slower, and on a CPU a "
        "killed and resumed run has bit for bit the weights of an uninterrupted one",
    )

    @property
    def cache_bytes(self) -> int | None:
        return None if self.cache_gib is None else int(self.cache_gib * 2**30)

    @property
    def replica_patience_s(self) -> float:
        """How long the run waits when no replica serves: its own servers are started anew meanwhile."""
        return self.replica_wait_s * (1 if self.vllm_python is None else 2)

    @property
    def asks(self) -> dict[str, float]:
        """Config of the actor's policy: it is as patient as the run, so that it sees a replica come back."""
        if self.engine == "local":
            return {}
        return {"request_timeout_s": min(self.replica_patience_s + _SAMPLE_S, _LONGEST_REQUEST_S)}

    @field_validator("urls")
    @classmethod
    def _each_server_once(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        if len({checked_url(url, "urls") for url in urls}) < len(urls):
            raise ValueError("urls names a server twice")
        return urls

    @field_validator("vllm")
    @classmethod
    def _arguments_of_vllm(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        """Refuse what is no argument, and what the run itself sets."""
        for name, value in arguments.items():
            if not _VLLM_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no name of an argument; write it as vLLM does, without --")
            if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
                raise ValueError(f"{name} holds lists or tables in a list; vLLM has no such argument")
            key = name.replace("-", "_")
            if key in VLLM_OWN:
                raise ValueError(f"{name} is the run's own to set: {VLLM_OWN[key]}")
        return arguments

    @property
    def slots(self) -> int:
        """Requests that are decoded together.

        The composition of a batch changes the last bits of a number.
        """
        return 1 if self.deterministic else self.max_running

    @property
    def prefix_slots(self) -> int:
        """Finished prompts + responses that are kept; which ones depends on the order of events."""
        if self.deterministic:
            return 0
        return self.max_running if self.kept_prefixes is None else self.kept_prefixes


# How long ranks wait for each other: they import torch at their own pace, nodes start one after the other.
RANKS_JOIN_S = 600.0


class LearnerTable(Table):
    """[learner]: the learner's processes; read with [cluster]."""

    nnodes: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="nodes that the learner's ranks are on; more than one needs cluster.launcher = 'ray' or "
        "'external'",
    )
    nproc_per_node: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="ranks on a node, a GPU each: they hold a share of the weights, the gradient and the "
        "optimizer each (FSDP2), and compute a share of every update",
    )
    data_parallel_replicate_degree: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="how many groups of ranks hold all weights each; 1: all ranks together do. As many "
        "as there are nodes: weights are gathered within a node alone",
    )
    fsdp_reshard_after_forward: bool = Field(
        default=True,
        description="free a layer's gathered weights after its forward pass and gather them again for the "
        "backward pass: less memory, half as much communication again",
    )
    fsdp_cpu_offload: bool = Field(
        default=False,
        description="keep each rank's share of weights, gradient and optimizer in main memory, and take the "
        "optimizer's step there; needs several ranks",
    )
    timeout_s: float = Field(
        default=600.0,
        gt=0,
        le=86_400,
        description="seconds that the learner may be silent in a call, of which the warm-up alone reports "
        "progress, and that a rank waits for the others in a collective. Loading a model may always take "
        f"3600, and the ranks' joining {RANKS_JOIN_S:g}",
    )
    max_restarts: int = Field(
        default=3,
        ge=0,
        le=1000,
        description="how often a run goes on from its newest checkpoint after the learner's process was lost",
    )
    url: str = Field(
        default="",
        repr=False,
        description="with cluster.launcher = 'external': the address of the learner, whose key both sides "
        "have in the environment variable TURNWISE_LEARNER_KEY",
    )

    @property
    def ranks(self) -> int:
        """How many processes the learner is."""
        return self.nnodes * self.nproc_per_node

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        return checked_url(url, "url") if url else ""


class WeightTransferTable(Table):
    """[weight_transfer]"""

    backend: Literal["memory", "folder", "nccl"] | None = Field(
        default=None,
        description="how new weights reach the engine. memory: copied within the process; folder: written to "
        "`RUN/weights/version_n` and loaded; nccl: sent by the learner's process to vLLM servers, tensor by "
        "tensor (by gloo where `model.device` is a CPU); absent: folder with [cluster] or vLLM, otherwise "
        "memory",
    )


class WandbTable(Table):
    """sinks.wandb"""

    project: str = Field(min_length=1, description="project of the run")
    entity: str | None = Field(default=None, description="user or team; absent: the default one")
    name: str | None = Field(default=None, description="name of the run; absent: its directory's name")
    mode: Literal["online", "offline"] | None = Field(
        default=None, description="absent: WANDB_MODE, else online"
    )


class TrackioTable(Table):
    """sinks.trackio"""

    project: str = Field(min_length=1, description="project of the run")
    name: str | None = Field(default=None, description="name of the run; absent: its directory's name")
    space_id: str | None = Field(
        default=None,
        description="a Space of Hugging Face that keeps the run; absent: TRACKIO_SPACE_ID or "
        "TRACKIO_SERVER_URL, else the folder that `trackio show` reads",
    )


class SinksTable(Table):
    """[sinks]"""

    tensorboard: bool = Field(
        default=False,
        description="event files in RUN/tensorboard; needs `pip install 'turnwise[tensorboard]'`",
    )
    wandb: WandbTable | None = Field(
        default=None,
        description='`{ project = "…" }`, also `entity`, `name`, `mode` (online, offline); needs '
        "`pip install 'turnwise[wandb]'`",
    )
    trackio: TrackioTable | None = Field(
        default=None,
        description="`{ project = \"…\" }`, also `name`, `space_id`; needs `pip install 'turnwise[trackio]'`",
    )


class RetentionTable(Table):
    """[retention]: read by `turnwise trainer`, which indexes runs in its database; absent keys keep all."""

    decisions_iterations: int | None = Field(
        default=None,
        ge=1,
        description="the database keeps the decisions of this many newest iterations; it keeps all rollouts "
        "and metrics, and the run directory keeps everything",
    )
    decisions_days: float | None = Field(
        default=None,
        gt=0,
        description="the same by age, in days since their file was written; applied when the run has news "
        "and when the service starts",
    )
    rollout_files_iterations: int | None = Field(
        default=None,
        ge=1,
        description="the run directory keeps the rollout files of this many newest iterations and of "
        "evaluations; older ones are deleted there and in the database",
    )


def table_model(field: FieldInfo) -> type[BaseModel]:
    """Return the model class of a field of JobConfig."""
    options = (field.annotation, *get_args(field.annotation))
    return next(item for item in options if isinstance(item, type) and issubclass(item, BaseModel))
