"""Pure: what a model wrote as message ids -> those that may be deleted, and why the others may not."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from task_app.errors import clipped
from task_app.history import History

MAX_IDS = 1_000
# Of so many refused ids the reason is told; a result is read by a model whose window is small.
TOLD = 20


@dataclass(frozen=True, slots=True)
class Ids:
    """Ids sorted out: `accepted` in the order they were given, a reason for every other one."""

    accepted: tuple[int, ...]
    refused: tuple[str, ...]

    @property
    def complaints(self) -> str:
        """`"; refused 0 (the system message stays), ..."`, or nothing."""
        if not self.refused:
            return ""
        more = f" and {len(self.refused) - TOLD} more" if len(self.refused) > TOLD else ""
        return f"; refused {', '.join(self.refused[:TOLD])}{more}"


def sorted_out(history: History, asked: Sequence[Any]) -> Ids:
    """Which of the ids may be deleted (DESIGN.md 4.12)."""
    gone = frozenset(history.deleted_msg_ids) - summaries(history)
    accepted: dict[int, None] = {}
    refused = []
    for given in asked:
        reason = refused_id(history, given, gone=gone)
        if reason is None and given in accepted:
            reason = f"{given} (named twice)"
        if reason is None:
            accepted[given] = None
        else:
            refused.append(reason)
    return Ids(tuple(accepted), tuple(refused))


def refused_id(history: History, given: Any, *, gone: frozenset[int] | None = None) -> str | None:
    """Why this message may not be edited, with its id; None when it may."""
    if gone is None:
        gone = frozenset(history.deleted_msg_ids) - summaries(history)
    # True == 1 and 3.0 == 3 in Python: neither is an id that the model was told.
    shown = f"a {type(given).__name__}" if isinstance(given, list | dict) else clipped(repr(given), 40)
    if type(given) is not int:
        return f"{shown} (an id is a whole number)"
    if not 0 <= given < len(history):
        return f"{shown} (there is no such message; ids run from 0 to {len(history) - 1})"
    if history[given].message.role == "system":
        return f"{given} (the system message stays)"
    if given == history.first_user_id:
        return f"{given} (the task stays)"
    own = history.last_assistant_id
    if own is not None and given >= own:
        return f"{given} (it belongs to this very turn)"
    return f"{given} (already deleted)" if given in gone else None


def summaries(history: History) -> frozenset[int]:
    """Messages that hold a summary: their own text is gone, but they may be deleted in turn."""
    return frozenset(i for i, change in history.changes().items() if change.kind == "summary")
