"""The learner's own forward pass: it is that of transformers, and computes what is read and nothing else."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from tests.tiny_families import tiny_model
from tests.trainer_backend.learner.hand_made import segment
from trainer_backend.core.collate import pack_segments
from trainer_backend.learner.attention import BlockMask, ByLength, PackedAttention
from trainer_backend.learner.by_length import SegmentBounds, plan_reads
from trainer_backend.learner.device import Placement
from trainer_backend.learner.operators import by_kernels, rms_norm, rotary
from trainer_backend.learner.packed_decoder import is_known
from trainer_backend.learner.scoring import Scorer

# The second has biases, the third norms of heads.
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
# One answer each; and a conversation, most of whose tokens are read.
ANSWERS = [segment("a", [5] * 9, [6, 7], [0.0] * 2), segment("b", [8] * 6, [9], [0.0])]
TALK = [segment("c", [3, 4], [5, 6, 7, 8, 9], [0.0] * 5)]


def build_scorer(family: str, attention: PackedAttention, dtype: torch.dtype = torch.float64) -> Scorer:
    model = tiny_model(family, num_hidden_layers=2, initializer_range=0.3)
    for name, weight in model.named_parameters():
        if weight.dim() == 1:  # norms and biases, which begin as 1 and 0
            torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.2)
    model.set_attn_implementation(attention.implementation)
    return Scorer(model.to(dtype), Placement(torch.device("cpu")), attention, 16)


def found(scorer: Scorer, parts: list) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs, and the gradient of their sum."""
    logprobs_N = scorer.logprobs(pack_segments(parts, row_tokens=20))
    logprobs_N.sum().backward()
    return logprobs_N.detach(), torch.cat([weight.grad.flatten() for weight in scorer.model.parameters()])


@pytest.mark.parametrize("parts", [ANSWERS, TALK, ANSWERS + TALK], ids=["answers", "talk", "both"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-6), (torch.float32, 1e-4)], ids=str)
def test_log_probs_and_gradients_are_those_of_transformers(
    dtype: torch.dtype, atol: float, family: str, parts: list
):
    own, theirs = build_scorer(family, ByLength(), dtype), build_scorer(family, BlockMask(), dtype)
    assert is_known(own.model)
    for mine, expected in zip(found(own, parts), found(theirs, parts), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=atol)  # norms are float32 in both


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: make test-kernel")
def test_of_products_that_are_one_by_kernels_those_that_are_trained_get_their_gradients():
    scorer = replace(build_scorer("llama", ByLength(), torch.float32), operators=by_kernels(torch.float32))
    whole = dict(scorer.model.named_parameters())
    _ = found(scorer, TALK)
    expected = {name: weight.grad for name, weight in whole.items()}
    frozen = [name for name in whole if "q_proj" in name or "gate_proj" in name or "layernorm" in name]
    for name, weight in whole.items():
        weight.grad = None
        weight.requires_grad_(name not in frozen)
    scorer.logprobs(pack_segments(TALK, row_tokens=20)).sum().backward()
    for name, weight in whole.items():
        assert (weight.grad is None) == (name in frozen), name
        if weight.grad is not None:
            torch.testing.assert_close(weight.grad, expected[name])


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: make test-kernel")
@pytest.mark.parametrize("parts", [ANSWERS, TALK], ids=["answers", "talk"])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_by_kernels_are_those_by_torch(family: str, checkpointed: bool, parts: list):
    theirs = build_scorer(family, ByLength(), torch.float32)
    own = replace(build_scorer(family, ByLength(), torch.float32), operators=by_kernels(torch.float32))
    if checkpointed:
        own.model.gradient_checkpointing_enable({"use_reentrant": False})
        own.model.train()
    for mine, expected in zip(found(own, parts), found(theirs, parts), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


def test_a_frozen_norm_gets_no_gradient_and_its_input_the_same_one():
    torch.manual_seed(0)
    norm, states_LD = LlamaRMSNorm(8), torch.randn(5, 8, requires_grad=True)
    trained, _ = torch.autograd.grad(rms_norm(norm, states_LD).square().sum(), (states_LD, norm.weight))
    norm.weight.requires_grad_(False)
    (frozen,) = torch.autograd.grad(rms_norm(norm, states_LD).square().sum(), states_LD)
    torch.testing.assert_close(frozen, trained, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("parts", "queries"), [(ANSWERS, [18, 3]), (TALK, [7, 7])], ids=["few are read", "most are read"]
)
def test_the_last_layer_is_computed_for_the_tokens_that_are_read(parts: list, queries: list[int]):
    scorer, rows = (
        build_scorer("llama", ByLength()),
        {"q_proj": [], "k_proj": [], "o_proj": [], "down_proj": []},
    )
    for name, module in scorer.model.named_modules():
        if (kind := name.rpartition(".")[2]) in rows:
            module.register_forward_hook(lambda _, given, __, kind=kind: rows[kind].append(len(given[0])))
    found(scorer, parts)
    tokens, read = sum(map(len, parts)), sum(len(part.logprobs) for part in parts)
    assert rows == {
        "q_proj": queries, "k_proj": [tokens] * 2, "o_proj": [tokens, read], "down_proj": [tokens, read]
    }  # fmt: skip


def test_queries_of_few_tokens_stand_by_segment_and_see_no_later_key():
    # Segments of 4 and 5 tokens in a group; read are tokens 2 and 3 of the first, 4 of the second.
    bounds = SegmentBounds(torch.tensor([0, 4, 9], dtype=torch.int32), longest=5)
    reads = plan_reads(bounds, torch.tensor([2, 3, 8]), torch.float32)
    assert reads.queries.shapes == ((2, 2),)  # the longer segment first, its one query twice
    assert reads.queries.token_P.tolist() == [2, 2, 0, 1]
    assert reads.queries.place_L.tolist() == [2, 3, 0]
    (mask_G1QK,) = reads.masks
    seen = (mask_G1QK[:, 0] == 0).int().tolist()
    assert seen == [[[1, 1, 1, 1, 1]] * 2, [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]]


def test_queries_of_most_tokens_are_left_to_causal_attention():
    bounds = SegmentBounds(torch.tensor([0, 4], dtype=torch.int32), longest=4)
    assert plan_reads(bounds, torch.tensor([1, 2, 3]), torch.float32) is None
    assert plan_reads(bounds, torch.tensor([2, 3]), torch.float32) is not None


def test_rotations_are_those_of_transformers_and_their_gradient_is_exact():
    torch.manual_seed(0)
    heads_LHD = torch.randn(5, 3, 8, dtype=torch.float64, requires_grad=True)
    half_LD = torch.randn(5, 4, dtype=torch.float64)
    angles_LD = torch.cat([half_LD, half_LD], dim=-1)
    cos_LD, sin_LD = angles_LD.cos(), angles_LD.sin()
    theirs, _ = apply_rotary_pos_emb(
        heads_LHD[None], heads_LHD[None], cos_LD[None], sin_LD[None], unsqueeze_dim=2
    )
    torch.testing.assert_close(rotary(heads_LHD, cos_LD, sin_LD), theirs[0])
    assert torch.autograd.gradcheck(lambda heads: rotary(heads, cos_LD, sin_LD), heads_LHD)


def test_a_rotation_keeps_its_angles_and_none_of_the_heads():
    kept = []
    heads_LHD, angles_LD = torch.randn(5, 3, 8, requires_grad=True), torch.randn(5, 8)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape), lambda _: None):
        rotary(heads_LHD, angles_LD.cos(), angles_LD.sin())
    assert kept == [torch.Size([5, 1, 8])] * 2
