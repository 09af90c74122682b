"""Pure: which messages matter least to the task. Proposes, and never deletes by itself.

importance = (age + use) / 2, both in [0, 1]: `age` is the message's place in the history, 0 the oldest;
`use` the share of its different words that the task or a later message of the assistant names as well.
"""

import re
from dataclasses import dataclass

from task_app.context_tools.ids import refused_id, summaries
from task_app.history import History

# Short words stand everywhere and say nothing about use.
_WORD = re.compile(r"\w{4,}")


@dataclass(frozen=True, slots=True)
class Proposal:
    """A message that could go, how many characters that frees, and how much it matters (0 to 1)."""

    msg_id: int
    chars: int
    importance: float


def proposed_deletes(history: History, *, chars: int) -> tuple[Proposal, ...]:
    """The least important messages that free so many characters together; all there are when none do."""
    chosen: list[Proposal] = []
    freed = 0
    for proposal in sorted(_deletable(history), key=lambda one: (one.importance, one.msg_id)):
        if freed >= chars:
            break
        chosen.append(proposal)
        freed += proposal.chars
    return tuple(chosen)


def _deletable(history: History) -> list[Proposal]:
    """Every message that may be deleted and is longer than the stub that would stay."""
    view = history.view()
    gone = frozenset(history.deleted_msg_ids) - summaries(history)
    task = history.first_user_id
    named = _words(view[task].content) if task is not None else set()
    found = []
    for msg_id in range(len(view) - 1, -1, -1):
        message = view[msg_id]
        freed = len(message.content or "") - len(history.stub(msg_id).content or "")
        if freed > 0 and refused_id(history, msg_id, gone=gone) is None:
            words = _words(history[msg_id].message.content)
            use = len(words & named) / len(words) if words else 0.0
            found.append(Proposal(msg_id, freed, (msg_id / len(view) + use) / 2))
        if message.role == "assistant":
            named |= _words(message.content)
    return found


def _words(text: str | None) -> set[str]:
    return set(_WORD.findall((text or "").casefold()))
