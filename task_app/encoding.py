"""Pure: whatever a model, an environment or an interaction wrote -> the same without lone surrogates.

JSON lets half a character through as an escape (`"\\ud83d"`), and then no record, reply or prompt can be
written with it. A model's text is cleaned where it comes in, so that everybody sees the same one; a caller's
is refused at the edge (`shared_schemas.json_text`).
"""

from typing import Any


def encodable(text: str) -> str:
    """`text` with lone surrogates replaced: they pass through JSON as escapes, but no UTF-8 can hold them."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def clipped(name: str, at_most: int = 80) -> str:
    """A caller's name as a message shows it: it may be as long as a whole body."""
    return name if len(name) <= at_most else name[:at_most] + "..."


def encodable_json(value: Any) -> Any:
    """JSON-able data with every string in it passed through `encodable`, keys too."""
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, dict):
        return {encodable_json(name): encodable_json(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [encodable_json(one) for one in value]
    return value
