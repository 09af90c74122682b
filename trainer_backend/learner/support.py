"""Checks before training whether the learner scores a model exactly, and whether it can pack segments."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trainer_backend.core.collate import block_mask
from trainer_backend.errors import ModelFolderError
from trainer_backend.models.allowed_tokens import EXCLUDED
from trainer_backend.models.folder import embedding_rows
from trainer_backend.models.kinds import logit_map, refuse_rotations_by_length, why_not_by_position

# The largest allowed relative difference between the logits of the model itself and those of the learner.
ROUNDING = 1e-3


def refuse_unsupported(model: PreTrainedModel, *, longest: int) -> str | None:
    """Raise ModelFolderError if the learner would score sequences of up to `longest` tokens wrongly.

    The learner runs `model.model` and applies `lm_head` itself (`learner.scoring`). So logits must be
    lm_head(hidden states), scaled and capped, and positions must not depend on a sequence's length. Several
    segments can be packed into one row only if all layers respect the attention mask. Otherwise each segment
    gets its own row, and padding must not change its logits.

    Returns:
        Why segments cannot be packed into one row; None: they can.
    """
    if not hasattr(model, "model") or not hasattr(model, "lm_head"):
        raise ModelFolderError(f"{type(model).__name__} has no `model` and `lm_head`", where="model")
    config = model.config.get_text_config()
    refuse_rotations_by_length(config, longest=longest)
    _refuse_few_positions(config, longest)
    _refuse_other_logits(model)
    reason = why_not_by_position(model, longest=longest) or _why_neighbours_change(model)
    if reason is not None:
        _refuse_padding(model, reason)
    return reason


def _refuse_few_positions(config: Any, longest: int) -> None:
    positions = getattr(config, "max_position_embeddings", None)
    stretched = getattr(config, "rope_parameters", None) or {}
    original = stretched.get("original_max_position_embeddings")
    if original is not None:
        positions = max(positions or 0, int(original * stretched.get("factor", 1.0)))
    if positions is not None and positions < longest:
        raise ModelFolderError(
            f"inference.max_model_len is {longest}, but the model was made for {positions} positions",
            where="model",
            hint=f"Set inference.max_model_len to {positions} or less.",
        )


@torch.inference_mode()
def _refuse_other_logits(model: PreTrainedModel) -> None:
    """Raise ModelFolderError if the model and the learner compute different logits for a few tokens."""
    ids_BL = _few_ids(model)
    own_BLV = model(input_ids=ids_BL, use_cache=False).logits
    apart = _compare(own_BLV, _logits(model, ids_BL))
    if not apart <= ROUNDING:
        raise ModelFolderError(
            f"its logits differ by up to {apart:.3g} of their size from lm_head(hidden states), scaled and "
            "capped by its config, which is what the learner computes",
            where="model",
        )


@torch.inference_mode()
def _why_neighbours_change(model: PreTrainedModel) -> str | None:
    """Return why packing changes logits; None if two texts have the same logits in one row as alone."""
    parts = _two_texts(model)
    alone_BLV = torch.cat([_logits(model, part) for part in parts], dim=1)
    positions_BL = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    mask_B1LL = block_mask(positions_BL).to(model.device)
    together_BLV = _logits(
        model,
        torch.cat(parts, dim=1),
        position_ids=positions_BL.to(model.device),
        attention_mask=torch.zeros_like(mask_B1LL, dtype=model.dtype).masked_fill_(~mask_B1LL, -torch.inf),
    )
    apart = _compare(alone_BLV, together_BLV)
    if apart <= ROUNDING:
        return None
    return f"logits change by up to {apart:.3g} of their size with another text in the row, despite the mask"


@torch.inference_mode()
def _refuse_padding(model: PreTrainedModel, reason: str) -> None:
    """Raise ModelFolderError if padding a text, in a batch with a longer text, changes its logits."""
    longer_BL, text_BL = _two_texts(model)
    padding_BL = text_BL[:, -1:].expand(1, longer_BL.shape[1] - text_BL.shape[1])
    rows_BL = torch.cat([longer_BL, torch.cat([text_BL, padding_BL], dim=1)])
    positions_BL = torch.arange(rows_BL.shape[1], device=model.device).expand_as(rows_BL)
    padded_BLV = _logits(model, rows_BL, position_ids=positions_BL)[1:, : text_BL.shape[1]]
    apart = _compare(_logits(model, text_BL), padded_BLV)
    if not apart <= ROUNDING:
        raise ModelFolderError(
            f"its rows cannot be packed, since its {reason}; and padding after a text changes the text's "
            f"logits by up to {apart:.3g} of their size",
            where="model",
            hint="Use a model whose layers do not read later tokens.",
        )


def _two_texts(model: PreTrainedModel) -> list[Tensor]:
    first_BL = _few_ids(model)
    return [first_BL, first_BL.flip(1)[:, : first_BL.shape[1] // 2 + 1]]


def _few_ids(model: PreTrainedModel) -> Tensor:
    return torch.arange(min(8, embedding_rows(model)), device=model.device)[None]


def _logits(model: PreTrainedModel, ids_BL: Tensor, **arguments: Any) -> Tensor:
    """Compute [B, L, V] logits as `learner.scoring` does."""
    hidden_BLD = model.model(input_ids=ids_BL, use_cache=False, **arguments).last_hidden_state
    products_BLV = torch.nn.functional.linear(hidden_BLD, model.lm_head.weight, model.lm_head.bias)
    return logit_map(model.config)(products_BLV)


def _compare(own: Tensor, other: Tensor) -> float:
    """Return the largest difference between logits, divided by the largest absolute logit if that is above 1.

    Logits of excluded tokens are ignored.
    """
    is_allowed = ~(own < EXCLUDED / 2)  # NaN counts as allowed, so that it is found
    own, other = own[is_allowed], other[is_allowed]
    return float((own - other).abs().max()) / max(1.0, float(own.abs().max()))
