"""A teacher that answers questions about long documents of the kinds `needle` and `keeper`.

It reads chunk after chunk, deletes the chunks that it has read, and answers when it has found the fact. Its
decisions depend only on the prompt, so a model can imitate it.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from shared_schemas.base import Body
from shared_schemas.messages import Message
from task_app.episode import history
from task_app.episode.actions import json_object
from task_app.policies.random_calls import ByChance, Tools
from task_app.protocols import PolicyAnswer

Call = tuple[str, dict[str, Any]]

# The teacher's answer if it finds none in the document.
UNKNOWN = "unknown"
_QUESTION = re.compile(r"(?:What|Who) is the (?P<asked>(?:code|keeper) of .+)", re.DOTALL)
_ANSWER = re.compile(r"(\w++)\.")
_CHUNK_HEADING = re.compile(r"chunk \d+ of 0 to \d+:\n")
_READ_OUT = "the document is read to its end"


class DocumentsTeacherConfig(Body):
    """Settings of `DocumentsTeacher`."""

    forgets: float = Field(
        default=0.0, ge=0.0, le=1.0, description="share of turns in which it deletes nothing"
    )
    seed: int = Field(default=0, ge=0, strict=True, description="of what it forgets")


@dataclass(frozen=True, slots=True)
class ToolResult:
    """A tool result in the prompt, with the ids of its message and of the message that called the tool.

    The ids are None if the environment shows the model no message ids.
    """

    text: str
    msg_id: int | None = None
    caller_id: int | None = None

    @classmethod
    def of(cls, content: str) -> "ToolResult":
        match json_object(content):
            case {history.MSG_ID: int(own), history.INVOKING: int(caller_id), **fields}:
                return cls(str(fields.get("message", "")), own, caller_id)
        return cls(content)

    @property
    def chunk(self) -> str:
        """The document's chunk in the result; empty if the result contains no chunk."""
        match = _CHUNK_HEADING.match(self.text)
        return self.text[match.end() :] if match else ""


class DocumentsTeacher(ByChance[DocumentsTeacherConfig]):
    """Reads a document chunk by chunk; each message deletes earlier results and reads the next chunk."""

    name = "documents_teacher"
    config_type = DocumentsTeacherConfig

    async def choose(self, observation: Any, tools: Tools) -> PolicyAnswer:
        offered = {tool["function"]["name"] for tool in tools}
        calls = [
            {"id": f"call_{len(observation)}_{i}", "name": name, "arguments": json.dumps(arguments)}
            for i, (name, arguments) in enumerate(self._choose_calls(observation, offered))
        ]
        return {"type": "tool_call", "tool_calls": calls}, None, None, None

    def _choose_calls(self, messages: Sequence[Message], tools: set[str]) -> list[Call]:
        contents = [message.content or "" for message in messages if message.role == "tool"]
        if not contents and "buildIndex" in tools:
            return [("buildIndex", {})]
        results = [ToolResult.of(content) for content in contents if content != history.STUB]
        fact = _make_fact(messages)
        read = "".join(result.chunk for result in results)
        if answer := _find_answer(f"{fact} ", read):
            return [("finish", {"answer": answer})]
        if results and results[-1].text == _READ_OUT:
            return [("finish", {"answer": UNKNOWN})]
        ids = deletable(results, fact)
        forgets = self._random.random() < self.config.forgets
        edits: list[Call] = [("deleteContext", {"message_ids": ids})]
        reads: list[Call] = [("readChunk", {"enable_scan": True})]
        return reads if forgets or not ids or "deleteContext" not in tools else edits + reads


def deletable(results: Sequence[ToolResult], fact: str) -> list[int]:
    """Return the ids of messages to delete: tool results, and calling messages whose results are all deleted.

    No result contains the answer, so all are deleted. Only the last chunk is kept if `fact` may begin at the
    end of this chunk.
    """
    chunks = [result for result in results if result.chunk]
    words = re.split(r"[.\n]", chunks[-1].chunk)[-1].strip() if chunks else ""
    begins = bool(words) and (fact.startswith(words) or words.startswith(fact))
    last_chunk = chunks[-1:] if begins else []
    callers = {result.caller_id for result in last_chunk}
    ids = {result.msg_id for result in results if result not in last_chunk}
    ids |= {result.caller_id for result in results if result.caller_id not in callers}
    return sorted(msg_id for msg_id in ids if msg_id is not None)


def _make_fact(messages: Sequence[Message]) -> str:
    """Return the beginning of the sentence that answers the question, such as `The code of X is`."""
    question = next((message.content or "" for message in messages if message.role == "user"), "")
    # Search each sentence by itself, because a search in the whole text would take quadratic time.
    for sentence in question.split("?")[:-1]:
        if match := _QUESTION.search(sentence):
            return f"The {match['asked']} is"
    return question


def _find_answer(fact: str, text: str) -> str | None:
    """Return the word between `fact` and the full stop; None if `text` contains no such sentence."""
    place = text.find(fact)
    while place >= 0:
        if answer := _ANSWER.match(text, place + len(fact)):
            return answer[1]
        place = text.find(fact, place + len(fact))
    return None
