"""Define the keys of the job table [inference], for the local engine and vLLM servers.

This module does not import torch, because every command that reads a job imports it.
"""

import re
from math import prod
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from trainer_backend.core.keys import Table
from trainer_backend.core.policies import ACTOR
from trainer_backend.job.addresses import checked_url

# The largest `top_logprobs` of a request at the gateway.
_MOST_TOPS = 20
# The arguments that every vLLM server of an actor needs; docs/vllm.md explains what fails without each.
CONTRACT = {
    "served_model_name": ACTOR,
    "enable_scale_out": True,
    "logprobs_mode": "processed_logprobs",
    "max_logprobs": _MOST_TOPS + 1,  # vLLM counts the sampled token too
    "generation_config": "vllm",
    "enable_prompt_tokens_details": True,
    "worker_extension_cls": "turnwise_vllm.TurnwiseWorker",
}
# The arguments of vLLM's server that a job may not set, with the reason.
_VLLM_OWN = {
    **dict.fromkeys(CONTRACT, "without it, exact tokens and log-probs could not be had"),
    **dict.fromkeys(("model", "served_model_name", "tokenizer"), "it is the model of [model]"),
    **dict.fromkeys(("host", "port", "uds"), "it starts its servers on free ports of the loopback"),
    "api_key": "it would be the one who has to know the key",
    "max_model_len": "it is inference.max_model_len",
    "dtype": "it is the learner's precision, or the canary would fail",
    "enable_prompt_tokens_details": "metrics of reused prompt tokens are made of it",
    "hf_overrides": "it is the model of [model], and vLLM ignores names that the model's config lacks",
    "worker_extension_cls": "it loads the weights",
    "weight_transfer_config": "it is weight_transfer.backend",
    "enable_sleep_mode": "it is inference.sleep",
}
_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
_VLLM_SHARE = 0.92  # the default of vLLM 0.32
_VLLM_NAME = re.compile(r"[a-zA-Z][\w-]*", re.ASCII)
# The time for a sample and for detecting a hanging server; the longest timeout that a task app accepts.
_SAMPLE_S, _LONGEST_REQUEST_S = 180.0, 3_600.0


class VllmKeys(Table):
    """Keys that select the actor's engine and describe its vLLM servers."""

    engine: Literal["local", "vllm"] = "local"
    """where the actor samples. local: in the trainer's process; vllm: at vLLM servers (docs/vllm.md)"""
    urls: tuple[str, ...] = Field(default=(), max_length=256, repr=False)
    """addresses of vLLM servers, each a replica of the actor; absent: the run starts `replicas` servers"""
    replicas: int = Field(default=1, ge=1, le=256)
    """number of vLLM servers that the run starts if `urls` is empty"""
    vllm_python: Path | None = None
    """path of a Python interpreter that can import vLLM; the run starts its servers with it"""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """arguments of servers that the run starts, under vLLM's own names, such as `tensor_parallel_size = 2`"""
    weight_update: Literal["wait", "keep"] = "wait"
    """at a vLLM server: with wait, running requests end before new weights are loaded; with keep, they
    continue with the new weights"""
    replica_wait_s: float = Field(default=300.0, gt=0, le=86_400)
    """the time within which a vLLM server must start or load weights. If no server answers for this time, the
    run saves and ends. A run that starts its own servers restarts a server that has not answered for this
    time, and ends only if no server answers for twice this time"""
    sleep: bool = False
    """vLLM servers free their GPU memory while the learner works, and wake with the new weights. Use this for
    servers on the learner's GPU (docs/vllm.md)"""

    @property
    def server_devices(self) -> int:
        """Return the number of accelerators of one server of the run: the product of its parallel sizes."""
        sizes = (self.argument(name, 1) for name in _PARALLEL)
        return prod(size for size in sizes if isinstance(size, int))

    @property
    def server_share(self) -> float:
        """Return the fraction of a GPU's memory that one server of the run reserves."""
        share = self.argument("gpu_memory_utilization", _VLLM_SHARE)
        return float(share) if isinstance(share, int | float) else _VLLM_SHARE  # vLLM refuses other values

    def argument(self, name: str, default: Any) -> Any:
        """Return the value that the job sets for the argument `name` of vLLM's server, or `default`.

        In the job, the name may contain `-` in place of `_`.
        """
        return {key.replace("-", "_"): value for key, value in self.vllm.items()}.get(name, default)

    @property
    def replica_patience_s(self) -> float:
        """Return how many seconds the run waits while no replica answers, before it saves and ends."""
        return self.replica_wait_s * (1 if self.vllm_python is None else 2)

    @property
    def asks(self) -> dict[str, float]:
        """Return keys to send to task apps: with vLLM, a timeout that covers the restart of a replica."""
        if self.engine == "local":
            return {}
        return {"request_timeout_s": min(self.replica_patience_s + _SAMPLE_S, _LONGEST_REQUEST_S)}

    @field_validator("vllm")
    @classmethod
    def _arguments_of_vllm(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        """Refuse impossible names and values of vLLM's arguments, and arguments that the run sets itself."""
        for name, value in arguments.items():
            if not _VLLM_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no name of an argument; write it as vLLM does, without --")
            if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
                raise ValueError(f"{name} holds lists or tables in a list; vLLM has no such argument")
            key = name.replace("-", "_")
            if key in _VLLM_OWN:
                raise ValueError(f"{name} is the run's own to set: {_VLLM_OWN[key]}")
        return arguments

    @field_validator("urls")
    @classmethod
    def _each_server_once(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        if len({checked_url(url, "urls") for url in urls}) < len(urls):
            raise ValueError("urls names a server twice")
        return urls


class EngineKeys(Table):
    """Keys of the local engine: its process, the size of its batch and its cache.

    The cache of the running requests takes at most slots * max_model_len * 2 * layers * key-value heads *
    head_dim * bytes per number. Each kept prefix takes at most as much as one slot. A paged cache allocates
    its pages on demand, and always has room for one request of `max_model_len` tokens. A recurrent layer
    stores a state of fixed size for each running request and each kept prefix. For a model with such layers,
    the engine also keeps states at positions inside prompts, at most as many as kept prefixes.
    """

    own_process: bool = False
    """run the local engine in a process of its own instead of the gateway's process, so that parsing and
    rendering of requests do not delay decode steps. This needs [cluster]"""
    threads: int = Field(default=1, ge=1, le=256)
    """number of torch threads while rollouts are collected"""
    max_running: int = Field(default=64, ge=1, le=4096)
    """the largest number of requests that are decoded together"""
    max_model_len: int = Field(default=1024, ge=32)
    """the largest length of prompt + response, in tokens"""
    kept_prefixes: int | None = Field(default=None, ge=0, le=4096)
    """number of finished requests whose keys and values are kept for later prompts that begin with the same
    tokens. Absent: as many as max_running. 0: every prompt is computed from its first token"""
    cache_gib: float | None = Field(default=None, gt=0)
    """on CUDA: the largest size of the cache of keys and values, in GiB; requests that do not fit wait.
    Absent: what max_running and kept_prefixes need, or less if the device has less memory"""
    replay_experts: bool | None = None
    """for a mixture-of-experts model: record the experts to which each token is routed, and route the token
    to the same experts in updates. Absent: only if the engine computes in bfloat16, because in float32 the
    engine and the learner choose the same experts"""
    deterministic: bool = False
    """decode one request at a time and keep no finished requests. This is slower, but a run that is killed
    and resumed on a CPU has bit for bit the same weights as an uninterrupted run"""

    @property
    def cache_bytes(self) -> int | None:
        return None if self.cache_gib is None else int(self.cache_gib * 2**30)

    @property
    def slots(self) -> int:
        """Return the largest number of requests that are decoded together.

        A deterministic engine decodes one, because the size of the batch changes the last bits of a result.
        """
        return 1 if self.deterministic else self.max_running

    @property
    def prefix_slots(self) -> int:
        """Return the largest number of finished requests whose keys and values are kept.

        A deterministic engine keeps none, because the order of events decides which requests are kept.
        """
        if self.deterministic:
            return 0
        return self.max_running if self.kept_prefixes is None else self.kept_prefixes
