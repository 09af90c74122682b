"""Pure: numbers and moments as a person reads them. Filters of the templates."""

import math
from datetime import datetime
from decimal import ROUND_HALF_UP, Decimal
from urllib.parse import quote

from trainer_backend.core.statistics import Interval
from trainer_backend.pages.panels import Form


def rollout_address(job_id: str, rollout_id: str, turn: int | None = None) -> str:
    """The page of a rollout, whose id has slashes; at one of its decisions."""
    return f"/runs/{job_id}/rollouts/{quote(rollout_id, safe='/')}" + (f"?turn={turn}" if turn else "")


def short_id(rollout_id: str) -> str:
    """Without the run's name, which stands above it: `train/3/0/1`."""
    return rollout_id.partition("/")[2] or rollout_id


NONE = "–"  # noqa: RUF001 (a dash, as a table has it)
MINUS = "\N{MINUS SIGN}"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def number(value: float | None, form: Form = "number") -> str:
    """A value of a panel: three significant digits, and all that stand before the point.

    0.0312 -> "0.0312", 8.484 -> "8.48", 2932 -> "2,932"; percent 0.1524 -> "15.2 %"; 12.2995 s -> "12.3 s".
    """
    if value is None:
        return NONE
    if not math.isfinite(value):
        return str(value)
    if form == "percent":
        return f"{_digits(100 * value)} %"
    return f"{_digits(value)} s" if form == "seconds" else _digits(value)


def signed(value: float | None) -> str:
    """With its sign, and a true minus: for rewards and advantages, which are compared with 0."""
    if value is None:
        return NONE
    told = _digits(abs(value))
    if float(told.replace(",", "")) == 0.0:
        return "0"
    return ("+" if value > 0 else MINUS) + told


def interval(found: Interval, sign: str = "") -> str:
    """A mean with its 95 % interval, where it has one; `sign` "+" gives each number its own."""
    if found.low is None or found.high is None:
        return f"{found.mean:{sign}.2f}"
    return f"{found.mean:{sign}.2f} (95 %: {found.low:{sign}.2f} to {found.high:{sign}.2f})"


def duration(seconds: float | None) -> str:
    """The two largest units: 45 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
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
    """A duration that nobody knows better, in the largest unit that it has two of: 90 s, 24 min, 3 h."""
    for size_s, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size_s:
            return f"{round(seconds / size_s)} {unit}"
    return f"{round(seconds)} s"


def ago(moment: datetime | None, now: datetime) -> str:
    """How long ago; of a moment that a clock says is yet to come: just now."""
    if moment is None:
        return NONE
    passed = (now - moment).total_seconds()
    if passed < 5:
        return "just now"
    count, unit = duration(passed).split(" ")[:2]
    return f"{count} {unit} ago"


def size(count: int) -> str:
    """Bytes: 512 B, 1.2 MiB."""
    value = float(count)
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def spaced(name: str) -> str:
    """Of a name with underscores."""
    return name.replace("_", " ")


def _digits(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{math.floor(value + 0.5):,}"
    if abs(value) >= 1e-4:
        places = max(0, 2 - math.floor(math.log10(abs(value))))
        # A half upwards, as the charts' scripts do: 7.625 is 7.63 here and in a legend.
        told = str(Decimal(value).quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP))
        return told.rstrip("0").rstrip(".") if "." in told else told
    return f"{value:.1e}"
