"""The tools with which a model reads a document, as methods.

The model sees each method's docstring as the description of the tool.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from shared_schemas.base import Body, suggest_to_policy
from task_app.environments.documents.chunks import Chunks, SearchIndex, cut_into_chunks, snippet
from task_app.tools.toolbox import MAX_RESULT_CHARS

MAX_NOTES = 100
MAX_NOTE_CHARS = 20_000
MAX_HITS = 10
MAX_CHUNK_CHARS = 20_000
# Length of the longest title `chunk 19999 of 0 to 19999:` with its line break.
MAX_TITLE_CHARS = 27
NO_INDEX = "error: there is no index yet; call buildIndex first"

Key = Annotated[str, Field(min_length=1, max_length=100, description="name of the note")]
Summary = Annotated[str, Field(max_length=500, description="what the note is about, in a line")]
Content = Annotated[str, Field(max_length=MAX_NOTE_CHARS)]


class Note(Body):
    summary: str
    content: str


@dataclass
class Desk:
    """The document, notes and reading position of one episode. Giving the `answer` ends the episode."""

    document: str
    """The whole text of the document."""
    chunk_size: int
    """Length of the chunks that `buildIndex` makes if the model gives no length, in characters."""
    notes: dict[str, Note] = field(default_factory=dict)
    """Notes by key. The prompt does not contain them, so that a new note changes no earlier message."""
    chunks: Chunks | None = None
    next_chunk: int = 0
    """Index of the chunk that `readChunk` reads next if `enable_scan` is set."""
    answer: str | None = None
    max_chunk_chars: int = MAX_CHUNK_CHARS
    """Length of the longest chunk that fits into one tool result together with its title."""
    max_result_chars: int = MAX_RESULT_CHARS
    """Length of the longest tool result. A note must fit into one result, so this limits notes, too."""
    # The index is made at the first search. Snapshots leave it out, because it follows from the chunks.
    _search: SearchIndex | None = field(default=None, init=False, repr=False)

    def analyzeText(self) -> str:
        """Say how long the document is."""
        text = self.document
        # The usual estimate for English is four characters per token; the task app has no tokenizer.
        return (
            f"{len(text)} characters, {len(text.split())} words, {text.count(chr(10)) + 1} lines, "
            f"about {len(text) // 4} tokens"
        )

    def loadDocument(self) -> str:
        """Read the document from its beginning, as far as it fits in one result."""
        return self.document

    def buildIndex(
        self,
        chunk_size: Annotated[
            int | None, Field(ge=50, le=MAX_CHUNK_CHARS, description="characters of a chunk")
        ] = None,
        overlap: Annotated[
            int, Field(ge=0, le=MAX_CHUNK_CHARS // 2, description="characters that a chunk repeats")
        ] = 0,
    ) -> str:
        """Cut the document into chunks, so that it can be read chunk by chunk and searched."""
        size = chunk_size or self.chunk_size
        if size > self.max_chunk_chars:
            return f"error: chunk_size is {size}; at most {self.max_chunk_chars} fit into one result"
        try:
            chunks = cut_into_chunks(self.document, size=size, overlap=overlap)
        except ValueError as exc:
            return f"error: {exc}"
        self.chunks, self.next_chunk, self._search = chunks, 0, None
        return f"{len(chunks.spans)} chunks of up to {chunks.size} characters, chunk_id 0 to {self._last()}"

    def readChunk(
        self,
        chunk_id: Annotated[int | None, Field(ge=0, description="which one")] = None,
        enable_scan: Annotated[bool, Field(description="or read the next one, in order")] = False,
    ) -> str:
        """Read one chunk: that of chunk_id, or with enable_scan the one after the last that was read."""
        if self.chunks is None:
            return NO_INDEX
        if chunk_id is None and not enable_scan:
            return "error: give chunk_id, or enable_scan = true"
        number = self.next_chunk if chunk_id is None else chunk_id
        if number > self._last():
            if chunk_id is None:
                return "the document is read to its end"
            return f"error: there is no chunk {number}; chunk_id runs from 0 to {self._last()}"
        self.next_chunk = number + 1
        return f"chunk {number} of 0 to {self._last()}:\n{self._chunk(number)}"

    def searchEngine(
        self, keyword: Annotated[str, Field(min_length=1, max_length=500, description="words to look for")]
    ) -> str:
        """Find the chunks that hold these words; the best ones first."""
        if self.chunks is None:
            return NO_INDEX
        if self._search is None:
            self._search = SearchIndex([self.document[a:b] for a, b in self.chunks.spans])
        hits = self._search.hits(keyword, at_most=MAX_HITS)
        if not hits:
            return "no chunk holds any of these words"
        return "\n".join(f"chunk {hit}: ...{snippet(self._chunk(hit), keyword)}..." for hit in hits)

    def note(self, key: Key, summary: Summary, content: Content) -> str:
        """Write down what you need later; a note stays when messages are deleted."""
        if key in self.notes:
            return f"error: there is a note {key!r} already; updateNote changes it"
        return self._store(key, Note(summary=summary, content=content))

    def readNote(self, key: Key | None = None) -> str:
        """Read a note, or without a key the list of them."""
        if key is None:
            return self._list_notes()
        note = self.notes.get(key)
        return self._unknown(key) if note is None else _format(key, note)

    def updateNote(
        self,
        mode: Literal["append", "overwrite", "delete"],
        key: Key,
        new_content: Content | None = None,
        new_summary: Summary | None = None,
    ) -> str:
        """Change a note: append to it, overwrite it, or delete it."""
        if mode != "delete" and new_content is None:
            return f"error: give new_content to {mode}"
        note = self.notes.get(key)
        if note is None:
            return self._unknown(key)
        if mode == "delete" or new_content is None:
            del self.notes[key]
            return f"deleted. {self._list_notes()}"
        content = f"{note.content}\n{new_content}" if mode == "append" else new_content
        return self._store(
            key, Note(summary=note.summary if new_summary is None else new_summary, content=content)
        )

    def finish(
        self, answer: Annotated[str, Field(max_length=2_000, description="the answer, and nothing else")]
    ) -> str:
        """Give your answer to the question. It ends the task."""
        self.answer = answer
        return "answered"

    def _last(self) -> int:
        assert self.chunks is not None
        return len(self.chunks.spans) - 1

    def _chunk(self, chunk_id: int) -> str:
        assert self.chunks is not None
        start, end = self.chunks.spans[chunk_id]
        return self.document[start:end]

    def _list_notes(self) -> str:
        lines = [f"- {key}: {note.summary}" for key, note in self.notes.items()]
        return "\n".join(("notes:", *lines)) if lines else "there are no notes yet"

    def _store(self, key: str, note: Note) -> str:
        # The limit includes the heading, because text beyond the end of a result cannot be read.
        limit = min(MAX_NOTE_CHARS, self.max_result_chars - len(_format(key, note)) + len(note.content))
        if len(note.content) > limit:
            return f"error: the note would have {len(note.content)} characters; {max(0, limit)} are allowed"
        if key not in self.notes and len(self.notes) >= MAX_NOTES:
            return f"error: there are {MAX_NOTES} notes, which is the most; delete one with updateNote first"
        self.notes[key] = note
        return f"noted. {self._list_notes()}"

    def _unknown(self, key: str) -> str:
        return f"error: there is no note {key!r}{suggest_to_policy(key, self.notes) if self.notes else ''}"


def _format(key: str, note: Note) -> str:
    return f"{key}: {note.summary}\n{note.content}"
