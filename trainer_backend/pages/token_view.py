"""Prepares the tokens of a segment and their colours for the page of a decision.

A `Run` is a range of adjacent tokens: the tokens that one decision sampled, or the context before or after
it. A token has up to three CSS classes: `a` for its advantage, `p` for its probability, and `m` for its mask.
The reader chooses which of them colours the tokens. The number in a class is a step of a colour scale. The
style sheet defines the colour of each step, because the page allows no inline styles.
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

STEPS = 4  # colours for advantages on each side of 0
_PROBABILITIES = (0.99, 0.9, 0.5, 0.1, 0.01)
# Runs of more than _FOLD tokens show only _ENDS tokens at each end: a context may have 100,000 tokens.
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

    `runs` contains the decision, the decisions before and after it, and the context around them. The `turn`
    of a run is None for context. A long run has only its first tokens (`tokens`) and its last tokens
    (`rest`), and `folded` counts the tokens between them. `before` and `after` contain the number of
    tokens before and after `runs`, and the turn of the nearest decision there.

    `index` is the segment's position in the episode, from 0, and `turn` a decision that the segment trains.
    `advantages` contains the advantages of each decision (`token_advantages`).
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
    """Return each decision's stored advantages: one value, a value per token, or [] if none is stored."""
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
    """Return a function that maps a token's position in the segment to its text, classes and tooltip."""
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
    """Return a function that decodes a token id to text, or to `[id]` if no checkpoint has a tokenizer.

    A token that contains only a part of a character becomes the replacement character U+FFFD.
    """
    file = next(iter(sorted((run_dir / "checkpoints").glob("iteration_*/tokenizer.json"))), None)
    tokenizer = None if file is None else _tokenizer(file)

    def decode(token_id: int) -> str:
        text = tokenizer.decode([token_id], skip_special_tokens=False) if tokenizer is not None else ""
        return str(text) or f"[{token_id}]"

    return decode


@lru_cache(maxsize=4)
def _tokenizer(file: Path) -> Tokenizer | None:
    """Read a tokenizer; None if the file is invalid."""
    # The library `tokenizers` does not import torch, which would take long.
    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # the library raises nothing more precise
        return None
