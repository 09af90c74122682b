"""Weights held in low precision: they are rounded, and nothing beside them is."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trainer_backend.learner.copies import hold_in


def test_weights_are_rounded_and_the_frequencies_of_rotary_positions_are_not():
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**size, vocab_size=64, tie_word_embeddings=True))
    exact = {name: buffer.clone() for name, buffer in model.named_buffers()}
    hold_in(model, torch.bfloat16)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert exact, "the frequencies"
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, exact[name], rtol=0, atol=0)
    assert model.lm_head.weight is model.model.embed_tokens.weight
