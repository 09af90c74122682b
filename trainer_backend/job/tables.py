"""The tables of a job's TOML about the model and the processes of a run; `schema` lists all tables."""

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

# A name on the Hugging Face hub has one or two parts. A path begins with / or . or ~, or has more parts.
HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9_][\w.-]*", re.ASCII)


class ModelTable(Table):
    """[model]: the model that is trained, and the form of its prompts and tool calls."""

    preset: str | None = None
    """name of a small model that is built with random weights (docs/models.md)"""
    path: Path | None = None
    """local folder with a model in the format of Hugging Face"""
    name: str | None = None
    """name of a model on the Hugging Face hub or in its local cache, such as `Qwen/Qwen3-0.6B`"""
    revision: str | None = Field(default=None, min_length=1)
    """branch, tag or commit of the model `name`; absent: main"""
    tool_call_format: str | None = None
    """format in which the model writes tool calls; absent: recognized from its chat template"""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """arguments that are passed to the chat template, such as `enable_thinking = false`"""
    vocab_size: int = Field(default=1024, ge=300, le=65536)
    """number of tokens of the tokenizer that is trained on the job's prompts for a preset"""
    only_tool_words: bool = False
    """let a preset sample only the words that its tool's schema lists (`enum`); each of them is one token. No
    token ends a call, so every call has rollout.max_tokens words"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """device for training and sampling; auto: cuda if there is one, else mps, else cpu"""

    @property
    def source(self) -> str:
        """A name of the model for messages: the preset, the folder, or the hub's name with the revision."""
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


# Keys of [services] that the job's own task app gets as settings of the same names.
TASK_APP_SETTINGS = (
    "gymnasium_modules", "verifiers_modules", "verifiers_python", "textarena_python",
    "reasoning_gym_python", "mcp_servers", "allowed_environment_hosts",
)  # fmt: skip
Module = Annotated[str, Field(max_length=200, pattern=MODULE)]
Host = Annotated[str, Field(min_length=1, max_length=300, pattern=HOST_OR_IPV6)]


class ServicesTable(Table):
    """[services]: the task apps and the gateways of a run."""

    # No repr: a user name and password given here by mistake must not appear in an error.
    task_url: tuple[str, ...] = Field(default=(), max_length=256, repr=False)
    """URL of a task app, or a list of URLs. `dns+http://name:port` stands for all addresses to which the name
    is resolved (docs/operations.md). Absent: the job starts a task app of its own"""
    task_api_key: SecretStr | None = None
    """API key of the task apps; absent: the value of the environment variable ENVIRONMENT_API_KEY, or the
    content of the file that ENVIRONMENT_API_KEY_FILE names"""
    task_plugins: tuple[Path, ...] = Field(default=(), max_length=64)
    """Python files with your own environments or policies, for the task app that the job starts
    (docs/plugins.md)"""
    task_plugins_sha256: tuple[str, ...] = Field(default=(), max_length=64)
    """SHA-256 of each file of task_plugins. A run records them when it begins, and refuses files that have
    changed since"""
    gymnasium_modules: tuple[Module, ...] = Field(default=(), max_length=64)
    """modules that register environments with gymnasium; the task app that the job starts imports them. If
    this key is absent, the environment variable TURNWISE_GYMNASIUM_MODULES is used instead; each of the next
    six keys also has such a variable (docs/foreign.md)"""
    verifiers_modules: tuple[Module, ...] = Field(default=(), max_length=64)
    """modules with tasksets of verifiers, which the task app that the job starts may play as
    `verifiers:MODULE`"""
    verifiers_python: Path | None = None
    """Python interpreter of the virtual environment in which verifiers is installed"""
    textarena_python: Path | None = None
    """Python interpreter of the virtual environment in which textarena is installed, for environments
    `textarena:ID`"""
    reasoning_gym_python: Path | None = None
    """Python interpreter of the virtual environment in which reasoning-gym is installed, for environments
    `reasoning_gym:NAME`"""
    mcp_servers: Path | None = None
    """file that lists MCP servers, for environments `mcp:NAME`"""
    allowed_environment_hosts: tuple[Host, ...] = Field(default=(), max_length=64)
    """hosts, as `host` or `host:port`, that the URL in an env_name may name. The list replaces the default,
    which is this machine alone"""
    task_apps: int = Field(default=1, ge=1, le=64)
    """number of task apps that the job starts, each in its own process. More than one helps if playing takes
    longer than sampling, as with a scripted teacher"""
    gateway_host: str = "127.0.0.1"
    """address on which the gateway of the job listens"""
    gateway_port: int = Field(default=0, ge=0, le=65535)
    """port of the first gateway; further gateways use the ports after it; 0: free ports are chosen"""
    gateways: int = Field(default=1, ge=1, le=64)
    """number of gateways, each in its own process. A rollout calls only one of them. More than one needs
    [cluster]"""
    request_timeout_s: float = Field(default=60.0, gt=0)
    """seconds that a task app may take to answer a request of the trainer"""
    iteration_timeout_s: float = Field(default=1800.0, gt=0)
    """seconds that collecting the rollouts of an iteration may take"""
    task_app_wait_s: float = Field(default=60.0, ge=0, le=86_400)
    """seconds that a run waits while none of the task apps of task_url answers; then it ends with an error"""

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
        """The environment variables for the task app that the job starts, from the keys that the job sets."""
        given = {name: value for name in TASK_APP_SETTINGS if (value := getattr(self, name))}
        return {
            f"TURNWISE_{name.upper()}": ",".join(value) if isinstance(value, tuple) else str(value)
            for name, value in given.items()
        }


class ClusterTable(Table):
    """[cluster]: each role of a run has a process of its own. Without it, one process has all roles."""

    launcher: Literal["local", "external", "ray"] = "local"
    """what starts the processes (docs/cluster.md). local: the run itself, on this machine; external: you
    start the learner, at `learner.url`, and the vLLM servers of `inference.urls`; ray: Ray, on nodes with
    free resources"""
    ray_address: str = Field(default="auto", pattern=r"^(auto|(\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5})$")
    """with launcher = 'ray': address of Ray's head node, such as `host:6379`; auto: the head node is this
    machine"""
    wait_s: float = Field(default=600.0, gt=0, le=604_800)
    """seconds that a run may wait at its start, and after each loss of a process. With launcher = 'external',
    it waits for the learner at `learner.url`; with launcher = 'ray', for a node with free resources"""

    @field_validator("ray_address")
    @classmethod
    def _has_a_port(cls, address: str) -> str:
        if address != "auto" and not 0 < int(address.rpartition(":")[2]) < 65536:
            raise ValueError(f"ray_address is {address!r}, and ports are from 1 to 65535")
        return address


class InferenceTable(EngineKeys, VllmKeys):
    """[inference]: the engine that samples for the actor, and its vLLM servers if it has any."""


# Seconds that ranks wait for each other at the start: each imports torch first, and nodes may start late.
RANKS_JOIN_S = 600.0


class LearnerTable(Table):
    """[learner]: the processes of the learner. These keys have an effect only with [cluster]."""

    nnodes: int = Field(default=1, ge=1, le=1024)
    """number of nodes for the learner's ranks; more than one needs cluster.launcher = 'ray' or 'external'"""
    nproc_per_node: int = Field(default=1, ge=1, le=1024)
    """number of ranks on a node. Each rank is a process with one GPU, which holds a share of the weights, of
    the gradient and of the optimizer's state (FSDP2), and computes a share of every update"""
    data_parallel_replicate_degree: int = Field(default=1, ge=1, le=1024)
    """number of groups of ranks; the ranks of a group together hold a whole copy of the weights. 1: all ranks
    form one group. If the number equals nnodes, weights are gathered only within a node"""
    fsdp_reshard_after_forward: bool = True
    """free the gathered weights of a layer after its forward pass, and gather them again for its backward
    pass. This takes less memory, and increases communication by half"""
    fsdp_cpu_offload: bool = False
    """keep each rank's share of the weights, the gradient and the optimizer's state in main memory, and
    compute the optimizer's step on the CPU. This needs several ranks"""
    timeout_s: float = Field(
        default=600.0,
        gt=0,
        le=86_400,
        description="seconds that a call of the learner may take without a report of progress, and that a "
        "rank waits for the others in a collective. Loading a model may always take 3600 s, and the ranks "
        f"may always take {RANKS_JOIN_S:g} s to find each other",
    )
    max_restarts: int = Field(default=3, ge=0, le=1000)
    """maximum number of times that a run continues from its newest checkpoint after it lost the learner's
    process"""
    url: str = Field(default="", repr=False)
    """with cluster.launcher = 'external': address of the learner. The environment variable
    TURNWISE_LEARNER_KEY must contain the same key for the learner and for the run"""

    @property
    def ranks(self) -> int:
        """The number of ranks of the learner; each rank is a process."""
        return self.nnodes * self.nproc_per_node

    @property
    def parts(self) -> int:
        """The number of ranks in a group, among which a whole copy of the weights is divided."""
        return self.ranks // self.data_parallel_replicate_degree

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        return checked_url(url, "url") if url else ""


class WeightTransferTable(Table):
    """[weight_transfer]: how new weights reach the engine."""

    backend: Literal["memory", "folder", "nccl"] | None = None
    """how new weights get from the learner to the engine. memory: they are copied within the process; folder:
    they are written to `RUN/weights/version_n` and loaded from there; nccl: the learner's process sends them
    to vLLM servers, tensor by tensor (with gloo in place of NCCL if `model.device` is a CPU); absent: folder
    with [cluster] or vLLM, otherwise memory"""


def table_model(field: FieldInfo) -> type[BaseModel]:
    options = (field.annotation, *get_args(field.annotation))
    return next(item for item in options if isinstance(item, type) and issubclass(item, BaseModel))
