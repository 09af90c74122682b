"""One arithmetic for all who compute with a policy: learner, engine, reference, fixed policies.

With a low precision (bfloat16 on CUDA):

    products                factors rounded to it, sums float32: autocast, or weights that are held in it
    embeddings              rounded to it where they are looked up, as every other matrix is
    residual stream, norms  float32
    keys and values         rounded to it once, after their rotation
    logits                  factors rounded to it, sums float32

Whether a matrix is float32 and rounded in every product, as in training, or held rounded, as it is served,
makes no difference then. Without a low precision everything is float32.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


def held_dtype(weight: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a weight where matrices have `dtype`; norms and biases stay float32."""
    return dtype if weight.dim() > 1 else torch.float32


def tokens_for(model: PreTrainedModel, ids_BL: Tensor, low: torch.dtype | None) -> Mapping[str, Tensor]:
    """A model's token inputs: in a low precision embeddings, whose type the residual stream takes."""
    if low is None:
        return {"input_ids": ids_BL}
    tokens = {"inputs_embeds": model.get_input_embeddings()(ids_BL).to(low).float()}
    if getattr(model.config.get_text_config(), "hidden_size_per_layer_input", None):
        # Gemma's embeddings for single layers, which it would look up by searching for the ids of the others.
        decoder: Any = model.base_model
        tokens["per_layer_inputs"] = decoder.get_per_layer_inputs(ids_BL).to(low).float()
    return tokens
