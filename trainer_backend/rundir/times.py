"""The calendar, for what is written down to be shown. Nothing is decided by it."""

from datetime import UTC, datetime


def now() -> str:
    """UTC, ISO 8601, in milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
