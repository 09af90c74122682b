import math

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from trainer_backend.core.columns import decoded, encoded
from trainer_backend.core.segments import SPAN, Segment

SEGMENTS = TypeAdapter(list[Segment])


def test_segments_come_back_bit_for_bit_and_cost_their_arrays_and_a_line():
    logprobs = [-0.1, -math.inf, math.nan, -5e-324]
    parts = [
        Segment.of("a/1", [2**31 - 1, -1, 3, 4, 5, 6, 7], logprobs, [(1, 3, 0, 7, 0.1), (4, 6, 1, 8, 1.0)]),
        Segment.of("b", [1], [], []),
    ]
    body = encoded(SEGMENTS, parts)
    again = decoded(SEGMENTS, body)
    for name in ("token_ids", "logprobs", "spans"):
        for part, other in zip(parts, again, strict=True):
            column, found = getattr(part, name), getattr(other, name)
            assert (found.dtype, found.tobytes()) == (column.dtype, column.tobytes())
            assert found.flags.aligned and not found.flags.writeable
    assert [part.rollout_id for part in again] == ["a/1", "b"]
    # 7 and 1 ids, 4 log-probs and 2 spans, each array filled up to 8 bytes
    assert len(body) - (body.index(b"\n") + 1) == 32 + 8 + 4 * 8 + 2 * SPAN.itemsize
    assert encoded(SEGMENTS, again) == body


@pytest.mark.parametrize("place", ["[8, 1]", "[-4, 1]", "[0, -1]", "[0, 3]", "[0]", "7"])
def test_an_array_that_does_not_lie_in_the_bytes_is_refused(place):
    body = b'[{"rollout_id": "r", "token_ids": %s, "logprobs": [0, 0], "spans": [0, 0]}]\n' % place.encode()
    with pytest.raises(ValidationError, match="token_ids"):
        decoded(SEGMENTS, body + bytes(8))


def test_an_array_of_another_kind_is_not_sent():
    part = Segment("r", np.array([1, 2]), np.array([-1.0]), np.array([(1, 2, 0, 0, 1.0)], SPAN))
    with pytest.raises(Exception, match="int64; expected 1, int32"):
        encoded(SEGMENTS, [part])
