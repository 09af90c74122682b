"""Builds presets: small language models with random weights, which a job can train from scratch.

Presets are ordinary Qwen3 models of 0.3 to 26 million parameters. One core of a laptop is enough to train a
preset of under a million parameters. `core.presets` lists their shapes.
"""

import math

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from shared_schemas.base import did_you_mean
from trainer_backend.core.presets import PRESETS, Preset
from trainer_backend.errors import ModelFolderError


def build_preset(name: str, tokenizer: PreTrainedTokenizerFast, *, seed: int = 0) -> PreTrainedModel:
    """Build the preset `name` with random weights for a tokenizer's vocabulary, in float32 and eval mode.

    The same name, vocabulary size and seed give the same weights. The state of torch's global random
    generator is left unchanged.
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


# Standard deviation of the initial weights, for models up to the width _NARROW. The usual 0.02 is meant for
# wide models: at width 96 the first logits would be nearly equal, and the warm-up would be slow to start. For
# wider models the deviation is lowered, so that logits keep their scale.
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
