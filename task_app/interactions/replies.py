"""Pure: check what an interaction class returned, and convert it for the episode."""

import json
import math
from dataclasses import dataclass
from typing import Any

from shared_schemas.json_text import encodable, encodable_json
from task_app.errors import InteractionFailed

_EXPECTED = "(should_terminate, response, score, metadata)"


@dataclass(frozen=True, slots=True)
class InteractionReply:
    """An answer of the user.

    Attributes:
        should_terminate: the episode ends; `response` is not shown to the model.
        score: reward of the answered decision; None if the interaction gives none.
        metadata: JSON-able, stored in the record.
    """

    should_terminate: bool
    response: str
    score: float | None
    metadata: dict[str, Any]


def read_reply(value: Any, *, name: str, at_most_bytes: int) -> InteractionReply:
    """Check what generate_response returned; `at_most_bytes` bounds text and metadata together."""
    where = f"interaction {name!r}: generate_response"
    if not isinstance(value, tuple | list) or len(value) != 4:
        raise InteractionFailed(f"{where} returned {_describe(value)}; {_EXPECTED} is needed")
    should_terminate, response, score, metadata = value
    reply = InteractionReply(
        should_terminate=_flag(should_terminate, where=where),
        response=_text(response, where=where, at_the_end=bool(should_terminate)),
        score=None if score is None else read_score(score, where=where),
        metadata=_metadata(metadata, where=where),
    )
    size = len(reply.response.encode()) + len(json.dumps(reply.metadata))
    if size > at_most_bytes:
        raise InteractionFailed(f"{where} returned {size} bytes; at most {at_most_bytes} are allowed")
    return reply


def read_score(value: Any, *, where: str) -> float:
    """A returned score as a float: classes return 0, True, or numbers of numpy and torch.

    NaN is refused, because it would reach the gradient.
    """
    try:
        score = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        score = math.nan
    if not math.isfinite(score):
        raise InteractionFailed(
            f"{where} returned {_describe(value)} as the score; a finite number is needed"
        )
    return score


def read_instance_id(value: Any, default: str, *, name: str) -> str:
    """The id that start_interaction returned; `default` if it returned None."""
    if value is None:
        return default
    if not isinstance(value, str) or not value:
        raise InteractionFailed(
            f"interaction {name!r}: start_interaction returned {_describe(value)}; an instance_id is needed"
        )
    return value


def _flag(value: Any, *, where: str) -> bool:
    """A returned flag, which may be numpy's; the text "False" is refused, because it would count as true."""
    scalar = value.item() if type(value).__module__ == "numpy" and hasattr(value, "item") else value
    if not isinstance(scalar, bool):
        raise InteractionFailed(f"{where} returned {_describe(value)} as should_terminate; a bool is needed")
    return scalar


def _text(value: Any, *, where: str, at_the_end: bool) -> str:
    if value is None and at_the_end:
        return ""
    if not isinstance(value, str):
        raise InteractionFailed(f"{where} returned {_describe(value)} as the response; text is needed")
    return encodable(value)


def _metadata(value: Any, *, where: str) -> dict[str, Any]:
    """Return JSON unchanged. Arrays become lists, and values that JSON cannot hold (an exception) text."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InteractionFailed(f"{where} returned {_describe(value)} as metadata; a dict is needed")
    try:
        text = json.dumps({str(key): part for key, part in value.items()}, default=_plain)
    except (TypeError, ValueError, RecursionError) as exc:
        raise InteractionFailed(f"{where} returned metadata that is no JSON: {exc}") from exc
    reply: dict[str, Any] = encodable_json(json.loads(text, parse_constant=str))
    return reply


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else repr(value)[:1_000]


def _describe(value: Any) -> str:
    """Describe a value in an error: a scalar itself, or its type."""
    if value is None or isinstance(value, bool | int | float | str):
        return f"{value!r:.80}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
