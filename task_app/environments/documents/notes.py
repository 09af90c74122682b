"""The notes of an episode: keys, summaries and contents, within bounds."""

from collections.abc import Mapping

from shared_schemas.base import Body, suggest_to_policy
from task_app.tools.toolbox import MAX_RESULT_CHARS

MAX_NOTES = 100
MAX_NOTE_CHARS = 20_000


class Note(Body):
    summary: str
    content: str


class Notes:
    """The reader's notes; every method answers in words for the model.

    Notes are not in the prompt, so that writing one changes no earlier message; `read` shows them.

    Args:
        max_read_chars: longest answer of `read`, which shows a whole note.
    """

    def __init__(
        self, notes: Mapping[str, Note] | None = None, *, max_read_chars: int = MAX_RESULT_CHARS
    ) -> None:
        self._notes = dict(notes or {})
        self._max_read_chars = max_read_chars

    @property
    def all(self) -> dict[str, Note]:
        return dict(self._notes)

    def write(self, key: str, summary: str, content: str) -> str:
        if key in self._notes:
            return f"error: there is a note {key!r} already; updateNote changes it"
        return self._store(key, Note(summary=summary, content=content))

    def read(self, key: str | None) -> str:
        if key is None:
            return self.index()
        note = self._notes.get(key)
        return self._unknown(key) if note is None else _format(key, note)

    def change(self, key: str, content: str, summary: str | None, *, append: bool) -> str:
        """Append to a note, or overwrite it."""
        note = self._notes.get(key)
        if note is None:
            return self._unknown(key)
        update = {
            "summary": note.summary if summary is None else summary,
            "content": f"{note.content}\n{content}" if append else content,
        }
        return self._store(key, note.model_copy(update=update))

    def delete(self, key: str) -> str:
        if self._notes.pop(key, None) is None:
            return self._unknown(key)
        return f"deleted. {self.index()}"

    def index(self) -> str:
        """The keys and summaries of all notes."""
        lines = [f"- {key}: {note.summary}" for key, note in self._notes.items()]
        return "\n".join(("notes:", *lines)) if lines else "there are no notes yet"

    def _store(self, key: str, note: Note) -> str:
        # The bound includes the heading, because text beyond a result's end could never be read.
        limit = min(MAX_NOTE_CHARS, self._max_read_chars - len(_format(key, note)) + len(note.content))
        if len(note.content) > limit:
            return f"error: the note would have {len(note.content)} characters; {max(0, limit)} are allowed"
        if key not in self._notes and len(self._notes) >= MAX_NOTES:
            return f"error: there are {MAX_NOTES} notes, which is the most; delete one with updateNote first"
        self._notes[key] = note
        return f"noted. {self.index()}"

    def _unknown(self, key: str) -> str:
        return f"error: there is no note {key!r}{suggest_to_policy(key, self._notes) if self._notes else ''}"


def _format(key: str, note: Note) -> str:
    return f"{key}: {note.summary}\n{note.content}"
