"""Pure: formats numbers, times and names; templates use some functions as filters."""

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import ROUND_HALF_UP, Decimal
from typing import Any
from urllib.parse import quote

from trainer_backend.core.metric import Form
from trainer_backend.core.statistics import Interval


def rollout_address(job_id: str, rollout_id: str, turn: int | None = None) -> str:
    """Return the address of a rollout's page; with `turn`, the page opens at that decision."""
    return f"/runs/{job_id}/rollouts/{quote(rollout_id, safe='/')}" + (f"?turn={turn}" if turn else "")


def short_id(rollout_id: str) -> str:
    """Return a rollout's id without the name of the run at its start, for example `train/3/0/1`."""
    return rollout_id.partition("/")[2] or rollout_id


NONE = "–"  # noqa: RUF001 (an en dash for an absent value)
MINUS = "\N{MINUS SIGN}"
TIMES = "\N{MULTIPLICATION SIGN}"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def number(value: float | None, form: Form = "number") -> str:
    """Format a value with three significant digits, but always with all digits before the decimal point.

    0.0312 -> "0.0312", 8.484 -> "8.48", 2932 -> "2,932"; percent 0.1524 -> "15.2 %"; 12.2995 s -> "12.3 s".
    """
    if value is None:
        return NONE
    if not math.isfinite(value):
        return str(value)
    if form == "percent":
        return f"{_digits(100 * value)} %"
    return f"{_digits(value)} s" if form == "seconds" else _digits(value)


def signed(value: float | None, form: Form = "number") -> str:
    """Format a value that readers compare with 0. A positive value gets a plus sign."""
    if value is None or not value:
        return NONE if value is None else number(0, form)
    return ("+" if value > 0 else MINUS) + number(abs(value), form)


def interval(mean: Interval, sign: str = "") -> str:
    """Format a mean, with its 95 % interval if it has one. If `sign` is "+", every number gets a sign."""
    return mean.word(f"{{:{sign}.2f}}", "95 %: ")


def duration(seconds: float | None) -> str:
    """Format a duration in its two largest units: 45 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    if seconds is None:
        return NONE
    left = max(0, round(seconds))
    days, left = divmod(left, 86_400)
    hours, left = divmod(left, 3_600)
    minutes, left = divmod(left, 60)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (left, "s")]
    first = next((index for index, (count, _) in enumerate(parts) if count), 3)
    shown = [f"{count} {unit}" for count, unit in parts[first : first + 2] if count]
    return " ".join(shown) or "0 s"


def roughly(seconds: float) -> str:
    """Format an estimated duration in the largest unit of which it has at least two: 90 s, 24 min, 3 h."""
    for size_s, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size_s:
            return f"{round(seconds / size_s)} {unit}"
    return f"{round(seconds)} s"


def ago(moment: datetime | None, now: datetime) -> str:
    """Format the time since a moment: "3 h ago", or "just now" up to 5 s and for moments in the future."""
    if moment is None:
        return NONE
    passed = (now - moment).total_seconds()
    if passed < 5:
        return "just now"
    count, unit = duration(passed).split(" ")[:2]
    return f"{count} {unit} ago"


def size(count: int) -> str:
    """Format a number of bytes: 512 B, 1.2 MiB."""
    value = float(count)
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def clip(text: str, most: int) -> str:
    """Return a text, cut to `most` characters if it is longer; the last of them is then an ellipsis."""
    return text if len(text) <= most else text[: most - 1] + "…"


def name_iterations(rows: Sequence[Mapping[str, Any]]) -> str:
    """Name the iterations of sorted rows of metrics: `iteration 3` or `iterations 1 to 3`."""
    first, last = rows[0]["iteration"], rows[-1]["iteration"]
    return f"iteration {first}" if first == last else f"iterations {first} to {last}"


def spaced(name: str) -> str:
    return name.replace("_", " ")


def _digits(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{math.floor(value + 0.5):,}"
    if abs(value) >= 1e-4:
        places = max(0, 2 - math.floor(math.log10(abs(value))))
        # Halves are rounded up as in static/charts.js: 7.625 is 7.63 here and in a legend.
        digits = str(Decimal(value).quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP))
        return digits.rstrip("0").rstrip(".") if "." in digits else digits
    return f"{value:.1e}"
