"""A mask over rows and kernels over one row give what each segment gives alone, on real models.

Their gradients agree too, and checkpointed layers change nothing but what is kept.
"""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from tests.tiny_families import tiny_model
from tests.trainer_backend.learner.hand_made import alone, make_segments
from tests.trainer_backend.segment_columns import make_segment
from trainer_backend.core.collate import block_mask, cut_packed, pack_segments
from trainer_backend.core.tries import Tries
from trainer_backend.job.training_table import LoopKeys
from trainer_backend.learner.attention import BlockMask, ByLength, OneRow
from trainer_backend.learner.by_length import SHORTEST_SHARE, SegmentBounds, group_by_length, one_row
from trainer_backend.learner.device import Placement
from trainer_backend.learner.joined import Flash, Plan, Runs, Shared, attend, attend_levels, list_levels
from trainer_backend.learner.scoring import Scorer
from trainer_backend.learner.stepping import checkpoint_layers, stepping
from trainer_backend.models import part_attention


class OneByOne(Flash):
    """A kernel of variable length in place of FlashAttention: a run at a time, by products."""

    dtype = None

    def forward(self, q_NHD, k_MHD, v_MHD, level, scale):
        k_MHD, v_MHD = (
            tensor.repeat_interleave(q_NHD.shape[1] // tensor.shape[1], 1) for tensor in (k_MHD, v_MHD)
        )
        outs = [
            part_attention.attended(q, k, v, None, level.causal, scale)
            for q, k, v in cut(level, q_NHD, k_MHD, v_MHD)
        ]
        return rows([out for out, _ in outs]), rows([lse[..., None] for _, lse in outs])[..., 0], None

    def backward(self, grad_NHD, tensors, out_NHD, lse_NH, level, scale, kept):
        found, shape = [], tensors[1].shape
        heads = len(tensors[0][0]) // shape[1]
        tensors = (tensors[0], *(tensor.repeat_interleave(heads, 1) for tensor in tensors[1:]))
        of_queries = zip(
            cut(level, grad_NHD),
            cut(level, out_NHD),
            cut(level, lse_NH[..., None]),
            cut(level, *tensors),
            strict=True,
        )
        for (grad,), (out,), (lse,), (q, k, v) in of_queries:
            found.append(part_attention.gradients(grad, q, k, v, out, lse[..., 0], None, level.causal, scale))
        dq, *others = (rows(column) for column in zip(*found, strict=True))
        return dq, *(part.unflatten(1, (shape[1], heads)).sum(2) for part in others)


def cut(level, queries, *keys):
    """For each run [1, H, n, D] of its queries and keys."""
    starts = [level.queries_S] + [level.keys_S] * len(keys)
    parts = [
        [tensor[a:b].transpose(0, 1)[None] for a, b in pairwise(begins.tolist())]
        for begins, tensor in zip(starts, (queries, *keys), strict=True)
    ]
    return list(zip(*parts, strict=True))


def rows(parts):
    return torch.cat([part[0].transpose(0, 1) for part in parts])


TEXTS = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=9), min_size=1, max_size=8)


def test_the_runs_of_a_row_by_hand():
    #            a  b  c  d     e  f     g     h  i       abcd, abcef, abg, hi
    position_L = [0, 1, 2, 3, 3, 4, 2, 0, 1]
    runs = Runs.of(torch.tensor(position_L).numpy())
    assert runs.starts_R.tolist() == [0, 2, 3, 4, 6, 7, 9]
    assert runs.shared == [Shared(0, 2, 7), Shared(2, 3, 6)]


@pytest.mark.parametrize("short", [128, 0], ids=["products", "kernel"])
@pytest.mark.parametrize("kv_heads", [2, 4])
@settings(max_examples=15, deadline=None)
@given(texts=TEXTS, share_from=st.integers(1, 3), seed=st.integers(0, 99))
def test_parts_joined_are_the_whole(short, kv_heads, texts, share_from, seed):
    parts = [make_segment(f"r{n}", [3, *ids], [-1] * len(ids) + [0]) for n, ids in enumerate(texts)]
    packed = pack_segments(parts, row_tokens=1000, tries=Tries.of(parts, share_from))
    positions_L, mask_LL = packed.position_ids_BL[0], block_mask(packed.position_ids_BL)[0, 0]
    draw = torch.Generator().manual_seed(seed)
    sizes = [(len(positions_L), heads, 16) for heads in (4, kv_heads, kv_heads)]
    q, k, v = (torch.randn(size, generator=draw, dtype=torch.float64).requires_grad_() for size in sizes)
    runs, read_N = Runs.of(positions_L.numpy()), packed.predict_position_N.unique()
    was, part_attention._SHORT = part_attention._SHORT, short
    try:
        plans = [(Plan.of_all(runs), slice(None)), (Plan.of_some(runs, read_N), read_N)]
        ways = [(partial(attend, plan), asked) for plan, asked in plans if plan is not None]
        ways.append((partial(attend_levels, list_levels(runs), OneByOne()), slice(None)))
        for way, asked in ways:
            heads_first = (tensor.transpose(0, 1)[None] for tensor in (q[asked], k, v))
            whole = scaled_dot_product_attention(*heads_first, mask_LL[asked], scale=0.3, enable_gqa=True)
            expected = whole[0].transpose(0, 1)
            found = way(q[asked], k, v, 0.3)
            torch.testing.assert_close(found, expected)
            upstream = torch.randn(found.shape, generator=draw, dtype=torch.float64)
            for mine, theirs in zip(
                torch.autograd.grad(found, (q, k, v), upstream),
                torch.autograd.grad(expected, (q, k, v), upstream),
                strict=True,
            ):
                torch.testing.assert_close(mine, theirs)
    finally:
        part_attention._SHORT = was


CPU = Placement(torch.device("cpu"))
ARCHITECTURES = ("qwen3", "llama", "mistral")
LENGTHS = (23, 7, 12, 3, 19, 9, 5)


def attend_one_by_one(q_LHD, k_LHD, v_LHD, bounds, scale):
    """What torch's kernel of variable length computes, a segment at a time."""
    attended = []
    for first, end in pairwise(bounds.starts_S.tolist()):
        q, k, v = (tensor[first:end].transpose(0, 1)[None] for tensor in (q_LHD, k_LHD, v_LHD))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        attended.append(out[0].transpose(0, 1))
    return torch.cat(attended)


WAYS = [BlockMask(), OneRow(attend_one_by_one, OneByOne()), ByLength()]
WAYS_NAMES = ["mask", "one by one", "by length"]


def build_scorer(architecture, attention, chunk=16):
    size = {"num_hidden_layers": 2, "initializer_range": 0.3, "sliding_window": None}
    model = tiny_model(architecture, **size).double()
    model.set_attn_implementation(attention.implementation)
    return Scorer(model, CPU, attention, chunk)


def check_scores(model, parts, scores):
    """They are those of each segment alone under the model's own causal mask."""
    model.set_attn_implementation("eager")
    for mine, part in zip(scores, parts, strict=True):
        with torch.no_grad():
            expected = alone(model, part).tolist()
        # The norms and the temperatures are float32 in a model of float64.
        assert mine == pytest.approx(expected, rel=0, abs=1e-5)


def gradient(scorer, parts, *, row_tokens, max_rows):
    packed = pack_segments(parts, row_tokens=row_tokens, tries=scorer.tries(parts))
    for piece in cut_packed(packed, max_rows):
        states = scorer.states(piece)
        logprobs_N, entropies_N = states.logprobs_N, states.entropies_N
        (logprobs_N + 0.1 * entropies_N).sum().backward()
    return torch.cat([weight.grad.flatten() for weight in scorer.model.parameters()])


def alike_at_first():
    """Two levels of beginnings, two equal segments, one inside another, and one that shares nothing."""
    draw = torch.Generator().manual_seed(2)
    rules, question, *rest = (torch.randint(2, 37, (n,), generator=draw).tolist() for n in (9, 6, 5, 3, 8, 4))
    texts = [
        [*rules, *question, *rest[0]],
        [*rules, *question, *rest[1]],
        [*rules, *rest[2]],
        [*rules, *rest[2]],
    ]
    texts += [[*rules, *question], rest[3]]
    return [make_segment(f"r-{k}", ids, [-1] * (len(ids) - 3) + [0] * 3) for k, ids in enumerate(texts)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("attention", WAYS, ids=WAYS_NAMES)
@pytest.mark.parametrize(
    ("is_shared", "checkpointed"), [(False, False), (True, False), (True, True)],
    ids=["each whole", "beginnings once", "beginnings once, checkpointed"],
)  # fmt: skip
def test_scores_are_those_of_each_segment_alone_and_gradients_those_of_the_mask(
    architecture, attention, is_shared, checkpointed
):
    parts = alike_at_first() if is_shared else make_segments(LENGTHS)
    expected = gradient(build_scorer(architecture, BlockMask()), parts, row_tokens=40, max_rows=2)
    scorer = replace(build_scorer(architecture, attention), share_from=1 if is_shared else None)
    if checkpointed:
        checkpoint_layers(scorer.model)
    tokens = []
    scorer.model.model.embed_tokens.register_forward_hook(lambda _, given, out: tokens.append(out.shape[1]))
    with stepping(scorer.model):
        found = gradient(scorer, parts, row_tokens=200, max_rows=1)
    if is_shared:
        assert tokens == [9 + 6 + 5 + 3 + 8 + 4] == [Tries.of(parts, 1).distinct]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    for row_tokens in (23, 40, 200):
        keys = LoopKeys.model_construct(row_tokens=row_tokens, micro_batch_tokens=2 * row_tokens)
        check_scores(scorer.model, parts, scorer.score(parts, keys))
        scorer.model.set_attn_implementation(attention.implementation)


def test_segments_of_similar_length_stand_side_by_side_padded_with_their_last_token():
    starts_S = torch.tensor([0, 4, 9, 11, 12], dtype=torch.int32)  # lengths 4, 5, 2, 1
    groups = group_by_length(SegmentBounds(starts_S, longest=5))
    assert groups.shapes == ((2, 5), (1, 2), (1, 1))
    assert groups.token_P.tolist() == [4, 5, 6, 7, 8, 0, 1, 2, 3, 3, 9, 10, 11]
    assert groups.place_L.tolist() == [5, 6, 7, 8, 0, 1, 2, 3, 4, 10, 11, 12]


def test_padding_costs_at_most_a_fifth_of_what_attention_computes():
    lengths = torch.randint(1, 400, (500,), generator=torch.Generator().manual_seed(0))
    starts_S = torch.cat([torch.tensor([0]), lengths.cumsum(0)])
    groups = group_by_length(SegmentBounds(starts_S, longest=int(lengths.max())))
    assert len(groups.place_L) >= SHORTEST_SHARE * len(groups.token_P)
    assert torch.equal(groups.token_P[groups.place_L], torch.arange(len(groups.place_L)))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_called_plainly_is_causal_over_each_row(architecture):
    scorer, ids_BL = build_scorer(architecture, ByLength()), torch.tensor([[3, 4, 5, 6], [7, 8, 9, 0]])
    with torch.no_grad():
        found = scorer.model(ids_BL).logits
        scorer.model.set_attn_implementation("eager")
        torch.testing.assert_close(found, scorer.model(ids_BL).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("attention", WAYS, ids=WAYS_NAMES)
def test_checkpointed_layers_give_the_same_gradient_and_keep_less(attention):
    kept = []

    def keep(tensor):
        kept[-1] += tensor.numel()
        return tensor

    gradients = []
    for checkpointed in (False, True):
        scorer = build_scorer("qwen3", attention)
        if checkpointed:
            checkpoint_layers(scorer.model)
        kept.append(0)
        with stepping(scorer.model), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            gradients.append(gradient(scorer, make_segments(LENGTHS), row_tokens=40, max_rows=9))
        assert not any(module.training for module in scorer.model.modules())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-9, atol=1e-12)
    assert kept[1] < kept[0] / 3


def test_one_row_has_the_bounds_that_a_kernel_of_variable_length_takes():
    _, bounds = one_row(pack_segments(make_segments(LENGTHS[:3]), row_tokens=30))
    assert (bounds.starts_S.tolist(), bounds.longest) == ([0, 23, 30, 42], 23)
    assert bounds.starts_S.dtype == torch.int32


def test_under_autocast_log_probs_are_near_those_of_float32_and_of_its_width():
    scorer = build_scorer("qwen3", BlockMask())
    scorer.model.float()
    low = Scorer(scorer.model, Placement(torch.device("cpu"), torch.bfloat16), BlockMask(), 16)
    packed = pack_segments(make_segments(LENGTHS), row_tokens=40)
    with torch.no_grad():
        exact_N = scorer.logprobs(packed)
        states = low.states(packed)
        rounded_N, entropies_N = states.logprobs_N, states.entropies_N
    assert rounded_N.dtype == entropies_N.dtype == torch.float32
    assert 0 < (rounded_N - exact_N).abs().max() < 0.3  # logits up to 20: two or three digits of bfloat16
    rounded_N = low.logprobs(packed)
    rounded_N.sum().backward()
    assert all(weight.grad.dtype == torch.float32 for weight in low.model.parameters())
