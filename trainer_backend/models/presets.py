"""Causal language models of 0.3 to 26 million parameters, built from a `transformers` config.

The presets are ordinary Qwen3 models, small enough to be trained from scratch. One core of a laptop trains
those of under a million parameters. Shapes: `core.presets`.
"""

import math

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from shared_schemas.base import did_you_mean
from trainer_backend.core.presets import PRESETS, Preset
from trainer_backend.errors import ModelFolderError


def build_preset(name: str, tokenizer: PreTrainedTokenizerFast, *, seed: int = 0) -> PreTrainedModel:
    """Build a randomly initialised preset for a tokenizer's vocabulary, in float32 and evaluation mode.

    The same name, tokenizer size and seed give the same weights; torch's global generator is not changed.
    """
    if name not in PRESETS:
        raise ModelFolderError(f"preset is {name!r}{did_you_mean(name, PRESETS)}", where="model.preset")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = preset_config(
            PRESETS[name],
            vocabulary=len(tokenizer),
            end_id=tokenizer.eos_token_id,
            pad_id=tokenizer.pad_token_id,
        )
        model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.eval()  # type: ignore[no-untyped-call]
    return model


# Standard deviation of initial weights, for models up to this width. The usual 0.02 is meant for wide models:
# at width 96 the first logits would be nearly flat, and the warm-up slow to start. For wider models we lower
# the deviation, so that logits keep their scale.
_DEVIATION, _NARROW = 0.06, 128


def preset_config(
    preset: Preset, *, vocabulary: int, end_id: int | None = None, pad_id: int | None = None
) -> Qwen3Config:
    """Return the `transformers` config of a preset whose embedding has `vocabulary` rows."""
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=preset.width,
        num_hidden_layers=preset.layers,
        num_attention_heads=preset.heads,
        num_key_value_heads=preset.heads,
        head_dim=preset.head_dim,
        intermediate_size=preset.mlp_width,
        max_position_embeddings=preset.max_positions,
        tie_word_embeddings=True,
        use_sliding_window=False,
        initializer_range=_DEVIATION * min(1.0, math.sqrt(_NARROW / preset.width)),
        eos_token_id=end_id,
        pad_token_id=pad_id,
        bos_token_id=None,
    )
