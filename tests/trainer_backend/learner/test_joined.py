"""Attention in joined parts gives what one softmax under the trie's mask gives, and its gradient."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from tests.trainer_backend.segment_columns import make_segment
from trainer_backend.core.collate import block_mask, pack_segments
from trainer_backend.core.tries import Tries
from trainer_backend.learner.joined import Flash, Plan, Runs, Shared, attend, attend_levels, list_levels
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
