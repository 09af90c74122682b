"""Which models the learner can score exactly; the others are refused before anything is trained."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trainer_backend.core.collate import block_mask
from trainer_backend.errors import ModelFolderError
from trainer_backend.models.folder import embedding_rows
from trainer_backend.models.kinds import refuse_rotations_by_length, why_not_by_position

# Set to anything else, each of them comes between what the learner computes and the model's own logits.
NEUTRAL = {
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "logit_scale": (None, 1.0),
    "logits_scaling": (None, 1.0),
}
# How far logits may lie apart that the model and the learner compute from the same weights, relative to them.
ROUNDING = 1e-3


def refuse_unsupported(model: PreTrainedModel, *, longest: int) -> None:
    """Refuse a model whose log-probs of up to `longest` tokens the learner would compute wrongly.

    Scoring runs `model.model` under a mask of its own and applies `lm_head` itself (`learner.scoring`). So
    nothing else may stand between hidden states and logits, every layer must attend as the mask says, and
    positions may not depend on the length of a sequence.
    """
    if not hasattr(model, "model") or not hasattr(model, "lm_head"):
        raise ModelFolderError(f"{type(model).__name__} has no `model` and `lm_head`", where="model")
    if getattr(model.lm_head, "bias", None) is not None:
        raise ModelFolderError("its lm_head has a bias, which the learner would leave out", where="model")
    config = model.config.get_text_config()
    for name, neutral in NEUTRAL.items():
        if getattr(config, name, None) not in neutral:
            raise ModelFolderError(f"its config sets {name}, which the learner leaves out", where="model")
    if reason := why_not_by_position(model, longest=longest):
        raise ModelFolderError(
            f"its {reason}",
            where="model",
            hint="Take a model whose layers all have full_attention, such as Qwen3.",
        )
    refuse_rotations_by_length(config, longest=longest)
    _refuse_few_positions(config, longest)
    _refuse_other_logits(model)
    _refuse_neighbours(model)


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
    """Compare the learner's logits of a few tokens with the model's own: no list of names is complete."""
    ids_BL = _few_ids(model)
    own_BLV = model(input_ids=ids_BL, use_cache=False).logits
    apart = _apart(own_BLV, _logits(model, ids_BL))
    if not apart <= ROUNDING:
        raise ModelFolderError(
            f"its logits lie up to {apart:.3g} of their size from lm_head(hidden states), which is all that "
            "the learner computes",
            where="model",
        )


@torch.inference_mode()
def _refuse_neighbours(model: PreTrainedModel) -> None:
    """Compare the logits of two texts in one row with those of each text alone."""
    first_BL = _few_ids(model)
    second_BL = first_BL.flip(1)[:, : first_BL.shape[1] // 2 + 1]
    parts = [first_BL, second_BL]
    alone_BLV = torch.cat([_logits(model, part) for part in parts], dim=1)
    numbers_BL = torch.cat([torch.full_like(part, number) for number, part in enumerate(parts)], dim=1)
    mask_B1LL = block_mask(numbers_BL)
    together_BLV = _logits(
        model,
        torch.cat(parts, dim=1),
        position_ids=torch.cat([torch.arange(part.shape[1], device=part.device) for part in parts])[None],
        attention_mask=torch.zeros_like(mask_B1LL, dtype=model.dtype).masked_fill_(~mask_B1LL, -torch.inf),
    )
    apart = _apart(alone_BLV, together_BLV)
    if not apart <= ROUNDING:
        raise ModelFolderError(
            f"two texts in one row change each other's logits by up to {apart:.3g} of their size, whatever "
            "mask and positions say",
            where="model",
        )


def _few_ids(model: PreTrainedModel) -> Tensor:
    return torch.arange(min(8, embedding_rows(model)), device=model.device)[None]


def _logits(model: PreTrainedModel, ids_BL: Tensor, **arguments: Any) -> Tensor:
    """Logits as `learner.scoring` computes them."""
    hidden_BLD = model.model(input_ids=ids_BL, use_cache=False, **arguments).last_hidden_state
    logits_BLV: Tensor = hidden_BLD @ model.lm_head.weight.T
    return logits_BLV


def _apart(own: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest logit where that is above 1."""
    return float((own - other).abs().max()) / max(1.0, float(own.abs().max()))
