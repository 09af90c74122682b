"""Logs: one line per event on stderr; tracebacks omit local variables, which may hold keys.

Each line has the bound ids: `request_id` (service_kit.observed), and the ids that the service binds.
"""

import logging
import os
import sys
from collections.abc import Mapping

import structlog
from structlog.typing import Processor

from service_kit.settings import LogSettings, read_settings
from shared_schemas.plain_text import visible

_RENDERERS: dict[str, list[Processor]] = {
    "text": [
        structlog.dev.ConsoleRenderer(
            colors=False, pad_event_to=0, pad_level=False, exception_formatter=structlog.dev.plain_traceback
        ),
        # Escape control characters, so that a model's text cannot control the reader's terminal.
        lambda _logger, _method, line: visible(str(line)),
    ],
    "json": [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()],
}


def configure_logs(level: str = "info", *, form: str = "text") -> None:
    """Send events from this level on to stderr, as `text` for people or as `json`, one object per line.

    Without this call, structlog prints the local variables of tracebacks.
    """
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *_RENDERERS[form],
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        # sys.stderr is read at each event, so that logs follow a replaced stderr.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )


def configure_logs_from(environ: Mapping[str, str] = os.environ) -> None:
    """Configure logs by TURNWISE_LOG_LEVEL and TURNWISE_LOG_FORMAT."""
    settings = read_settings(LogSettings, environ)
    configure_logs(settings.log_level, form=settings.log_format)
