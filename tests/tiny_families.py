"""Tiny random models of this year's families: one of each kind of layer, and the rest in KEYS."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

VOCABULARY = 64
_SIZE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
# By model_type: what its config needs beyond the sizes. Keys that a config does not know are left out.
KEYS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA | _EXPERTS,
    "qwen3_5_moe_text": _DELTA | _EXPERTS,
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, **_EXPERTS},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "shared_intermediate_size": 24,
        **_EXPERTS,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1, **_EXPERTS},
    "lfm3": {"layer_types": ["conv", "full_attention"] * 2},
    "gpt_oss": {"sliding_window": 8, **_EXPERTS},
    "gemma2": {"sliding_window": 8},
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma4_text": {
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "final_logit_softcapping": 30.0,
    },
    "olmo3": {"sliding_window": 8},
    "qwen3_moe": _EXPERTS,
    "glm4_moe": _EXPERTS | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "deepseek_v3": _LATENT | _EXPERTS | {"num_key_value_heads": 4},
    "glm4_moe_lite": _LATENT | _EXPERTS | {"num_key_value_heads": 4},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 2.0},
    "cohere": {"logit_scale": 0.5},
    "smollm3": {},
    "phi3": {},
    "glm4": {},
    "llama4_text": {"attention_chunk_size": 16, **_EXPERTS},
}
# One of each kind of layer: gated delta, another state, sinks and windows, experts, scales, caps.
EACH_KIND = ("qwen3_5_text", "lfm2", "gpt_oss", "qwen3_moe", "granite", "gemma2")


def tiny_model(name: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model of a `model_type`, float32, in evaluation mode."""
    torch.manual_seed(seed)
    known = AutoConfig.for_model(name)
    told = {
        key: value for key, value in {**_SIZE, **KEYS.get(name, {}), **changes}.items() if _has(known, key)
    }
    config = AutoConfig.for_model(name, **told)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).float().eval()  # type: ignore[no-untyped-call]
    return model


def _has(config: Any, key: str) -> bool:
    try:
        return hasattr(config, key)
    except RuntimeError:  # a size that differs by layer
        return True


_TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_PATCHES = {**_TOWER, "image_size": 16, "patch_size": 4}
_BY_PLACE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
_BLOCKS = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
# Wrappers of text and vision by model_type: the text part's, what its config needs, and that of the tower.
WRAPPERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", {}, {**_BLOCKS, "num_position_embeddings": 16}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {}, {**_BLOCKS, "num_position_embeddings": 16}),
    "gemma3": ("gemma3_text", {}, {"model_type": "siglip_vision_model", **_PATCHES}),
    "qwen3_vl": (
        "qwen3_vl_text",
        _BY_PLACE,
        {**_BLOCKS, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    ),
    "glm4v": ("glm4v_text", _BY_PLACE, {**_BLOCKS, "image_size": 16, "patch_size": 4}),
    "mistral3": ("mistral", {}, {"model_type": "pixtral", **_PATCHES, "head_dim": 8}),
    "llama4": (
        "llama4_text",
        {"intermediate_size_mlp": 48},
        {
            **_PATCHES,
            "intermediate_size": 64,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
    ),
}


def tiny_wrapper(name: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random wrapper of text and vision, float32, in evaluation mode; `changes` are of its text part."""
    torch.manual_seed(seed)
    text, needs, tower = WRAPPERS[name]
    known = AutoConfig.for_model(text)
    told = {**_SIZE, **KEYS.get(text, {}), **needs, **changes}
    told = {key: value for key, value in told.items() if hasattr(known, key)}
    config = AutoConfig.for_model(name, text_config={"model_type": text, **told}, vision_config=tower)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config).float().eval()  # type: ignore[no-untyped-call]
    return model
