"""Defines the floating-point arithmetic that learner, engine, reference and fixed policies share.

With a low precision (bfloat16 on CUDA), numbers are rounded to it or kept in float32 as follows:

    matrix products         rounded factors, float32 sums
    embeddings              rounded when they are looked up
    residual stream, norms  float32
    keys and values         rounded once, after rotation
    logits                  rounded factors, float32 sums

Training keeps matrices in float32, and autocast rounds them for every product. Serving keeps rounded
matrices. Both therefore give the same results. Without a low precision, everything is float32.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


def held_dtype(weight: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a weight is stored: `dtype` for matrices, float32 for norms and biases."""
    return dtype if weight.dim() > 1 else torch.float32


def tokens_for(model: PreTrainedModel, ids_BL: Tensor, low: torch.dtype | None) -> Mapping[str, Tensor]:
    """Return the keyword arguments with which a model receives tokens: ids, or embeddings if `low` is set.

    The embeddings are rounded to the dtype `low` and returned as float32.
    """
    if low is None:
        return {"input_ids": ids_BL}
    tokens = {"inputs_embeds": model.get_input_embeddings()(ids_BL).to(low).float()}
    if getattr(model.config.get_text_config(), "hidden_size_per_layer_input", None):
        # Gemma also has embeddings for each layer. Given no ids, it would search for them by the embeddings.
        decoder: Any = model.base_model
        tokens["per_layer_inputs"] = decoder.get_per_layer_inputs(ids_BL).to(low).float()
    return tokens
