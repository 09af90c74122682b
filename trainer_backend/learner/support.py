"""Which models the learner can score exactly; the others are refused before anything is trained."""

from typing import Any

import torch
from transformers import PreTrainedModel

from trainer_backend.errors import ModelFolderError
from trainer_backend.models.folder import embedding_rows

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
    """Scoring runs `model.model` under a mask of its own and applies `lm_head` itself (`learner.scoring`).

    Args:
        longest: tokens of the longest sequence that the job samples, inference.max_model_len.

    Raises:
        ModelFolderError: something stands between hidden states and logits that scoring would leave out
            (a bias, a scale, a soft cap); a layer attends differently than the mask says; the model has
            fewer positions than `longest`.
    """
    if not hasattr(model, "model") or not hasattr(model, "lm_head"):
        raise ModelFolderError(f"{type(model).__name__} has no `model` and `lm_head`", where="model")
    if getattr(model.lm_head, "bias", None) is not None:
        raise ModelFolderError("its lm_head has a bias, which the learner would leave out", where="model")
    for name, neutral in NEUTRAL.items():
        if getattr(model.config, name, None) not in neutral:
            raise ModelFolderError(f"its config sets {name}, which the learner leaves out", where="model")
    _refuse_windows(model.config, longest)
    _refuse_few_positions(model.config, longest)
    _refuse_other_logits(model)


def _refuse_windows(config: Any, longest: int) -> None:
    """A window that holds every sequence whole is none."""
    window = getattr(config, "sliding_window", None)
    # The models of before `layer_types` have the window in all layers.
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    if window is not None and window >= longest:
        kinds.discard("sliding_attention")
    if kinds - {"full_attention"}:
        of_width = f" of {window} tokens" if "sliding_attention" in kinds and window else ""
        raise ModelFolderError(
            f"its layers are {', '.join(sorted(kinds))}{of_width}; packed rows need full_attention, or a "
            f"window of inference.max_model_len ({longest})",
            where="model",
        )


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
    """What no list of names above foresees: the learner's logits of a few tokens beside the model's own."""
    ids_BL = torch.arange(min(8, embedding_rows(model)), device=model.device)[None]
    own_BLV = model(input_ids=ids_BL, use_cache=False).logits
    hidden_BLD = model.model(input_ids=ids_BL, use_cache=False).last_hidden_state
    ours_BLV = hidden_BLD @ model.lm_head.weight.T
    apart = float((own_BLV - ours_BLV).abs().max())
    if not apart <= ROUNDING * max(1.0, float(own_BLV.abs().max())):
        raise ModelFolderError(
            f"its logits lie up to {apart:.3g} from lm_head(hidden states), all that the learner computes",
            where="model",
        )
