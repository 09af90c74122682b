"""The tokens of a segment as a page colours them, and the context that it folds away.

A token has up to three classes, and the page's style shows one of them: `a` its advantage, `p` its
probability, `m` its mask. They are steps of a scale: a page without inline styles cannot have more of them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from trainer_backend.core.segments import CONTEXT, Segment
from trainer_backend.pages.figures import number, signed

STEPS = 4  # of the scale of advantages, on each side of 0
_PROBABILITIES = (0.99, 0.9, 0.5, 0.1, 0.01)
# A run of context or of a neighbour that is longer than this is folded but for its ends: a window may hold a
# hundred thousand tokens.
_FOLD, _ENDS = 400, 60
# So is the decision that is looked at, where it is longer than this.
_MOST, _MOST_ENDS = 8000, 4000

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
        tokens: of a folded run those at its beginning.
        folded: how many are left out after `tokens`; those at its end are in `rest`.
    """

    turn: int | None
    tokens: tuple[Token, ...]
    folded: int = 0
    rest: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class Further:
    """What of a segment stands before or after the tokens that are shown.

    Attributes:
        tokens: how many.
        turn: of its nearest decision, where they can be seen.
    """

    tokens: int
    turn: int


@dataclass(frozen=True, slots=True)
class SegmentView:
    """A segment as it is trained, around one of its decisions.

    Attributes:
        number: from 1.
        turns: of the decisions that it trains.
        length, sampled: tokens of it, and those among them that are trained.
        runs: of the decision, of those beside it, and the context between and around them.
    """

    number: int
    turns: tuple[int, ...]
    length: int
    sampled: int
    runs: tuple[Run, ...]
    before: Further | None = None
    after: Further | None = None


class _Place(NamedTuple):
    """Where a run is: `end` is the token after its last; `turn` None for context."""

    turn: int | None
    start: int
    end: int


def segment_view(
    segment: Segment, index: int, *, turn: int, decode: Decode, advantages: Advantages, largest: float
) -> SegmentView:
    """What a page shows of a segment.

    Args:
        index: which segment of the episode it is, from 0.
        turn: of the decision that is looked at, from 1, which the segment must train.
        advantages: of the tokens of a decision t, in their order; None where credit gave none.
        largest: of all abs(advantage) of the episode: the end of the colours' scale.
    """
    places = _places(segment)
    turns = list(dict.fromkeys(place.turn for place in places if place.turn is not None))
    shown, before, after = _around(places, turns, turn)
    runs = []
    for place in shown:
        tell = _teller(segment, place, decode, advantages, largest)
        bounds = (_MOST, _MOST_ENDS) if place.turn == turn else (_FOLD, _ENDS)
        runs.append(_run(place, tell, *bounds))
    return SegmentView(
        index + 1, tuple(turns), len(segment), len(segment.sampled_positions), tuple(runs), before, after
    )


def _places(segment: Segment) -> list[_Place]:
    places, start = [], 0
    for decision, group in groupby(segment.decision):
        end = start + sum(1 for _ in group)
        places.append(_Place(None if decision == CONTEXT else decision + 1, start, end))
        start = end
    return places


def _around(
    places: Sequence[_Place], turns: Sequence[int], turn: int
) -> tuple[Sequence[_Place], Further | None, Further | None]:
    """Return the runs of tokens around a decision, and what is hidden before and after them."""
    at = turns.index(turn)
    near = turns[max(0, at - 1) : at + 2]
    found = [number for number, place in enumerate(places) if place.turn in near]
    first, last = found[0], found[-1]
    first -= first > 0 and places[first - 1].turn is None
    last += last + 1 < len(places) and places[last + 1].turn is None
    start, end = places[first].start, places[last].end
    before = Further(start, turns[at - 2]) if start else None
    after = Further(places[-1].end - end, turns[at + 2]) if end < places[-1].end else None
    return places[first : last + 1], before, after


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
    """Return the colour step of a probability: 0 is nearly certain, 5 is very improbable."""
    probability = math.exp(min(0.0, logprob))
    return sum(probability < bound for bound in _PROBABILITIES)


def _run(place: _Place, tell: Callable[[int], Token], fold: int, ends: int) -> Run:
    """The tokens of a run; of one of more than `fold` so many at each of its ends."""
    _, start, end = place
    if end - start <= fold:
        return Run(place.turn, tuple(map(tell, range(start, end))))
    head, tail = start + ends, end - ends
    return Run(
        place.turn, tuple(map(tell, range(start, head))), tail - head, tuple(map(tell, range(tail, end)))
    )


def _teller(
    segment: Segment, place: _Place, decode: Decode, advantages: Advantages, largest: float
) -> Callable[[int], Token]:
    """What makes a token of its place in the segment, one of this run."""
    if place.turn is None:
        return lambda at: _context(segment.token_ids[at], decode)
    given = _spread(advantages(place.turn - 1), place.end - place.start)
    return lambda at: _sampled(segment, at, decode, given[at - place.start], largest)


def _spread(values: Sequence[float | None], count: int) -> Sequence[float | None]:
    """One for each token: a decision's alone stands for all of its tokens."""
    if len(values) == count:
        return values
    return [values[0] if values else None] * count


def _context(one: int, decode: Decode) -> Token:
    return Token(decode(one), "m0", f"id {one}, context: not trained")


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


# This reads tokenizers without torch: a page must not wait for that import.

_FILE = "tokenizer.json"


def token_texts(folders: list[Path]) -> Callable[[int], str] | None:
    """Decodes one id, by the first folder that holds a tokenizer; None where none does.

    A byte of a character that needs several is shown as the replacement character: alone it is no text.
    """
    path = next((folder / _FILE for folder in folders if (folder / _FILE).exists()), None)
    if path is None:
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception:  # the library raises nothing more precise for a file that is none
        return None

    def decode(token_id: int) -> str:
        return str(tokenizer.decode([token_id], skip_special_tokens=False)) or f"[{token_id}]"

    return decode
