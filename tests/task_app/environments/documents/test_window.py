"""A long document in a short window: a reader that deletes what it has read, and one that does not."""

from typing import Any

import pytest

from task_app.environments.documents.environment import DocumentsConfig, DocumentsEnvironment
from task_app.episode.context_tools import CONTEXT_TOOLS, apply
from task_app.episode.history import History
from task_app.protocols import ToolRequest
from tests.task_app.talking import assistant

CHUNK = 4_000


def shown_chars(history: History) -> int:
    """Of the next prompt: what is said, and the calls; no chat template."""
    return sum(
        len(message.content or "")
        + sum(len(call.function.name + call.function.arguments) for call in message.tool_calls or ())
        for message in history.view()
    )


class Reader:
    """Scans the document to its end; each turn it may first delete the turn before."""

    def __init__(self, *, deletes: bool) -> None:
        self.deletes = deletes
        made = {"kind": "needle", "chars": 49 * CHUNK}
        self._environment = DocumentsEnvironment(
            DocumentsConfig(generate=made, chunk_size=CHUNK, indexed=True)
        )
        self._environment.reset(3)
        self._history = History.start(self._environment.opening(), shows_ids=True)
        self.chunks, self.most_chars = 0, 0

    def read_all(self) -> None:
        before: list[int] = []
        while True:
            self.most_chars = max(self.most_chars, shown_chars(self._history))
            calls: list[tuple[str, Any]] = [("readChunk", {"enable_scan": True})]
            if before and self.deletes:
                calls.insert(0, ("deleteContext", {"message_ids": before}))
            own = len(self._history)
            texts = self._turn(calls)
            if texts[-1] == "the document is read to its end":
                return
            self.chunks += 1
            before = list(range(own, len(self._history)))

    def _turn(self, calls: list[tuple[str, Any]]) -> list[str]:
        message = assistant(len(self._history), *calls)
        self._history = self._history.with_message(message)
        texts = []
        for call, (name, arguments) in zip(message.tool_calls or (), calls, strict=True):
            request = ToolRequest(name, arguments)
            if name in CONTEXT_TOOLS:
                applied = apply(self._history, request)
                self._history, text = applied.history, applied.text
            else:
                (text,) = self._environment.step([request]).results
            self._history = self._history.with_result(call, text)
            texts.append(text)
        return texts


@pytest.mark.parametrize("deletes", [True, False])
def test_a_reader_that_deletes_reads_50_chunks_within_a_window_of_3_and_another_needs_them_all(deletes: bool):
    reader = Reader(deletes=deletes)
    reader.read_all()
    assert reader.chunks == 50
    assert reader.most_chars < 3 * CHUNK if deletes else reader.most_chars > 49 * CHUNK
