"""Define the keys of [inference], for the local engine and vLLM servers. No torch: every job reads them."""

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
# The arguments that every vLLM server needs; docs/vllm.md says what is lost without each.
CONTRACT = {
    "served_model_name": ACTOR,
    "enable_scale_out": True,
    "logprobs_mode": "processed_logprobs",
    "max_logprobs": _MOST_TOPS + 1,  # plus the sampled one
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
# The time for a sample and for detecting a hanging server; the longest time that a task app waits.
_SAMPLE_S, _LONGEST_REQUEST_S = 180.0, 3_600.0


class VllmKeys(Table):
    """The choice of the actor's engine, and the vLLM servers that the actor may sample at."""

    engine: Literal["local", "vllm"] = "local"
    """where the actor samples. local: in the trainer's process; vllm: at vLLM servers (docs/vllm.md)"""
    urls: tuple[str, ...] = Field(default=(), max_length=256, repr=False)
    """addresses of vLLM servers, each a replica of the actor; absent: the run starts `replicas` servers"""
    replicas: int = Field(default=1, ge=1, le=256)
    """vLLM servers that the run starts where `urls` is empty"""
    vllm_python: Path | None = None
    """the Python of the environment that has vLLM, for servers that the run starts"""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """arguments of servers that the run starts, under vLLM's own names, such as `tensor_parallel_size = 2`"""
    weight_update: Literal["wait", "keep"] = "wait"
    """at a vLLM server: wait lets running requests end before new weights are loaded; keep lets them continue
    with the new weights"""
    replica_wait_s: float = Field(default=300.0, gt=0, le=86_400)
    """how long a vLLM server may take to start or to load weights, and how long the run waits while no server
    serves; then the run saves and ends. If the run started the servers, it restarts a server that has not
    served for this time, and waits for twice this time"""
    sleep: bool = False
    """vLLM servers give the GPU's memory back while the learner works, and wake with the new weights: for
    servers on the learner's GPU (docs/vllm.md)"""

    @property
    def server_devices(self) -> int:
        """Return the number of accelerators of one server that the run starts, from vLLM's parallel sizes."""
        sizes = (self.argument(name, 1) for name in _PARALLEL)
        return prod(size for size in sizes if isinstance(size, int))

    @property
    def server_share(self) -> float:
        """Return the share of a GPU's memory that a server of the run takes."""
        share = self.argument("gpu_memory_utilization", _VLLM_SHARE)
        return float(share) if isinstance(share, int | float) else _VLLM_SHARE  # vLLM refuses other values

    def argument(self, name: str, default: Any) -> Any:
        """Return an argument of servers that the run starts; the job may write `-` for `_` in its name."""
        return {key.replace("-", "_"): value for key, value in self.vllm.items()}.get(name, default)

    @property
    def replica_patience_s(self) -> float:
        """Return how long the run waits while no replica serves; meanwhile it restarts its own servers."""
        return self.replica_wait_s * (1 if self.vllm_python is None else 2)

    @property
    def asks(self) -> dict[str, float]:
        """Return keys of the actor's policy: with vLLM, a request waits for a replica as long as the run."""
        if self.engine == "local":
            return {}
        return {"request_timeout_s": min(self.replica_patience_s + _SAMPLE_S, _LONGEST_REQUEST_S)}

    @field_validator("vllm")
    @classmethod
    def _arguments_of_vllm(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        """Refuse names and values that are no arguments, and arguments that the run sets itself."""
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
    """The bounds of the local engine.

    The cache of `slots` running requests takes at most slots * max_model_len * 2 * layers * key-value heads *
    head_dim * bytes of a number; a kept prefix takes at most as much as a slot. A paged cache allocates pages
    on demand, and one longest request always fits. A layer with a state instead takes the state's size for
    each request and kept prefix; such a model may keep as many states again, inside prompts.
    """

    own_process: bool = False
    """the local engine runs in a process of its own, not in the gateway's, so that parsing and rendering of
    requests delay no decode step. This needs [cluster]"""
    threads: int = Field(default=1, ge=1, le=256)
    """torch threads while rollouts are collected"""
    max_running: int = Field(default=64, ge=1, le=4096)
    """requests that are decoded together"""
    max_model_len: int = Field(default=1024, ge=32)
    """prompt + response, in tokens"""
    kept_prefixes: int | None = Field(default=None, ge=0, le=4096)
    """finished prompts + responses whose keys and values are kept for prompts that begin like them; absent:
    as many as max_running; 0: every prompt is computed again"""
    cache_gib: float | None = Field(default=None, gt=0)
    """on CUDA: the most GiB of keys and values; requests that do not fit wait. Absent: what max_running and
    kept_prefixes can take, as far as the device has that much"""
    replay_experts: bool | None = None
    """for a model with experts: record which experts each token is sent to, and send it to the same ones in
    updates. Absent: only if the engine computes in bfloat16; in float32 engine and learner choose alike"""
    deterministic: bool = False
    """decode one request at a time and keep nothing of finished ones: slower, and on a CPU a killed and
    resumed run has bit for bit the weights of an uninterrupted one"""

    @property
    def cache_bytes(self) -> int | None:
        return None if self.cache_gib is None else int(self.cache_gib * 2**30)

    @property
    def slots(self) -> int:
        """Return how many requests are decoded together. The batch changes the last bits of a result."""
        return 1 if self.deterministic else self.max_running

    @property
    def prefix_slots(self) -> int:
        """Return how many finished prompts + responses are kept, which depend on the order of events."""
        if self.deterministic:
            return 0
        return self.max_running if self.kept_prefixes is None else self.kept_prefixes
