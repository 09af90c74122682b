"""Copies in low precision compute what the learner does: same factors, same sums, same places of rounding."""

from dataclasses import replace
from itertools import chain

import pytest
import torch
from transformers import PreTrainedModel

from tests.tiny_families import tiny_model
from tests.trainer_backend.learner.hand_made import sampled, segment
from trainer_backend.job.training_table import LoopKeys, LoraTable
from trainer_backend.learner.adapter import Adapter
from trainer_backend.learner.device import Placement
from trainer_backend.learner.learner import build_scorer, frozen_scorer
from trainer_backend.learner.loading import copy_to_serve, held_copy, hold_in

LOW = Placement(torch.device("cpu"), torch.bfloat16)
SIZE = {
    "hidden_size": 128, "intermediate_size": 256, "vocab_size": 300, "initializer_range": 0.08,
    "head_dim": 32, "pad_token_id": None,
}  # fmt: skip


def make_model(family: str, *, adapted: bool) -> PreTrainedModel:
    """As it is after some updates: nothing in it is a number of bfloat16, nothing 0 or 1."""
    torch.set_num_threads(1)
    # Qwen2 has biases; here it also gets a head of its own.
    model = tiny_model(family, **SIZE, tie_word_embeddings=family != "qwen2")
    if adapted:
        hold_in(model, torch.bfloat16)
        Adapter.fresh(model, LoraTable(rank=4, alpha=8), seed=0, base=None)
    for name, weight in model.named_parameters():
        if weight.dim() == 1 or ".lora_B" in name:
            weight.data.add_(0.05 * torch.randn_like(weight))
    return model


@pytest.mark.parametrize(
    ("family", "adapted"), [("qwen3", False), ("qwen3", True), ("llama", False), ("qwen2", True)]
)
def test_engine_and_reference_compute_what_the_learner_does(family: str, adapted: bool):
    """Over weights in float32, and with adapters over a base that is rounded."""
    model = make_model(family, adapted=adapted)
    scorer = build_scorer(model, LOW)
    reference, served = frozen_scorer(scorer, model), copy_to_serve(model, torch.bfloat16)
    exact = replace(
        scorer, placement=Placement(LOW.device), model=held_copy(model, torch.float32), logits_chunk=64
    )

    def apart(prompts: list[list[int]], tokens: int) -> tuple[float, ...]:
        """How far engine, reference and float32 lie from the learner, root mean square over tokens (nats)."""
        found = sampled(served, prompts, tokens=tokens)
        parts = [
            segment(f"r{i}", prompt, one.token_ids, one.logprobs)
            for i, (prompt, one) in enumerate(zip(prompts, found, strict=True))
        ]
        rows = [
            one.score(parts, LoopKeys(row_tokens=64, micro_batch_tokens=512))
            for one in (scorer, reference, exact)
        ]
        own, *others = (torch.tensor(list(chain.from_iterable(row))) for row in rows)
        engine = torch.tensor(list(chain.from_iterable(one.logprobs for one in found)))
        return tuple(float((other - own).square().mean().sqrt()) for other in (engine, *others))

    # What a lone token attends to is itself, whichever kernel does it: all else is there, to the last bits.
    engine, same, rounding = apart([[5 + i] for i in range(64)], 1)
    assert engine < 1e-4 and same == 0.0 and rounding > 5e-3
    # Kernels of attention sum in orders of their own; that is noise, and less than all rounding together. Of
    # 4 prompts instead of 32 the ratio is itself noise: 0.41 to 0.75 by family and by processor.
    engine, same, rounding = apart([[5 + (i + 7 * j) % 200 for i in range(20)] for j in range(32)], 30)
    assert engine < 0.7 * rounding and same == 0.0


def test_a_copy_in_low_precision_keeps_the_bias_of_its_head():
    model = tiny_model("llama", tie_word_embeddings=True)
    width, rows = model.config.hidden_size, model.config.vocab_size
    model.lm_head = torch.nn.Linear(width, rows, bias=True)
    hidden_1D = torch.zeros(1, width)
    with torch.no_grad():
        model.lm_head.bias.copy_(torch.arange(rows) / 1000)
        served = copy_to_serve(model, torch.bfloat16)
        assert torch.equal(served.lm_head(hidden_1D)[0], torch.arange(rows) / 1000)  # of float32, unrounded


def test_matrices_are_rounded_and_neither_norms_nor_the_frequencies_of_rotary_positions_are():
    model = tiny_model("llama", tie_word_embeddings=True)
    exact = {name: buffer.clone() for name, buffer in model.named_buffers()}
    hold_in(model, torch.bfloat16)
    assert {(weight.dim(), weight.dtype) for weight in model.parameters()} == {
        (1, torch.float32),
        (2, torch.bfloat16),
    }
    assert exact, "the frequencies"
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, exact[name], rtol=0, atol=0)
    assert model.lm_head.weight is model.model.embed_tokens.weight
