"""Pure: the tokens of a segment as a page colours them, and the runs of context that it folds away.

A token has up to three classes, and the page's style shows one of them: `a` its advantage, `p` its
probability, `m` its mask. They are steps of a scale: a page without inline styles cannot have more of them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from trainer_backend.core.segments import CONTEXT, Segment
from trainer_backend.dashboard.figures import number, signed

STEPS = 4  # of the scale of advantages, on each side of 0
_PROBABILITIES = (0.99, 0.9, 0.5, 0.1, 0.01)
# Context longer than this is folded but for its ends: a window may hold a hundred thousand tokens.
_FOLD, _ENDS = 400, 60

# Of a decision t: the advantage of each token that it sampled.
Advantages = Callable[[int], Sequence[float | None]]
Decode = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class Token:
    """One token.

    Attributes:
        text: as the tokenizer writes it alone; where there is no tokenizer, its id.
        kind: classes of its colours.
        told: all that is known of it, for who points at it.
    """

    text: str
    kind: str
    told: str


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens side by side that one decision sampled, or that are context.

    Attributes:
        turn: of the decision, from 1; None for context.
        tokens: of folded context those at its beginning.
        folded: how many are left out after `tokens`; those at its end are in `rest`.
    """

    turn: int | None
    tokens: tuple[Token, ...]
    folded: int = 0
    rest: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class SegmentView:
    """A segment as it is trained.

    Attributes:
        number: from 1.
        turns: of the decisions that it trains.
        length, sampled: tokens of it, and those among them that are trained.
    """

    number: int
    turns: tuple[int, ...]
    length: int
    sampled: int
    runs: tuple[Run, ...]


def segment_view(
    segment: Segment, index: int, *, decode: Decode, advantages: Advantages, largest: float
) -> SegmentView:
    """What a page shows of a segment.

    Args:
        index: which segment of the episode it is, from 0.
        advantages: of the tokens of a decision t, in their order; None where credit gave none.
        largest: of all abs(advantage) of the episode: the end of the colours' scale.
    """
    runs, start = [], 0
    for _, group in groupby(segment.decision):
        end = start + sum(1 for _ in group)
        runs.append(_run(segment, start, end, decode, advantages, largest))
        start = end
    turns = tuple(dict.fromkeys(run.turn for run in runs if run.turn is not None))
    return SegmentView(index + 1, turns, len(segment), len(segment.sampled_positions), tuple(runs))


def token_advantages(decisions: Sequence[Mapping[str, object]]) -> list[Sequence[float]]:
    """[T] of stored columns: by token where they are, else the decision's; empty without credit."""
    rows: list[Sequence[float]] = []
    for columns in decisions:
        by_token, whole = columns.get("token_advantages"), columns.get("advantage")
        if isinstance(by_token, Sequence):
            rows.append([float(value) for value in by_token])
        else:
            rows.append([float(whole)] if isinstance(whole, float) else [])
    return rows


def advantage_step(value: float, largest: float) -> int:
    """-STEPS .. STEPS: 0 for 0 alone, the sign's side for everything else."""
    if value == 0 or largest <= 0:
        return 0
    return int(math.copysign(max(1, math.ceil(STEPS * min(1.0, abs(value) / largest))), value))


def probability_step(logprob: float) -> int:
    """0 for what was all but certain, up to 5 for what was sampled against all odds."""
    probability = math.exp(min(0.0, logprob))
    return sum(probability < bound for bound in _PROBABILITIES)


def _run(
    segment: Segment, start: int, end: int, decode: Decode, advantages: Advantages, largest: float
) -> Run:
    decision = segment.decision[start]
    if decision == CONTEXT:
        if end - start <= _FOLD:
            return Run(None, _context(segment, start, end, decode))
        head, tail = start + _ENDS, end - _ENDS
        return Run(
            None, _context(segment, start, head, decode), tail - head, _context(segment, tail, end, decode)
        )
    given = _spread(advantages(decision), end - start)
    tokens = [_sampled(segment, place, decode, given[place - start], largest) for place in range(start, end)]
    return Run(decision + 1, tuple(tokens))


def _spread(values: Sequence[float | None], count: int) -> Sequence[float | None]:
    """One for each token: a decision's alone stands for all of its tokens."""
    if len(values) == count:
        return values
    return [values[0] if values else None] * count


def _context(segment: Segment, start: int, end: int, decode: Decode) -> tuple[Token, ...]:
    ids = segment.token_ids[start:end]
    return tuple(Token(decode(one), "m0", f"id {one}, context: not trained") for one in ids)


def _sampled(segment: Segment, place: int, decode: Decode, advantage: float | None, largest: float) -> Token:
    one, logprob = segment.token_ids[place], segment.logprobs[place]
    kinds, told = ["m1", f"p{probability_step(logprob)}"], [f"id {one}", f"log-prob {signed(logprob)}"]
    told.append(f"probability {number(math.exp(min(0.0, logprob)), 'percent')}")
    if advantage is not None:
        step = advantage_step(advantage, largest)
        kinds.append(f"a{'n' if step < 0 else 'p' if step else ''}{abs(step)}")
        told.append(f"advantage {signed(advantage)}")
    told.append(f"policy version {segment.versions[place]}")
    return Token(decode(one), " ".join(kinds), ", ".join(told))
