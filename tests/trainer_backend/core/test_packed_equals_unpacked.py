"""On a real transformers model, a packed row gives what each segment gives alone, gradients included.

This holds transformers to two promises: a 4D mask is used as it is, and positions are those we pass.
"""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.trainer_backend.segment_columns import make_batch, make_segment
from trainer_backend.core.aggregation import token_mean
from trainer_backend.core.collate import block_mask, cut_batch
from trainer_backend.core.logprobs import chunked_logprobs
from trainer_backend.core.losses import ClipKeys, clipped_policy_loss, entropy_loss

VOCABULARY = 37


def tiny_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.3,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).eval()


def segments():
    """Conversations of several decisions, of many lengths and temperatures."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for k, length in enumerate([23, 7, 12, 3, 19, 9, 5]):
        ids = torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
        decision = [-1 if i == 0 or i % 4 == 1 else i // 4 for i in range(length)]
        temperature = (0.5, 1.0, 1.5)[k % 3]
        made.append(make_segment(f"r-{k}", ids, decision, (-1.0,) * length, temperature=temperature))
    return made


def pack(parts, row_tokens):
    advantages = {part.rollout_id: [(-1.0) ** t * (k + 1) for t in range(9)] for k, part in enumerate(parts)}
    proximal = [[-2.0] * len(part.logprobs) for part in parts]
    return make_batch(parts, advantages=advantages, proximal=proximal, row_tokens=row_tokens)


def packed_logprobs(model, packed, chunk=16):
    hidden_BLD = model.model(
        input_ids=packed.token_ids_BL,
        position_ids=packed.position_ids_BL,
        attention_mask=block_mask(packed.position_ids_BL),
        use_cache=False,
    ).last_hidden_state
    hidden_ND = hidden_BLD[packed.predict_row_N, packed.predict_position_N]
    return chunked_logprobs(
        hidden_ND, model.lm_head.weight, packed.target_N, packed.temperature_N, chunk=chunk
    )


def unpacked_logprobs(model, part):
    """Plain: one sequence, the causal mask of the model, full logits."""
    logits_LV = model(input_ids=torch.tensor([part.token_ids.tolist()])).logits[0]
    logp_LV = (logits_LV[:-1] / part.temperatures[0]).log_softmax(-1)
    return torch.stack([logp_LV[i - 1, part.token_ids[i]] for i in part.sampled_positions])


@pytest.mark.parametrize("row_tokens", [23, 40, 200])
def test_packed_log_probs_are_those_of_each_segment_alone(row_tokens):
    model, parts = tiny_model(), segments()
    packed = pack(parts, row_tokens).packed
    with torch.no_grad():
        found, _ = packed_logprobs(model, packed)
        alone = [unpacked_logprobs(model, part) for part in parts]
    for k, expected in enumerate(alone):
        torch.testing.assert_close(found[packed.segment_N == k], expected, rtol=0, atol=1e-5)


def test_without_the_mask_or_the_positions_the_log_probs_would_be_others():
    # the test above is not vacuous: neighbours in a row would be seen
    model, parts = tiny_model(), segments()
    packed = pack(parts, 200).packed
    with torch.no_grad():
        right, _ = packed_logprobs(model, packed)
        hidden_BLD = model.model(input_ids=packed.token_ids_BL, use_cache=False).last_hidden_state
        hidden_ND = hidden_BLD[packed.predict_row_N, packed.predict_position_N]
        wrong, _ = chunked_logprobs(hidden_ND, model.lm_head.weight, packed.target_N, packed.temperature_N)
    assert (right - wrong).abs().max() > 0.1


# Tolerances of the gradients below are those of the batch's float32 columns; the model is float64.
def step_gradient(row_tokens, max_rows):
    """Loss and gradient of one optimizer step, cut into micro-batches."""
    model = tiny_model().double()
    total = 0.0
    for cut in cut_batch(pack(segments(), row_tokens), max_rows):
        logprobs, entropies = packed_logprobs(model, cut.packed)
        loss = clipped_policy_loss(
            logprobs,
            cut.proximal_logprob_N,
            cut.advantage_N,
            cut.weight_N,
            ClipKeys(clip_low=0.2, clip_high=0.25),
        )
        loss = loss + 0.01 * entropy_loss(entropies, cut.weight_N)
        loss.backward()
        total += loss.item()
    return total, torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize(("row_tokens", "max_rows"), [(23, 1), (23, 3), (40, 2)])
def test_loss_and_gradient_do_not_depend_on_packing_or_on_how_the_batch_is_cut(row_tokens, max_rows):
    loss, gradient = step_gradient(200, 1)
    other_loss, other_gradient = step_gradient(row_tokens, max_rows)
    assert other_loss == pytest.approx(loss, rel=1e-6)
    assert gradient.isfinite().all()
    torch.testing.assert_close(other_gradient, gradient, rtol=1e-4, atol=1e-7)


def test_the_gradient_is_that_of_the_segments_one_by_one():
    model, parts = tiny_model().double(), segments()
    batch = pack(parts, 40)
    total = sum(map(len, token_mean(parts)))
    for k, part in enumerate(parts):
        logprobs = unpacked_logprobs(model, part)
        at = batch.packed.segment_N == k
        advantages = batch.advantage_N[at]
        ratio = (logprobs - batch.proximal_logprob_N[at]).exp()
        (-torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.25) * advantages).sum() / total).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    logprobs, _ = packed_logprobs(model, batch.packed)
    clipped_policy_loss(
        logprobs,
        batch.proximal_logprob_N,
        batch.advantage_N,
        batch.weight_N,
        ClipKeys(clip_low=0.2, clip_high=0.25),
    ).backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)
