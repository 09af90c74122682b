"""Logs: one line an event on stderr, with ids; tracebacks without local variables, which could hold keys."""

import logging
import sys

import structlog


def configure_logs() -> None:
    """Send events of level info and above to stderr; unconfigured, structlog prints the locals of errors."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.dev.ConsoleRenderer(
                colors=False,
                pad_event_to=0,
                pad_level=False,
                exception_formatter=structlog.dev.plain_traceback,
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        # Looked up at each event: whoever replaced stderr in the meantime still sees what is logged.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )
