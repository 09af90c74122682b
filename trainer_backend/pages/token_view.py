"""The tokens of a segment with their colours. A `Run` has adjacent tokens of one decision or the context.

A token has up to three classes, of which the page's style shows one: `a` for its advantage, `p` for its
probability, `m` for its mask. They are steps of a scale, since a page without inline styles has few colours.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from trainer_backend.core.emission_views import assistant_turn_boundaries
from trainer_backend.core.segments import Segment
from trainer_backend.pages.figures import number, signed

STEPS = 4  # of the scale of advantages, on each side of 0
_PROBABILITIES = (0.99, 0.9, 0.5, 0.1, 0.01)
# Longer runs of tokens show only their two ends, since a context may have a hundred thousand tokens.
_FOLD, _ENDS = 400, 60
# The same two numbers for the sampled tokens of the decision on the page.
_MOST, _MOST_ENDS = 8000, 4000

Decode = Callable[[int], str]
# The turn that sampled the tokens (None: context), the index of the first one, and the index after the last.
Run = tuple[int | None, int, int]


def segment_view(
    segment: Segment, index: int, *, turn: int, decode: Decode, advantages: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """Return the part of a segment that the page of a decision shows.

    `runs` are the decision, its neighbours, and the context around them. The `turn` of a run is None for the
    context. If a run is long, `folded` tokens between its `tokens` and its `rest` are left out. `before` and
    `after` count the tokens outside of these runs, and name a turn whose page shows them.

    `index` is the segment's place in the episode, from 0, `turn` a decision that it trains, and `advantages`
    has the token advantages of each decision (`token_advantages`).
    """
    runs = _cut(segment)
    turns = list(dict.fromkeys(sampled for sampled, _, _ in runs if sampled is not None))
    at = turns.index(turn)
    near = [place for place, run in enumerate(runs) if run[0] in turns[max(0, at - 1) : at + 2]]
    first, last = near[0], near[-1]
    first -= first > 0 and runs[first - 1][0] is None
    last += last + 1 < len(runs) and runs[last + 1][0] is None
    start, left = runs[first][1], len(segment) - runs[last][2]
    largest = max((abs(value) for row in advantages for value in row), default=0.0)
    shown = []
    for run in runs[first : last + 1]:
        token = _token_maker(segment, run, decode, advantages, largest)
        sampled, begin, end = run
        most, ends = (_MOST, _MOST_ENDS) if sampled == turn else (_FOLD, _ENDS)
        head, tail = (begin + ends, end - ends) if end - begin > most else (end, end)
        tokens, rest = ([token(place) for place in range(*part)] for part in ((begin, head), (tail, end)))
        shown.append({"turn": sampled, "tokens": tokens, "folded": tail - head, "rest": rest})
    return {
        "number": index + 1, "turns": turns, "length": len(segment), "sampled": len(segment.logprobs),
        "runs": shown,
        "before": {"tokens": start, "turn": turns[at - 2]} if start else None,
        "after": {"tokens": left, "turn": turns[at + 2]} if left else None,
    }  # fmt: skip


def _cut(segment: Segment) -> list[Run]:
    runs: list[Run] = []
    before = 0
    for t, start, end in assistant_turn_boundaries(segment):
        runs += [(None, before, start), (t + 1, start, end)]
        before = end
    return [run for run in (*runs, (None, before, len(segment))) if run[1] < run[2]]


def token_advantages(decisions: Sequence[Mapping[str, object]]) -> list[Sequence[float]]:
    """Return each decision's stored advantages: one value, a value per token, or [] without credit."""
    rows: list[Sequence[float]] = []
    for columns in decisions:
        by_token, whole = columns.get("token_advantages"), columns.get("advantage")
        if isinstance(by_token, Sequence):
            rows.append([float(value) for value in by_token])
        else:
            rows.append([float(whole)] if isinstance(whole, float) else [])
    return rows


def advantage_step(value: float, largest: float) -> int:
    """Return the colour step of an advantage, from -STEPS to STEPS; 0 only for an advantage of 0."""
    if value == 0 or largest <= 0:
        return 0
    return int(math.copysign(max(1, math.ceil(STEPS * min(1.0, abs(value) / largest))), value))


def probability_step(logprob: float) -> int:
    """Return the colour step of a probability: 0 is nearly certain, 5 is very improbable."""
    probability = math.exp(min(0.0, logprob))
    return sum(probability < bound for bound in _PROBABILITIES)


def _token_maker(
    segment: Segment, run: Run, decode: Decode, advantages: Sequence[Sequence[float]], largest: float
) -> Callable[[int], dict[str, str]]:
    """Return the function that makes a token of a run from its place: its text, classes and tooltip."""
    ids, (turn, start, end) = segment.token_ids, run
    if turn is None:
        return lambda at: {
            "text": decode(int(ids[at])), "kind": "m0", "title": f"id {ids[at]}, context: not trained"
        }  # fmt: skip
    values: Sequence[float | None] = advantages[turn - 1] if turn <= len(advantages) else ()
    if len(values) != end - start:  # one advantage for all tokens of the decision
        values = [values[0] if values else None] * (end - start)
    first = int(segment.sampled_positions.searchsorted(start))

    def token(at: int) -> dict[str, str]:
        n, advantage = first + at - start, values[at - start]
        logprob = float(segment.logprobs[n])
        kind, title = f"m1 p{probability_step(logprob)}", f"id {ids[at]}, log-prob {signed(logprob)}"
        title += f", probability {number(math.exp(min(0.0, logprob)), 'percent')}"
        if advantage is not None:
            step = advantage_step(advantage, largest)
            kind += f" a{'n' if step < 0 else 'p' if step else ''}{abs(step)}"
            title += f", advantage {signed(advantage)}"
        title += f", policy version {int(segment.versions[n])}"
        return {"text": decode(int(ids[at])), "kind": kind, "title": title}

    return token


def find_decoder(run_dir: Path) -> Decode:
    """Return a function that decodes one token id, or shows the id if no checkpoint has a tokenizer.

    A part of a character becomes the replacement character.
    """
    file = next(iter(sorted((run_dir / "checkpoints").glob("iteration_*/tokenizer.json"))), None)
    tokenizer = None if file is None else _tokenizer(file)

    def decode(token_id: int) -> str:
        text = tokenizer.decode([token_id], skip_special_tokens=False) if tokenizer is not None else ""
        return str(text) or f"[{token_id}]"

    return decode


@lru_cache(maxsize=4)
def _tokenizer(file: Path) -> Tokenizer | None:
    """Read a tokenizer without torch, whose import takes long; None if the file is invalid."""
    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # the library raises nothing more precise
        return None
