"""Pure: what a class returned -> what the episode takes of it, or the reason why it is nothing."""

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
        should_terminate: the episode ends with it; `response` is then not shown to the model.
        response: the next user message.
        score: reward of the answered decision; None where the interaction gives none.
        metadata: JSON-able, for the record.
    """

    should_terminate: bool
    response: str
    score: float | None
    metadata: dict[str, Any]


def read_reply(found: Any, *, name: str, at_most_bytes: int) -> InteractionReply:
    """Check what generate_response returned.

    Args:
        found: anything.
        name: of the interaction, for the errors.
        at_most_bytes: of text and metadata.

    Raises:
        InteractionFailed: it is no such tuple; says which part is what.
    """
    where = f"interaction {name!r}: generate_response"
    if not isinstance(found, tuple | list) or len(found) != 4:
        raise InteractionFailed(f"{where} returned {_told(found)}; {_EXPECTED} is needed")
    should_terminate, response, score, metadata = found
    read = InteractionReply(
        should_terminate=_flag(should_terminate, where=where),
        response=_text(response, where=where, at_the_end=bool(should_terminate)),
        score=None if score is None else read_score(score, where=where),
        metadata=_metadata(metadata, where=where),
    )
    size = len(read.response.encode()) + len(json.dumps(read.metadata))
    if size > at_most_bytes:
        raise InteractionFailed(f"{where} returned {size} bytes; at most {at_most_bytes} are allowed")
    return read


def read_score(found: Any, *, where: str) -> float:
    """A number as a float: classes return 0, True, or numbers of numpy and torch.

    Raises:
        InteractionFailed: it is none, or not finite: NaN would reach the gradient.
    """
    try:
        score = math.nan if isinstance(found, str | bytes) else float(found)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        score = math.nan
    if not math.isfinite(score):
        raise InteractionFailed(f"{where} returned {_told(found)} as the score; a finite number is needed")
    return score


def read_instance_id(found: Any, given: str, *, name: str) -> str:
    """The id that start_interaction returned, which may be its own; the one that it was given for None.

    Raises:
        InteractionFailed: it is no text.
    """
    if found is None:
        return given
    if not isinstance(found, str) or not found:
        raise InteractionFailed(
            f"interaction {name!r}: start_interaction returned {_told(found)}; an instance_id is needed"
        )
    return found


def _flag(found: Any, *, where: str) -> bool:
    """True or False, also numpy's. "False" would end an episode that is to go on."""
    value = found.item() if type(found).__module__ == "numpy" and hasattr(found, "item") else found
    if not isinstance(value, bool):
        raise InteractionFailed(f"{where} returned {_told(found)} as should_terminate; a bool is needed")
    return value


def _text(found: Any, *, where: str, at_the_end: bool) -> str:
    if found is None and at_the_end:
        return ""
    if not isinstance(found, str):
        raise InteractionFailed(f"{where} returned {_told(found)} as the response; text is needed")
    return encodable(found)


def _metadata(found: Any, *, where: str) -> dict[str, Any]:
    """Return JSON unchanged; other values (an array, an exception) become their text."""
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise InteractionFailed(f"{where} returned {_told(found)} as metadata; a dict is needed")
    try:
        told = json.dumps({str(key): value for key, value in found.items()}, default=_printed)
    except (TypeError, ValueError, RecursionError) as exc:
        raise InteractionFailed(f"{where} returned metadata that is no JSON: {exc}") from exc
    read: dict[str, Any] = encodable_json(json.loads(told, parse_constant=str))
    return read


def _printed(value: Any) -> str:
    return repr(value)[:1_000]


def _told(found: Any) -> str:
    """Its type, and a scalar itself."""
    if found is None or isinstance(found, bool | int | float | str):
        return f"{found!r:.80}"
    if isinstance(found, tuple | list):
        return f"a {type(found).__name__} of {len(found)}"
    return f"a {type(found).__name__}"
