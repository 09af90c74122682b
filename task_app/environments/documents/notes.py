"""The notes of an episode: keys, summaries and contents, within bounds."""

from collections.abc import Mapping

from shared_schemas.base import Body, did_you_mean
from task_app.tools.toolbox import MAX_RESULT_CHARS

MAX_NOTES = 100
MAX_NOTE_CHARS = 20_000


class Note(Body):
    summary: str
    content: str


class Notes:
    """Every method answers in words for the model. Notes live here and not in the prompt, so that writing one
    changes no earlier message: what a model wrote comes back by `read`.

    Args:
        notes: those that are there.
        max_read_chars: of what `read` tells of one, which is all of it.
    """

    def __init__(
        self, notes: Mapping[str, Note] | None = None, *, max_read_chars: int = MAX_RESULT_CHARS
    ) -> None:
        self._notes = dict(notes or {})
        self._max_read_chars = max_read_chars

    @property
    def all(self) -> dict[str, Note]:
        return dict(self._notes)

    def with_all(self, notes: Mapping[str, Note]) -> "Notes":
        """These notes, within the same bounds."""
        return Notes(notes, max_read_chars=self._max_read_chars)

    def write(self, key: str, summary: str, content: str) -> str:
        if key in self._notes:
            return f"error: there is a note {key!r} already; updateNote changes it"
        return self._stored(key, Note(summary=summary, content=content))

    def read(self, key: str | None) -> str:
        if key is None:
            return self.index()
        note = self._notes.get(key)
        return self._unknown(key) if note is None else _told(key, note)

    def append(self, key: str, content: str, summary: str | None) -> str:
        note = self._notes.get(key)
        if note is None:
            return self._unknown(key)
        kept = note.summary if summary is None else summary
        return self._stored(key, Note(summary=kept, content=f"{note.content}\n{content}"))

    def overwrite(self, key: str, content: str, summary: str | None) -> str:
        note = self._notes.get(key)
        if note is None:
            return self._unknown(key)
        return self._stored(key, Note(summary=note.summary if summary is None else summary, content=content))

    def delete(self, key: str) -> str:
        if self._notes.pop(key, None) is None:
            return self._unknown(key)
        return f"deleted. {self.index()}"

    def index(self) -> str:
        """Keys and summaries."""
        lines = [f"- {key}: {note.summary}" for key, note in self._notes.items()]
        return "\n".join(("notes:", *lines)) if lines else "there are no notes yet"

    def _stored(self, key: str, note: Note) -> str:
        # Beside its heading: what stands behind the end of a result could never be read again.
        allowed = min(MAX_NOTE_CHARS, self._max_read_chars - len(_told(key, note)) + len(note.content))
        if len(note.content) > allowed:
            return f"error: the note would have {len(note.content)} characters; {max(0, allowed)} are allowed"
        if key not in self._notes and len(self._notes) >= MAX_NOTES:
            return f"error: there are {MAX_NOTES} notes, which is the most; delete one with updateNote first"
        self._notes[key] = note
        return f"noted. {self.index()}"

    def _unknown(self, key: str) -> str:
        return f"error: there is no note {key!r}{did_you_mean(key, self._notes) if self._notes else ''}"


def _told(key: str, note: Note) -> str:
    return f"{key}: {note.summary}\n{note.content}"
