"""A reader's moment as plain data: all but the document, which follows from the config and the seed."""

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from task_app.environments.documents.chunks import MAX_CHUNKS, chunked
from task_app.environments.documents.desk import MAX_CHUNK_CHARS, Desk
from task_app.environments.documents.notes import MAX_NOTES, Note

Count = Annotated[int, Field(ge=0, le=2**31 - 1)]


class ReaderState(BaseModel):
    """`index` is [chunk_size, overlap] of the last buildIndex; `reward` of the last env step."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    format: Literal[1] = 1
    seed: Count
    chars: Count
    notes: dict[str, Note] = Field(max_length=MAX_NOTES)
    index: tuple[Annotated[int, Field(ge=1, le=MAX_CHUNK_CHARS)], Count] | None
    next_chunk: Annotated[int, Field(ge=0, le=MAX_CHUNKS)]
    answer: Annotated[str, Field(max_length=2_000)] | None
    reward: float


def pack(desk: Desk, *, seed: int, reward: float) -> bytes:
    chunks = desk.chunks
    state = ReaderState(
        seed=seed,
        chars=len(desk.document),
        notes=desk.notes.all,
        index=(chunks.size, chunks.overlap) if chunks else None,
        next_chunk=desk.next_chunk,
        answer=desk.answer,
        reward=reward,
    )
    return state.model_dump_json().encode()


def desk_of(state: ReaderState, fresh: Desk) -> Desk:
    """The desk at that moment; `fresh` is the one that the episode began with.

    Raises:
        ValueError: it was another document's, or its index cannot be.
    """
    document = fresh.document
    if state.chars != len(document):
        raise ValueError(
            f"the snapshot's document has {state.chars} characters, this environment's has {len(document)}"
        )
    chunks = None
    if state.index is not None:
        chunks = chunked(document, size=state.index[0], overlap=state.index[1])
    notes = fresh.notes.with_all(state.notes)
    return replace(fresh, notes=notes, chunks=chunks, next_chunk=state.next_chunk, answer=state.answer)
