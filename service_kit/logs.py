"""Configures logging: events go to stderr, and tracebacks omit local variables, which may contain API keys.

Each event contains the ids that are bound in structlog's context: `request_id`, which service_kit.observed
binds, and further ids that the service binds.
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
        # Escape control characters, so that text from a model cannot control the terminal that shows the log.
        lambda _logger, _method, line: visible(str(line)),
    ],
    "json": [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()],
}


def configure_logs(level: str = "info", *, form: str = "text") -> None:
    """Write log events of this level and above to stderr.

    `form` is `text` for people, or `json` for one JSON object per line. Call this early, because structlog's
    default configuration prints the values of local variables in tracebacks.
    """
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *_RENDERERS[form],
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        # Read sys.stderr at each event, so that events go to the new stream if sys.stderr is replaced.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )


def configure_logs_from(environ: Mapping[str, str] = os.environ) -> None:
    """Configure logging by the environment variables TURNWISE_LOG_LEVEL and TURNWISE_LOG_FORMAT."""
    settings = read_settings(LogSettings, environ)
    configure_logs(settings.log_level, form=settings.log_format)
