"""The tokens of a segment with their colours, and the parts of the segment that a page folds away.

A token has up to three classes, of which the page's style shows one: `a` its advantage, `p` its probability,
`m` its mask. They are steps of a scale, since a page without inline styles has only so many colours.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from trainer_backend.core.emission_views import assistant_turn_boundaries
from trainer_backend.core.segments import Segment
from trainer_backend.pages.figures import number, signed

STEPS = 4  # of the scale of advantages, on each side of 0
_PROBABILITIES = (0.99, 0.9, 0.5, 0.1, 0.01)
# A context may have a hundred thousand tokens: a longer run is folded, except for its two ends.
_FOLD, _ENDS = 400, 60
# The same for the run of the decision on the page.
_MOST, _MOST_ENDS = 8000, 4000

# The advantage of each token that a decision t sampled.
Advantages = Callable[[int], Sequence[float | None]]
Decode = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class Token:
    """One token."""

    text: str
    """The token as the tokenizer decodes it alone, or its id without a tokenizer."""
    kind: str
    """The classes of its colours."""
    title: str
    """Its id, log-prob, advantage and version, for a tooltip."""


@dataclass(frozen=True, slots=True)
class Run:
    """Adjacent tokens that one decision sampled, or that are context."""

    turn: int | None
    """Number of the decision; None for context."""
    tokens: tuple[Token, ...]
    """The tokens, or the beginning of a folded run."""
    folded: int = 0
    """The number of tokens left out between `tokens` and `rest`."""
    rest: tuple[Token, ...] = ()
    """The end of a folded run."""


@dataclass(frozen=True, slots=True)
class Further:
    """The part of a segment before or after the tokens on the page."""

    tokens: int
    """Its number of tokens."""
    turn: int
    """Its nearest decision, whose page shows them."""


@dataclass(frozen=True, slots=True)
class SegmentView:
    """A segment as it is trained, around one of its decisions."""

    number: int
    """From 1."""
    turns: tuple[int, ...]
    """The decisions that it trains."""
    length: int
    """The number of all its tokens; `sampled` of those that are trained."""
    sampled: int
    runs: tuple[Run, ...]
    """The decision, the ones next to it, and the context between and around them."""
    before: Further | None = None
    after: Further | None = None


class _Place(NamedTuple):
    """The place of a run: `end` is the token after its last; `turn` is None for context."""

    turn: int | None
    start: int
    end: int


def segment_view(
    segment: Segment, index: int, *, turn: int, decode: Decode, advantages: Advantages, largest: float
) -> SegmentView:
    """Return the part of a segment that the page of a decision shows.

    Args:
        index: the segment's place in the episode, from 0.
        turn: a decision that the segment trains.
        advantages: of the tokens of a decision t, in their order; None without credit.
        largest: the largest abs(advantage) of the episode, which is the end of the colours' scale.
    """
    places = _places(segment)
    turns = list(dict.fromkeys(place.turn for place in places if place.turn is not None))
    near, before, after = _around(places, turns, turn)
    runs = []
    for place in near:
        token = _token_maker(segment, place, decode, advantages, largest)
        most, ends = (_MOST, _MOST_ENDS) if place.turn == turn else (_FOLD, _ENDS)
        is_folded = place.end - place.start > most
        head, tail = (place.start + ends, place.end - ends) if is_folded else (place.end, place.end)
        shown, rest = (tuple(map(token, range(*part))) for part in ((place.start, head), (tail, place.end)))
        runs.append(Run(place.turn, shown, tail - head, rest))
    return SegmentView(
        index + 1, tuple(turns), len(segment), len(segment.logprobs), tuple(runs), before, after
    )


def _places(segment: Segment) -> list[_Place]:
    places, before = [], 0
    for t, start, end in assistant_turn_boundaries(segment):
        places += [_Place(None, before, start), _Place(t + 1, start, end)]
        before = end
    places.append(_Place(None, before, len(segment)))
    return [place for place in places if place.start < place.end]


def _around(
    places: Sequence[_Place], turns: Sequence[int], turn: int
) -> tuple[Sequence[_Place], Further | None, Further | None]:
    """Return the runs around a decision, and the parts of the segment before and after them."""
    at = turns.index(turn)
    near = turns[max(0, at - 1) : at + 2]
    numbers = [number for number, place in enumerate(places) if place.turn in near]
    first, last = numbers[0], numbers[-1]
    first -= first > 0 and places[first - 1].turn is None
    last += last + 1 < len(places) and places[last + 1].turn is None
    start, end = places[first].start, places[last].end
    before = Further(start, turns[at - 2]) if start else None
    after = Further(places[-1].end - end, turns[at + 2]) if end < places[-1].end else None
    return places[first : last + 1], before, after


def token_advantages(decisions: Sequence[Mapping[str, object]]) -> list[Sequence[float]]:
    """[T] advantages of stored columns: one per token, or one for the decision; empty without credit."""
    rows: list[Sequence[float]] = []
    for columns in decisions:
        by_token, whole = columns.get("token_advantages"), columns.get("advantage")
        if isinstance(by_token, Sequence):
            rows.append([float(value) for value in by_token])
        else:
            rows.append([float(whole)] if isinstance(whole, float) else [])
    return rows


def advantage_step(value: float, largest: float) -> int:
    """The colour step of an advantage, from -STEPS to STEPS; 0 only for an advantage of 0."""
    if value == 0 or largest <= 0:
        return 0
    return int(math.copysign(max(1, math.ceil(STEPS * min(1.0, abs(value) / largest))), value))


def probability_step(logprob: float) -> int:
    """The colour step of a probability: 0 is nearly certain, 5 is very improbable."""
    probability = math.exp(min(0.0, logprob))
    return sum(probability < bound for bound in _PROBABILITIES)


def _token_maker(
    segment: Segment, place: _Place, decode: Decode, advantages: Advantages, largest: float
) -> Callable[[int], Token]:
    """Return the function that makes a token of this run from its place in the segment."""
    ids = segment.token_ids
    if place.turn is None:
        return lambda at: Token(decode(int(ids[at])), "m0", f"id {ids[at]}, context: not trained")
    values, count = advantages(place.turn - 1), place.end - place.start
    if len(values) != count:  # the advantage of a whole decision is that of each of its tokens
        values = [values[0] if values else None] * count
    first = int(segment.sampled_positions.searchsorted(place.start))

    def token(at: int) -> Token:
        n, advantage = first + at - place.start, values[at - place.start]
        logprob = float(segment.logprobs[n])
        kinds, texts = (
            ["m1", f"p{probability_step(logprob)}"],
            [f"id {ids[at]}", f"log-prob {signed(logprob)}"],
        )
        texts.append(f"probability {number(math.exp(min(0.0, logprob)), 'percent')}")
        if advantage is not None:
            step = advantage_step(advantage, largest)
            kinds.append(f"a{'n' if step < 0 else 'p' if step else ''}{abs(step)}")
            texts.append(f"advantage {signed(advantage)}")
        texts.append(f"policy version {int(segment.versions[n])}")
        return Token(decode(int(ids[at])), " ".join(kinds), ", ".join(texts))

    return token


def token_texts(folders: list[Path]) -> Callable[[int], str] | None:
    """Return the decoder of the first folder with a tokenizer, or None.

    It decodes one id at a time, and a part of a character as the replacement character. It reads the file
    without torch, whose import would make a page wait.
    """
    path = next((file for folder in folders if (file := folder / "tokenizer.json").exists()), None)
    if path is None:
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception:  # the library raises nothing more precise for a file that is none
        return None

    def decode(token_id: int) -> str:
        return str(tokenizer.decode([token_id], skip_special_tokens=False)) or f"[{token_id}]"

    return decode
