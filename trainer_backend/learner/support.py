"""Which models the learner can score exactly; the others are refused before anything is trained."""

from transformers import PreTrainedModel

from trainer_backend.errors import ModelFolderError


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Scoring runs `model.model` under a block mask and applies `lm_head` itself (`learner.scoring`).

    Raises:
        ModelFolderError: something stands between hidden states and logits that scoring would leave out
            (a bias, a scale, a soft cap), or a layer that attends differently than the mask says.
    """
    config = model.config
    if not hasattr(model, "model") or not hasattr(model, "lm_head"):
        raise ModelFolderError(f"{type(model).__name__} has no `model` and `lm_head`", where="model.path")
    if getattr(model.lm_head, "bias", None) is not None:
        raise ModelFolderError(
            "its lm_head has a bias, which the learner would leave out", where="model.path"
        )
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, name, None) not in (None, 1.0):
            raise ModelFolderError(
                f"its config sets {name}, which the learner leaves out", where="model.path"
            )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ModelFolderError(
            f"its layers are {', '.join(sorted(kinds))}; packed rows need full_attention", where="model.path"
        )
    # Eager attention would add a mask of booleans to its scores instead of masking with it.
    model.set_attn_implementation("sdpa")
