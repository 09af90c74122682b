"""Logs: one line an event on stderr, with ids; tracebacks without local variables, which could hold keys.

What is bound while something runs stands in each of its lines: `request_id` (task_app.observing.observed),
`env_id` and `policy_id` (task_app.sessions), `run_id` and `rollout_id` (task_app.rollouts).
"""

import logging
import sys
from typing import Literal

import structlog
from structlog.typing import Processor

from shared_schemas.base import visible


def configure_logs(level: str, *, form: Literal["text", "json"] = "text") -> None:
    """Send events of `level` ("debug" to "critical") and above to stderr.

    Args:
        level: the lowest that is written.
        form: `text` for people; `json` for collectors, an object a line.
    """
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *_RENDERERS[form],
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )


_RENDERERS: dict[str, list[Processor]] = {
    "text": [
        structlog.dev.ConsoleRenderer(
            colors=False,
            pad_event_to=0,
            pad_level=False,
            exception_formatter=structlog.dev.plain_traceback,
        ),
        # What a caller or a model wrote commands no terminal on which the log is read.
        lambda _logger, _method, line: visible(str(line)),
    ],
    "json": [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()],
}
