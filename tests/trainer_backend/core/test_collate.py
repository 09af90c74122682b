"""Segments packed into rows: places, columns, masks, cuts."""

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer_backend.segment_columns import make_batch, make_segment
from trainer_backend.core.collate import block_mask, by_segment, cut_batch, cut_packed, pack_segments
from trainer_backend.core.experts import UNKNOWN as N
from trainer_backend.core.segments import NO_EXPERTS
from trainer_backend.core.tries import Tries, pack
from trainer_backend.errors import BatchError


def segment(rollout_id, token_ids, decision, *, temperature=1.0):
    n = len(token_ids)
    logprobs = [-0.125 * i for i in range(n)]
    return make_segment(rollout_id, token_ids, decision, logprobs, temperature=temperature)


# lengths 3, 4, 2 in rows of 6: the longest with the shortest, then the one of 3
SEGMENTS = [
    segment("a", [11, 12, 13], [-1, 0, 0]),
    segment("a", [21, 22, 23, 24], [-1, -1, -1, 1], temperature=0.5),
    segment("b", [31, 32], [-1, 0]),
]
ADVANTAGES = {"a": [1.0, 2.0], "b": [-3.0]}


def test_rows_positions_and_segment_numbers_by_hand():
    packed = pack_segments(SEGMENTS, row_tokens=6)
    assert packed.token_ids_BL.tolist() == [[21, 22, 23, 24, 31, 32], [11, 12, 13, 0, 0, 0]]
    assert packed.position_ids_BL.tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 0, 0]]
    assert packed.segment_ids_BL.tolist() == [[1, 1, 1, 1, 2, 2], [1, 1, 1, 0, 0, 0]]


def test_a_sampled_token_is_predicted_one_position_before_it_in_its_own_segment():
    packed = pack_segments(SEGMENTS, row_tokens=6)
    assert packed.target_N.tolist() == [24, 32, 12, 13]
    assert packed.predict_row_N.tolist() == [0, 0, 1, 1]
    assert packed.predict_position_N.tolist() == [2, 4, 0, 1]
    assert packed.temperature_N.tolist() == [0.5, 1.0, 1.0, 1.0]
    assert packed.behaviour_logprob_N.tolist() == [-0.375, -0.125, -0.125, -0.25]
    assert packed.segment_N.tolist() == [1, 2, 0, 0]


def test_a_decision_begins_once_however_many_versions_sampled_it():
    # In rows of 9: a, then b and c. Decision 0 of a is sampled by three versions, 1 by two; 1 and 2 follow
    # without a token between. c begins with a decision of the number and at the position that b ended with.
    segments = [
        make_segment("a", range(9), [-1, -1, 0, 0, 0, 0, 1, 1, 2], versions=[0, 0, 3, 3, 4, 5, 5, 6, 6]),
        make_segment("b", range(5), [-1, 0, 0, -1, -1], versions=[0, 5, 6, 0, 0]),
        make_segment("c", range(4), [-1, -1, -1, 0], versions=[0, 0, 0, 6]),
    ]
    first_N = pack_segments(segments, row_tokens=9).first_N.tolist()
    assert first_N == [True, False, False, False, True, False, True, True, False, True]


def test_every_sampled_token_carries_the_columns_of_its_decision():
    batch = make_batch(
        SEGMENTS,
        advantages=ADVANTAGES,
        weights=[[0.1, 0.2], [0.3], [0.4]],
        proximal=[[-1.0, -2.0], [-3.0], [-4.0]],
        behaviour=[[0.5, 1.5], [2.0], [0.0]],
        units=[[0, 0], [1], [2]],
        policies=[1, 1, 0],
        row_tokens=6,
    )
    assert batch.advantage_N.tolist() == [2.0, -3.0, 1.0, 1.0]
    torch.testing.assert_close(batch.weight_N, torch.tensor([0.3, 0.4, 0.1, 0.2]))
    assert batch.proximal_logprob_N.tolist() == [-3.0, -4.0, -1.0, -2.0]
    assert batch.behaviour_weight_N.tolist() == [2.0, 0.0, 0.5, 1.5]
    assert batch.unit_N.tolist() == [1, 2, 0, 0]
    assert batch.policy_N.tolist() == [1, 0, 1, 1]


def test_attention_is_causal_and_stays_in_its_segment():
    packed = pack_segments(SEGMENTS, row_tokens=6)
    assert block_mask(packed.position_ids_BL)[1, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],  # padding looks at itself: an empty softmax would be NaN
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    assert block_mask(packed.position_ids_BL)[0, 0, 4:].int().tolist() == [
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1, 1],
    ]


def test_a_row_holds_what_segments_begin_with_once():
    alike = [
        segment("a", [1, 2, 3, 4], [-1, -1, -1, 0]),
        segment("b", [1, 2, 3, 5, 6], [-1, -1, -1, 0, 0]),
        segment("c", [9, 9], [-1, 0]),
        segment("d", [1, 2, 7], [-1, -1, 0]),
        segment("e", [1, 2, 3, 4], [-1, -1, -1, 0]),
    ]
    packed = pack_segments(alike, row_tokens=12, tries=Tries.of(alike, 1))
    assert packed.token_ids_BL.tolist() == [[1, 2, 3, 4, 5, 6, 7, 9, 9]]
    assert packed.position_ids_BL.tolist() == [[0, 1, 2, 3, 3, 4, 2, 0, 1]]
    assert packed.segment_ids_BL.tolist() == [[1, 1, 1, 1, 1, 1, 1, 2, 2]]
    assert packed.segment_N.tolist() == [0, 4, 1, 1, 3, 2]
    assert packed.target_N.tolist() == [4, 4, 5, 6, 7, 9]
    assert packed.predict_position_N.tolist() == [2, 2, 2, 4, 1, 7]
    assert block_mask(packed.position_ids_BL)[0, 0, 5:7].int().tolist() == [
        [1, 1, 1, 0, 1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 1, 0, 0],
    ]
    ones = {segment.rollout_id: [1.0] for segment in alike}
    batch = make_batch(alike, advantages=ones, row_tokens=12, tries=Tries.of(alike, 1))
    assert torch.equal(batch.packed.token_ids_BL, packed.token_ids_BL)
    # the two tokens that the fourth has of the others are too few, and so is one more than three
    apart = pack_segments(alike, row_tokens=12, tries=Tries.of(alike, 3))
    assert apart.position_ids_BL.tolist() == [[0, 1, 2, 3, 3, 3, 4, 0, 1, 2, 0, 1]]


def test_a_branch_near_the_one_above_is_dropped_with_all_that_are_as_deep():
    # 5 ids shared with the first, and 7 with each other; only two below are not worth a branch
    ends = ([9, 9, 9], [8, 8, 1], [8, 8, 2], [8, 8, 3])
    parts = [segment(str(k), [1] * 5 + end, [-1] * 7 + [0]) for k, end in enumerate(ends)]
    assert Tries.of(parts, 2).shared_S.tolist() == [0, 7, 7, 5]
    assert Tries.of(parts, 3).shared_S.tolist() == [0, 5, 5, 5]


def test_a_token_is_there_once_only_for_segments_that_name_the_same_experts():
    # two numbers a token; b differs from a at its second token, d names none; the last tokens name none
    named = {"a": [0, 1, 2, 3, 4, 5, N, N], "b": [0, 1, 2, 0, 4, 5, N, N], "c": [0, 1, 2, 3, 4, 5, N, N]}
    parts = [
        replace(
            segment(name, [1, 2, 3, last], [-1, -1, -1, 0]), experts=np.array(named.get(name, []), np.uint16)
        )
        for name, last in (("a", 7), ("b", 7), ("c", 8), ("d", 7))
    ]
    packed = pack_segments(parts, row_tokens=20, tries=Tries.of(parts, 1))
    kept = packed.segment_ids_BL > 0
    assert packed.position_ids_BL[kept].tolist() == [0, 1, 2, 3, 3, 1, 2, 3, 0, 1, 2, 3]
    assert packed.segment_N.tolist() == [0, 2, 1, 3]
    x = [-1, -1]
    assert packed.experts_BLW[kept].tolist() == [
        [0, 1], [2, 3], [4, 5], x, x, [2, 0], [4, 5], x, x, x, x, x,
    ]  # fmt: skip
    assert Tries.of([replace(part, experts=NO_EXPERTS) for part in parts], 1).distinct == 5


def row_lengths(packed):
    return (packed.segment_ids_BL > 0).sum(dim=1).tolist()


def test_equal_segments_have_no_more_sampled_tokens_in_a_row_than_a_row_has_tokens():
    alike = [segment(f"r-{k}", list(range(1, 9)), [-1] * 5 + [0] * 3) for k in range(7)]
    packed = pack_segments(alike, row_tokens=8, tries=Tries.of(alike, 1))
    assert row_lengths(packed) == [8] * 4
    assert packed.predict_row_N.bincount().tolist() == [6, 6, 6, 3]
    # two tries of few tokens that are sampled often
    alike += [segment(f"s-{k}", [20, 21], [-1, 0]) for k in range(7)]
    packed = pack_segments(alike, row_tokens=20, tries=Tries.of(alike, 1))
    assert packed.predict_row_N.bincount().tolist() == [18, 10]
    # as many as a row has tokens are not too many
    assert pack([2, 2], 8, [4, 4]) == [[0, 1]]
    assert pack([2, 2], 8, [4, 5]) == [[0], [1]]


def test_rows_are_filled_best_by_whole_tries():
    # tries of 3 + 2 * 2 and of 2 + 1, and segments of 5 and 3 that share nothing: 10 and 8 of 10 tokens
    parts = [
        segment("a", [1, 1, 1, 2, 2], [-1, -1, -1, -1, 0]),
        segment("b", [3, 3, 3, 3, 3], [-1, -1, -1, -1, 0]),
        segment("c", [1, 1, 1, 3, 3], [-1, -1, -1, -1, 0]),
        segment("d", [4, 4, 5], [-1, -1, 0]),
        segment("e", [6, 6, 6], [-1, -1, 0]),
    ]
    packed = pack_segments(parts, row_tokens=10, tries=Tries.of(parts, 2))
    assert row_lengths(packed) == [10, 8]
    assert packed.segment_N.tolist() == [0, 2, 3, 1, 4]


def test_siblings_stay_together_where_a_trie_is_cut():
    # 5 + 3 * 8 tokens, then 2 of each of two more siblings: cut before both, not where 32 are full
    parts = [segment(f"a-{k}", [1, 1, 3, 3, 3, *[k] * 8], [-1] * 5 + [0] * 8) for k in (4, 5, 6)]
    parts += [segment(f"b-{k}", [1, 1, 9, k, k], [-1] * 3 + [0, 0]) for k in (4, 5)]
    parts[3] = segment("b-3", [1, 1, 9, 3], [-1] * 3 + [0])
    packed = pack_segments(parts, row_tokens=32, tries=Tries.of(parts, 1))
    assert row_lengths(packed) == [29, 6]
    # of 5 + 2 * 8 tokens, 5 and 4 and 4: the cut is behind 30, since 21 are not nearly a row
    parts = parts[:2] + [segment(f"b-{k}", [1, 1, 9, *[k] * 4], [-1] * 3 + [0] * 4) for k in (4, 5, 6)]
    packed = pack_segments(parts, row_tokens=32, tries=Tries.of(parts, 1))
    assert row_lengths(packed) == [30, 7]


@pytest.mark.parametrize("max_rows", [1, 2, 5])
def test_cuts_hold_all_tokens_in_order_and_are_no_wider_than_they_need(max_rows):
    batch = make_batch(SEGMENTS, advantages=ADVANTAGES, row_tokens=6, level="decision")
    cuts = list(cut_batch(batch, max_rows))
    for name in ("advantage_N", "weight_N", "proximal_logprob_N", "unit_N"):
        assert torch.equal(torch.cat([getattr(cut, name) for cut in cuts]), getattr(batch, name))
    for cut in cuts:
        packed = cut.packed
        assert (packed.segment_ids_BL[:, -1] > 0).any()
        after = packed.token_ids_BL[packed.predict_row_N, packed.predict_position_N + 1]
        assert torch.equal(after, packed.target_N)
    lengths = [len(cut.target_N) for cut in cut_packed(batch.packed, max_rows)]
    assert lengths == [len(cut.weight_N) for cut in cuts]


@st.composite
def many_segments(draw):
    segments = []
    for k in range(draw(st.integers(1, 12))):
        context, sampled = draw(st.integers(1, 6)), draw(st.integers(1, 6))
        ids = draw(st.lists(st.integers(1, 3), min_size=context + sampled, max_size=context + sampled))
        segments.append(segment(f"r-{k}", ids, [-1] * context + [0] * sampled))
    return segments


@settings(max_examples=50)
@given(many_segments(), st.integers(12, 40))
def test_packing_loses_and_invents_nothing(segments, row_tokens):
    packed = pack_segments(segments, row_tokens=row_tokens)
    for part, row in zip(segments, by_segment(packed, packed.target_N), strict=True):
        assert row.tolist() == part.token_ids[part.sampled_positions].tolist()
    assert int((packed.segment_ids_BL > 0).sum()) == sum(map(len, segments))
    rows, at = packed.predict_row_N, packed.predict_position_N
    assert torch.equal(packed.token_ids_BL[rows, at + 1], packed.target_N)
    assert torch.equal(packed.segment_ids_BL[rows, at], packed.segment_ids_BL[rows, at + 1])
    assert packed.token_ids_BL.shape[1] <= row_tokens


@settings(max_examples=50)
@given(many_segments(), st.integers(12, 40), st.integers(1, 4))
def test_of_tries_each_sampled_token_is_predicted_behind_its_own_prompt(segments, row_tokens, share_from):
    packed = pack_segments(segments, row_tokens=row_tokens, tries=Tries.of(segments, share_from))
    seen_BLL = block_mask(packed.position_ids_BL)[:, 0]
    for index, part in enumerate(segments):
        mine_N = packed.segment_N == index
        assert packed.target_N[mine_N].tolist() == part.token_ids[part.sampled_positions].tolist()
        places = zip(packed.predict_row_N[mine_N], packed.predict_position_N[mine_N], strict=True)
        for position, (row, at) in zip(part.sampled_positions.tolist(), places, strict=True):
            assert packed.token_ids_BL[row][seen_BLL[row, at]].tolist() == part.token_ids[:position].tolist()
            assert packed.position_ids_BL[row][seen_BLL[row, at]].tolist() == list(range(position))
    assert max(packed.token_ids_BL.shape[1], *packed.predict_row_N.bincount()) <= row_tokens
    if len(packed.token_ids_BL) == 1:
        assert int((packed.segment_ids_BL > 0).sum()) == Tries.of(segments, share_from).distinct


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"advantages": {"a": [1.0, math.nan], "b": [1.0]}}, "^rollout a, turn 2, token 3: .* nan"),
        ({"weights": [[1.0], [1.0], [1.0]]}, "rollout a: 1 values for 2 sampled tokens"),
        ({"row_tokens": 3}, "rollout a: a segment of 4 tokens, but row_tokens is 3"),
    ],
)
def test_what_makes_no_batch_is_refused(changes, told):
    with pytest.raises(BatchError, match=told):
        make_batch(SEGMENTS, **{"advantages": ADVANTAGES, "row_tokens": 6} | changes)


def test_nothing_to_pack_and_cuts_of_no_rows_are_refused():
    with pytest.raises(BatchError, match="no segment to pack"):
        pack_segments([], row_tokens=8)
    with pytest.raises(BatchError, match="max_rows must be at least 1"):
        list(cut_batch(make_batch(SEGMENTS, advantages=ADVANTAGES, row_tokens=6), 0))


def test_each_sequence_goes_longest_first_to_the_fullest_row_with_room():
    # 6 and 5 open rows of 8; 3 fits only with 5; 2 with 6; 1 opens a row
    assert pack([3, 6, 1, 5, 2], row_tokens=8) == [[1, 4], [3, 0], [2]]
    assert pack([2, 2, 2, 2], row_tokens=4) == [[0, 1], [2, 3]], "equal lengths keep their order"


@given(st.lists(st.integers(1, 20), max_size=60))
def test_every_sequence_is_placed_once_no_row_overflows_and_no_two_rows_would_fit_in_one(lengths):
    rows = pack(lengths, row_tokens=20)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in row) for row in rows]
    assert all(load <= 20 for load in loads)
    assert all(a + b > 20 for a, b in combinations(loads, 2))


@pytest.mark.parametrize("lengths", [[3, 9], [0]])
def test_a_sequence_that_no_row_can_take_is_refused(lengths):
    with pytest.raises(BatchError, match="a row takes 1 to 8"):
        pack(lengths, row_tokens=8)
