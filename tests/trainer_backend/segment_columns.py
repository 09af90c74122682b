"""Segments written token by token, for tests whose decisions are easier to see so."""

from collections.abc import Sequence
from typing import Any

from trainer_backend.core.aggregation import number_units, token_mean
from trainer_backend.core.collate import Batch, collate
from trainer_backend.core.columns import Row
from trainer_backend.core.losses import RatioLevel
from trainer_backend.core.segments import CONTEXT, Segment, Span


def make_segment(
    rollout_id: str,
    token_ids: Sequence[int],
    decision: Sequence[int],
    logprobs: Sequence[float] | None = None,
    versions: Sequence[int] = (),
    temperature: float = 1.0,
) -> Segment:
    """All columns run over the L tokens; `decision` is CONTEXT where none sampled; absent: -1, versions 0."""
    if logprobs is None:
        logprobs = [-1.0] * len(decision)
    spans: list[Span] = []
    for at, t in enumerate(decision):
        if t == CONTEXT:
            continue
        version = versions[at] if versions else 0
        if spans and spans[-1][1:4] == (at, t, version):
            spans[-1] = (spans[-1][0], at + 1, t, version, temperature)
        else:
            spans.append((at, at + 1, t, version, temperature))
    sampled = [value for value, t in zip(logprobs, decision, strict=True) if t != CONTEXT]
    return Segment.of(rollout_id, list(token_ids), sampled, spans)


def segment(rollout_id: str, decision: Sequence[int]) -> Segment:
    return make_segment(rollout_id, range(len(decision)), decision)


def lists(rows: Sequence[Row]) -> list[list[float]]:
    return [[*map(float, row)] for row in rows]


def make_batch(
    segments: Sequence[Segment], *, row_tokens: int, level: RatioLevel = "token", **columns: Any
) -> Batch:
    """Every token counts the same and was sampled by the policy that is trained; log-probs were -1."""
    weights = token_mean(segments)
    given = {
        "weights": weights,
        "proximal": [[-1.0] * len(row) for row in weights],
        "behaviour": [[1.0] * len(row) for row in weights],
        "units": number_units(segments, [level] * len(segments)),
        "policies": [0] * len(segments),
    }
    return collate(segments, row_tokens=row_tokens, **(given | columns))
