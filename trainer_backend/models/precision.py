"""The arithmetic that learner, engine, reference and fixed policies share.

With a low precision (bfloat16 on CUDA):

    matrix products         rounded factors, float32 sums: by autocast, or with rounded weights
    embeddings              rounded at look-up
    residual stream, norms  float32
    keys and values         rounded once, after rotation
    logits                  rounded factors, float32 sums

So float32 matrices that every product rounds (in training) give the same results as rounded matrices (in
serving). Without a low precision everything is float32.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


def held_dtype(weight: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a weight is held: `dtype` for matrices, float32 for norms and biases."""
    return dtype if weight.dim() > 1 else torch.float32


def tokens_for(model: PreTrainedModel, ids_BL: Tensor, low: torch.dtype | None) -> Mapping[str, Tensor]:
    """Return a model's inputs: token ids, or, with a low precision, embeddings rounded to it in float32."""
    if low is None:
        return {"input_ids": ids_BL}
    tokens = {"inputs_embeds": model.get_input_embeddings()(ids_BL).to(low).float()}
    if getattr(model.config.get_text_config(), "hidden_size_per_layer_input", None):
        # Gemma's embeddings per layer. Without ids, Gemma would search for the ids by their embeddings.
        decoder: Any = model.base_model
        tokens["per_layer_inputs"] = decoder.get_per_layer_inputs(ids_BL).to(low).float()
    return tokens
