"""Restricts a model to some tokens: the softmax is over these tokens, and all others have probability 0."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig, PreTrainedModel

# Logit of a token that is not allowed. In float32 the token's probability is 0, and so is its share of an
# entropy; with -inf that share would be 0 * inf, which is NaN.
EXCLUDED = -1e4
_KEY = "allowed_token_ids"


def allow_only(model: PreTrainedModel, token_ids: Sequence[int]) -> None:
    """Exclude all tokens except `token_ids`, by an untrained bias of the head; the config stores the ids.

    Engine, learner and transformers add the bias of a head, so all three compute the same distribution.
    """
    rows = model.lm_head.weight.shape[0]
    assert model.lm_head.bias is None, "the presets' heads have no bias"
    bias_V = torch.full((rows,), EXCLUDED, device=model.lm_head.weight.device)
    bias_V[list(token_ids)] = 0.0
    # Not persistent: a folder's weights stay those of the architecture.
    del model.lm_head.bias
    model.lm_head.register_buffer("bias", bias_V, persistent=False)
    setattr(model.config, _KEY, sorted(token_ids))


def restrict_as_configured(model: PreTrainedModel) -> None:
    """Restrict a model that was made from a config to the tokens that the config lists, if it lists any."""
    if (allowed := read_allowed(model.config)) is not None:
        allow_only(model, allowed)


def read_allowed(config: PreTrainedConfig) -> Sequence[int] | None:
    """Return the ids that `allow_only` has stored; None if all tokens are allowed."""
    return getattr(config, _KEY, None)
