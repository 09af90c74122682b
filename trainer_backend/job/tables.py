"""The tables of a job TOML about models, processes and records; `schema` has the others."""

import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, Field, SecretStr, field_validator
from pydantic.fields import FieldInfo

from shared_schemas.prefixes import MODULE
from shared_schemas.urls import HOST_OR_IPV6
from trainer_backend.core.keys import Table
from trainer_backend.inference.keys import EngineKeys, VllmKeys
from trainer_backend.job.addresses import checked_url, fault_in

# One or two parts; a path would begin with / or . or ~ or have more parts.
HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9_][\w.-]*", re.ASCII)


class ModelTable(Table):
    """[model]"""

    preset: str | None = None
    """a small model built from its config"""
    path: Path | None = None
    """a local Hugging Face folder"""
    name: str | None = None
    """a model of the Hugging Face hub, such as `Qwen/Qwen3-0.6B`, or of its cache"""
    revision: str | None = Field(default=None, min_length=1)
    """branch, tag or commit of `name`; absent: main"""
    tool_call_format: str | None = None
    """the model's syntax of tool calls; absent: read from its chat template"""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """passed to the chat template, such as `enable_thinking = false`"""
    vocab_size: int = Field(default=1024, ge=300, le=65536)
    """size of the tokenizer that a preset trains on the job's prompts"""
    only_tool_words: bool = False
    """a preset samples only the words that its tool's schema lists (`enum`), each as one token; no token ends
    a call, so every call has rollout.max_tokens words"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """device of training and serving; auto takes cuda, then mps, then cpu"""

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


# Keys of [services] that are settings of the task app, with the same names there.
TASK_APP_SETTINGS = (
    "gymnasium_modules", "verifiers_modules", "verifiers_python", "textarena_python",
    "reasoning_gym_python", "mcp_servers", "allowed_environment_hosts",
)  # fmt: skip
Module = Annotated[str, Field(max_length=200, pattern=MODULE)]
Host = Annotated[str, Field(min_length=1, max_length=300, pattern=HOST_OR_IPV6)]


class ServicesTable(Table):
    """[services]"""

    # No repr: a user name and password given here by mistake must not appear in an error.
    task_url: tuple[str, ...] = Field(default=(), max_length=256, repr=False)
    """task apps, one URL or a list; `dns+http://name:port` is all addresses of a name (docs/operations.md);
    absent: the job starts one of its own"""
    task_api_key: SecretStr | None = None
    """key of the task apps; absent: the environment variable ENVIRONMENT_API_KEY, or the file that
    ENVIRONMENT_API_KEY_FILE names"""
    task_plugins: tuple[Path, ...] = Field(default=(), max_length=64)
    """Python files with environments or policies of your own, for the task app that the job starts
    (docs/plugins.md)"""
    task_plugins_sha256: tuple[str, ...] = Field(default=(), max_length=64)
    """SHA-256 of each file of task_plugins; a run refuses a file with another digest"""
    gymnasium_modules: tuple[Module, ...] = Field(default=(), max_length=64)
    """modules that register environments with gymnasium; the job's own task app imports them. Absent, for
    this key and the next six: the task app's environment variable decides (docs/foreign.md)"""
    verifiers_modules: tuple[Module, ...] = Field(default=(), max_length=64)
    """tasksets that the job's own task app may play as `verifiers:MODULE`"""
    verifiers_python: Path | None = None
    """the Python of the virtual environment that has verifiers"""
    textarena_python: Path | None = None
    """the Python of the virtual environment that has textarena, for `textarena:ID`"""
    reasoning_gym_python: Path | None = None
    """the Python of the virtual environment that has reasoning-gym, for `reasoning_gym:NAME`"""
    mcp_servers: Path | None = None
    """the file of MCP servers, for `mcp:NAME`"""
    allowed_environment_hosts: tuple[Host, ...] = Field(default=(), max_length=64)
    """hosts (or host:port) that the URL in an env_name may name"""
    task_apps: int = Field(default=1, ge=1, le=64)
    """task apps that the job starts, a process each; more than one helps if playing takes longer than
    sampling, as with a scripted teacher"""
    gateway_host: str = "127.0.0.1"
    """address that the job's own gateway listens on"""
    gateway_port: int = Field(default=0, ge=0, le=65535)
    """0 takes a free port; further gateways take the ports after it"""
    gateways: int = Field(default=1, ge=1, le=64)
    """gateways, a process each; a rollout calls only one of them. More than one needs [cluster]"""
    request_timeout_s: float = Field(default=60.0, gt=0)
    """time limit of a control request to a task app"""
    iteration_timeout_s: float = Field(default=1800.0, gt=0)
    """time limit of collecting an iteration"""
    task_app_wait_s: float = Field(default=60.0, ge=0, le=86_400)
    """how long to wait for a task app of task_url to come back when none answers"""

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
        """Return the environment variables for the job's own task app, from the keys that are given."""
        given = {name: value for name in TASK_APP_SETTINGS if (value := getattr(self, name))}
        return {
            f"TURNWISE_{name.upper()}": ",".join(value) if isinstance(value, tuple) else str(value)
            for name, value in given.items()
        }


class ClusterTable(Table):
    """[cluster]: each role of the job has a process of its own; absent: one process has all roles."""

    launcher: Literal["local", "external", "ray"] = "local"
    """what starts the processes. local: this process, on this machine; external: you start the learner, which
    has `learner.url`, and the vLLM servers of `inference.urls`; ray: Ray, on nodes that are free
    (docs/cluster.md)"""
    ray_address: str = Field(default="auto", pattern=r"^(auto|(\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5})$")
    """with launcher = 'ray': the address of Ray's head, `host:6379`; auto: the head on this machine"""
    wait_s: float = Field(default=600.0, gt=0, le=604_800)
    """how long to wait, at the start and each time that a process is lost: with launcher = 'external' for the
    learner of `learner.url`, with launcher = 'ray' for a place"""

    @field_validator("ray_address")
    @classmethod
    def _has_a_port(cls, address: str) -> str:
        if address != "auto" and not 0 < int(address.rpartition(":")[2]) < 65536:
            raise ValueError(f"ray_address is {address!r}, and ports are from 1 to 65535")
        return address


class InferenceTable(EngineKeys, VllmKeys):
    """[inference]"""


# How long ranks wait for each other: each imports torch first, and nodes start one after another.
RANKS_JOIN_S = 600.0


class LearnerTable(Table):
    """[learner]: the learner's processes; read with [cluster]."""

    nnodes: int = Field(default=1, ge=1, le=1024)
    """nodes that the learner's ranks are on; more than one needs cluster.launcher = 'ray' or 'external'"""
    nproc_per_node: int = Field(default=1, ge=1, le=1024)
    """ranks on a node, a GPU each. Each rank holds a share of the weights, the gradient and the optimizer
    (FSDP2), and computes a share of every update"""
    data_parallel_replicate_degree: int = Field(default=1, ge=1, le=1024)
    """number of groups of ranks; each group holds all weights. 1: all ranks are one group. If it equals
    nnodes, weights are gathered only within a node"""
    fsdp_reshard_after_forward: bool = True
    """free a layer's gathered weights after its forward pass and gather them again for the backward pass:
    less memory, half as much communication again"""
    fsdp_cpu_offload: bool = False
    """keep each rank's share of weights, gradient and optimizer in main memory, and take the optimizer's step
    there; needs several ranks"""
    timeout_s: float = Field(
        default=600.0,
        gt=0,
        le=86_400,
        description="seconds that the learner may be silent in a call, of which the warm-up alone reports "
        "progress, and that a rank waits for the others in a collective. Loading a model may always take "
        f"3600, and the ranks' joining {RANKS_JOIN_S:g}",
    )
    max_restarts: int = Field(default=3, ge=0, le=1000)
    """how often a run continues from its newest checkpoint after the learner's process was lost"""
    url: str = Field(default="", repr=False)
    """with cluster.launcher = 'external': the address of the learner. On both sides, the variable
    TURNWISE_LEARNER_KEY of the environment holds its key"""

    @property
    def ranks(self) -> int:
        """The number of the learner's processes."""
        return self.nnodes * self.nproc_per_node

    @property
    def parts(self) -> int:
        """The number of ranks that hold all weights together."""
        return self.ranks // self.data_parallel_replicate_degree

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        return checked_url(url, "url") if url else ""


class WeightTransferTable(Table):
    """[weight_transfer]"""

    backend: Literal["memory", "folder", "nccl"] | None = None
    """how new weights reach the engine. memory: copied within the process; folder: written to
    `RUN/weights/version_n` and loaded; nccl: sent by the learner's process to vLLM servers, tensor by tensor
    (by gloo where `model.device` is a CPU); absent: folder with [cluster] or vLLM, otherwise memory"""


def table_model(field: FieldInfo) -> type[BaseModel]:
    options = (field.annotation, *get_args(field.annotation))
    return next(item for item in options if isinstance(item, type) and issubclass(item, BaseModel))
