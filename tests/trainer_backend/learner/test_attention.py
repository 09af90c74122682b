"""A mask over rows and kernels over one row give what each segment gives alone, on real models.

Their gradients agree too, and checkpointed layers change nothing but what is kept.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.tiny_families import tiny_model
from tests.trainer_backend.learner.hand_made import alone, make_segments
from tests.trainer_backend.learner.test_joined import OneByOne
from tests.trainer_backend.segment_columns import make_segment
from trainer_backend.core.collate import cut_packed, pack_segments
from trainer_backend.core.tries import Tries
from trainer_backend.job.training_table import LoopKeys
from trainer_backend.learner.attention import BlockMask, ByLength, OneRow
from trainer_backend.learner.by_length import SHORTEST_SHARE, SegmentBounds, group_by_length, one_row
from trainer_backend.learner.device import Placement
from trainer_backend.learner.scoring import Scorer
from trainer_backend.learner.stepping import checkpoint_layers, stepping

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


WAYS = [BlockMask(), OneRow(attend_one_by_one), ByLength()]
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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("attention", WAYS, ids=WAYS_NAMES)
@pytest.mark.parametrize("row_tokens", [23, 40, 200])
def test_packed_log_probs_are_those_of_each_segment_alone(architecture, attention, row_tokens):
    scorer, parts = build_scorer(architecture, attention), make_segments(LENGTHS)
    found = scorer.score(
        parts, LoopKeys.model_construct(row_tokens=row_tokens, micro_batch_tokens=2 * row_tokens)
    )
    check_scores(scorer.model, parts, found)


def gradient(scorer, *, row_tokens, max_rows, parts=None):
    parts = parts or make_segments(LENGTHS)
    packed = pack_segments(parts, row_tokens=row_tokens, tries=scorer.tries(parts))
    for piece in cut_packed(packed, max_rows):
        states = scorer.states(piece)
        logprobs_N, entropies_N = states.logprobs_N, states.entropies_N
        (logprobs_N + 0.1 * entropies_N).sum().backward()
    return torch.cat([weight.grad.flatten() for weight in scorer.model.parameters()])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("attention", WAYS[1:], ids=WAYS_NAMES[1:])
def test_all_ways_have_the_same_gradient_however_the_batch_is_cut(architecture, attention):
    masked = gradient(build_scorer(architecture, BlockMask()), row_tokens=40, max_rows=2)
    one = gradient(build_scorer(architecture, attention), row_tokens=200, max_rows=1)
    torch.testing.assert_close(one, masked, rtol=1e-4, atol=1e-6)


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
@pytest.mark.parametrize(
    "attention", [WAYS[0], OneRow(attend_one_by_one, OneByOne()), WAYS[2]], ids=WAYS_NAMES
)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_what_segments_begin_with_is_computed_once_and_changes_nothing(architecture, attention, checkpointed):
    parts, plain = alike_at_first(), build_scorer(architecture, BlockMask())
    expected = gradient(plain, row_tokens=40, max_rows=9, parts=parts)
    scorer = replace(build_scorer(architecture, attention), share_from=1)
    if checkpointed:
        checkpoint_layers(scorer.model)
    tokens = []
    scorer.model.model.embed_tokens.register_forward_hook(lambda _, given, out: tokens.append(out.shape[1]))
    with stepping(scorer.model):
        found = gradient(scorer, row_tokens=200, max_rows=9, parts=parts)
    assert tokens == [9 + 6 + 5 + 3 + 8 + 4] == [Tries.of(parts, 1).distinct]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    scores = scorer.score(parts, LoopKeys.model_construct(row_tokens=40, micro_batch_tokens=80))
    check_scores(scorer.model, parts, scores)


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
            gradients.append(gradient(scorer, row_tokens=40, max_rows=9))
        assert not any(module.training for module in scorer.model.modules())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-9, atol=1e-12)
    assert kept[1] < kept[0] / 3


def test_one_row_holds_the_tokens_in_order_without_padding_and_knows_its_bounds():
    packed = pack_segments(make_segments(LENGTHS[:3]), row_tokens=30)  # 23 + 7 fill a row, 12 begin the next
    row, bounds = one_row(packed)
    assert row.token_ids_BL[0].tolist() == [
        *packed.token_ids_BL[0].tolist(),
        *make_segments(LENGTHS)[2].token_ids,
    ]
    assert row.position_ids_BL[0].tolist() == [*range(23), *range(7), *range(12)]
    assert row.segment_ids_BL[0].tolist() == [1] * 23 + [2] * 7 + [3] * 12
    assert (bounds.starts_S.tolist(), bounds.longest) == ([0, 23, 30, 42], 23)
    assert bounds.starts_S.dtype == torch.int32
    after = row.token_ids_BL[row.predict_row_N, row.predict_position_N + 1]
    assert torch.equal(after, packed.target_N)


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
