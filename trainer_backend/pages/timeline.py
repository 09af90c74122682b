"""Pure: draws a timeline of a run's newest iterations, with one lane for collecting and one for learning."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from trainer_backend.pages.figures import MINUS, duration, name_iterations, number

Row = Mapping[str, Any]
# The work that a bar shows; evaluations are in the lane of collecting.
Work = Literal["collect", "evaluate", "learn"]

SHOWN = 12  # iterations
_MOST_TICKS = 4  # in addition to the end; the labels of more ticks would touch on a phone
_STEPS_S = tuple(
    count * unit_s
    for unit_s, counts in (
        (1, (1, 2, 5, 10, 20, 30)), (60, (1, 2, 5, 10, 20, 30)), (3600, (1, 2, 3, 6, 12)),
        (86_400, (1, 2, 5, 10, 20, 50, 100)),
    )
    for count in counts
)  # fmt: skip
_LEAST_WIDTH = 0.2  # in percent, so that even very short work is visible
# The width, in percent of the axis, from which a bar shows its number: on a phone, and on a larger screen.
_ROOM_NARROW, _ROOM_WIDE = (1.2, 2.2), (0.5, 0.8)  # each: the width of both margins, and of a digit


@dataclass(frozen=True, slots=True)
class _Span:
    work: Work
    iteration: int
    start: float
    end: float


def draw_timeline(iterations: Sequence[Row], evaluations: Iterable[Row]) -> dict[str, Any]:
    """Return the timeline of the last `SHOWN` iterations since the newest start of the run.

    Iterations of earlier starts are left out, because days may lie between two starts. Both lists of rows
    begin with the oldest row. Evaluations that ended after the first shown iteration began are included.
    Return an empty dict if no row has times.

    The `start`, `width` and `middle` of a bar, and the `at` of a tick, are percents of the axis. A bar's
    `label` is empty if it does not fit into the bar; `roomy` is true if it fits even on a phone. `table`
    contains the times and durations of collecting and learning, the newest iteration first.
    """
    timed = [row for row in iterations if _span(row, "learn") and _span(row, "collect")]
    if not timed:
        return {}
    last_start = timed[-1].get("recovery/resumes")
    rows = [row for row in timed if row.get("recovery/resumes") == last_start][-SHOWN:]
    collected, learned = _spans(rows, "collect"), _spans(rows, "learn")
    begin = min(span.start for span in (*collected, *learned))
    held_out = [span for span in _spans(evaluations, "evaluate") if span.end > begin]
    spans = [*collected, *held_out, *learned]
    end = max(span.end for span in spans)
    words = _who_waited(rows)
    return {
        "bars": [_bar(span, begin, end) for span in spans],
        "ticks": _ticks(end - begin),
        "words": words,
        "summary": f"{name_iterations(rows).capitalize()} in two lanes over {duration(end - begin)}, "
        f"collecting above learning. {words}",
        "end": f"{_clock(end)} UTC",
        "evaluates": bool(held_out),
        "table": [
            (str(one.iteration), _when(one), _when(other))
            for one, other in reversed(list(zip(collected, learned, strict=True)))
        ],
    }


def _spans(rows: Iterable[Row], work: Work) -> list[_Span]:
    return [span for row in rows if (span := _span(row, work)) is not None]


def _span(row: Row, work: Work) -> _Span | None:
    """Return when the work in a row began and ended, or None if the row has no valid times."""
    lane = "collect" if work == "evaluate" else work
    start, end = row.get(f"timeline/{lane}_start"), row.get(f"timeline/{lane}_end")
    if not isinstance(start, float) or not isinstance(end, float) or not 0 < start <= end < math.inf:
        return None
    return _Span(work, row["iteration"], start, end)


def _bar(span: _Span, begin: float, end: float) -> dict[str, Any]:
    whole = max(end - begin, 1e-6)
    start = max(span.start, begin)
    width = 100 * (span.end - start) / whole
    label = "E" if span.work == "evaluate" else str(span.iteration)
    has_room, roomy = (width >= sides + len(label) * digit for sides, digit in (_ROOM_WIDE, _ROOM_NARROW))
    what = {"collect": "collected", "learn": "learned from", "evaluate": "evaluated"}[span.work]
    return {
        "work": span.work,
        "start": round(100 * (start - begin) / whole, 2),
        "width": max(round(width, 2), _LEAST_WIDTH),
        "middle": round(100 * ((start + span.end) / 2 - begin) / whole, 2),
        "label": label if has_room else "",
        "roomy": roomy,
        "words": f"iteration {span.iteration}, {what}: {_when(span)}",
    }


def _ticks(whole_s: float) -> list[dict[str, Any]]:
    """Return a tick at the end of the axis, preceded by ticks at even distances from the end."""
    step = next((step for step in _STEPS_S if whole_s / step <= _MOST_TICKS), whole_s / _MOST_TICKS)
    count = int(whole_s / step)
    marks = [
        {"at": round(100 * (1 - place * step / whole_s), 2), "label": f"{MINUS}{duration(place * step)}"}
        for place in range(count, 0, -1)
    ]
    return [*marks, {"at": 100.0, "label": "0"}]


def _who_waited(rows: Sequence[Row]) -> str:
    """Describe the shares of time in which both lanes worked, or only collecting, or only learning."""
    for_rollouts = sum(row.get("time/wait_collect_s", 0.0) for row in rows)
    for_learner = sum(row.get("time/wait_learner_s", 0.0) for row in rows)
    both = sum(map(_both_s, rows))
    worked = both + for_rollouts + for_learner
    if not worked:
        return ""
    shares = [number(round(part / worked, 2), "percent") for part in (both, for_rollouts, for_learner)]
    if both / worked < 0.005:
        return f"They took turns: {shares[1]} of the time was collecting, {shares[2]} learning."
    return (
        f"Both worked {shares[0]} of the time; {shares[1]} of it the learner waited for rollouts, and "
        f"{shares[2]} nothing was collected while it worked."
    )


def _both_s(row: Row) -> float:
    """Return the seconds of an iteration in which both lanes worked.

    They are computed from their share, `perf/overlap`, and the seconds in which one lane waited.
    """
    share = row.get("perf/overlap", 0.0)
    if share >= 1.0:  # neither lane waited
        return float(row["timeline/learn_end"] - row["timeline/learn_start"])
    alone = row.get("time/wait_collect_s", 0.0) + row.get("time/wait_learner_s", 0.0)
    return float(alone * share / (1.0 - share))


def _when(span: _Span) -> str:
    return f"{_clock(span.start)}, {number(span.end - span.start, 'seconds')}"


def _clock(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%H:%M:%S")
