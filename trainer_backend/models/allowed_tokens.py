"""Restricts a model to a set of allowed tokens. All other tokens get probability 0."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig, PreTrainedModel

# Bias of the logit of a token that is not allowed. In float32 the token's probability is then 0, and so is
# its term of the entropy. With -inf that term would be 0 * inf, which is NaN.
EXCLUDED = -1e4
_KEY = "allowed_token_ids"


def allow_only(model: PreTrainedModel, token_ids: Sequence[int]) -> None:
    """Allow only the tokens `token_ids`: give the model's head a fixed bias, and store the ids in its config.

    Engine, learner and transformers all add the head's bias, so that they compute the same distribution.
    """
    rows = model.lm_head.weight.shape[0]
    assert model.lm_head.bias is None, "the presets' heads have no bias"
    bias_V = torch.full((rows,), EXCLUDED, device=model.lm_head.weight.device)
    bias_V[list(token_ids)] = 0.0
    # Not persistent, because the architecture has no such bias and a model folder must not contain it.
    del model.lm_head.bias
    model.lm_head.register_buffer("bias", bias_V, persistent=False)
    setattr(model.config, _KEY, sorted(token_ids))


def restrict_as_configured(model: PreTrainedModel) -> None:
    """Apply `allow_only` to a newly loaded or built model if its config lists allowed tokens."""
    if (allowed := read_allowed(model.config)) is not None:
        allow_only(model, allowed)


def read_allowed(config: PreTrainedConfig) -> Sequence[int] | None:
    """Return the ids that `allow_only` stored in the config; None if all tokens are allowed."""
    return getattr(config, _KEY, None)
