"""A teacher of long documents, of kinds `needle` and `keeper`: reads on, deletes what it has read, answers.

It knows what its prompt shows and nothing else: a model that imitates it can do as it does.
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
from task_app.policies.random_calls import ByChance
from task_app.protocols import PolicyAnswer

Call = tuple[str, dict[str, Any]]

# What it says when the document held no answer.
UNKNOWN = "unknown"
_QUESTION = re.compile(r"(?:What|Who) is the (?P<asked>(?:code|keeper) of .+)", re.DOTALL)
_ANSWER = re.compile(r"(\w++)\.")
_HEADING = re.compile(r"chunk \d+ of 0 to \d+:\n")
_READ_OUT = "the document is read to its end"


class DocumentsTeacherConfig(Body):
    """Settings of the teacher of documents."""

    forgets: float = Field(
        default=0.0, ge=0.0, le=1.0, description="share of turns in which it reads on and deletes nothing"
    )
    seed: int = Field(default=0, ge=0, strict=True, description="of what it forgets")


@dataclass(frozen=True, slots=True)
class Shown:
    """A tool result that the prompt still shows; without ids where messages have none."""

    text: str
    msg_id: int | None = None
    invoking: int | None = None

    @classmethod
    def of(cls, content: str) -> "Shown":
        match json_object(content):
            case {history.MSG_ID: int(own), history.INVOKING: int(invoking), **told}:
                return cls(str(told.get("message", "")), own, invoking)
        return cls(content)

    @property
    def chunk(self) -> str:
        """The piece of the document in it, if there is one."""
        heading = _HEADING.match(self.text)
        return self.text[heading.end() :] if heading else ""


class DocumentsTeacher(ByChance):
    """In one message it deletes what holds nothing of the question and reads the next chunk."""

    name = "documents_teacher"

    def __init__(self, config: DocumentsTeacherConfig | None = None) -> None:
        self.config = config or DocumentsTeacherConfig()
        super().__init__(self.config.seed)

    async def get_action(
        self, observation: Any, available_tools_specs: list[dict[str, Any]] | None = None
    ) -> PolicyAnswer:
        offered = {tool["function"]["name"] for tool in available_tools_specs or ()}
        calls = [
            {"id": f"call_{len(observation)}_{i}", "name": name, "arguments": json.dumps(arguments)}
            for i, (name, arguments) in enumerate(self._calls(observation, offered))
        ]
        return {"type": "tool_call", "tool_calls": calls}, None, None, None

    def _calls(self, messages: Sequence[Message], offered: set[str]) -> list[Call]:
        results = [message.content or "" for message in messages if message.role == "tool"]
        if not results and "buildIndex" in offered:
            return [("buildIndex", {})]
        shown = [Shown.of(content) for content in results if content != history.STUB]
        fact = _fact(messages)
        read = "".join(result.chunk for result in shown)
        if answer := _answer(f"{fact} ", read):
            return [("finish", {"answer": answer})]
        if shown and shown[-1].text == _READ_OUT:
            return [("finish", {"answer": UNKNOWN})]
        gone = deletable(shown, fact)
        forgets = self._random.random() < self.config.forgets
        edits: list[Call] = [("deleteContext", {"message_ids": gone})]
        reads: list[Call] = [("readChunk", {"enable_scan": True})]
        return reads if forgets or not gone or "deleteContext" not in offered else edits + reads


def deletable(shown: Sequence[Shown], fact: str) -> list[int]:
    """Ids of the results that hold nothing of `fact`, and of the messages that called for them alone.

    The last chunk stays where its end may be the beginning of the fact: the next one goes on there.
    """
    chunks = [result for result in shown if result.chunk]
    kept = chunks[-1:] if chunks and _begins(fact, at_the_end_of=chunks[-1].chunk) else []
    callers = {result.invoking for result in kept}
    gone = {result.msg_id for result in shown if result not in kept}
    gone |= {result.invoking for result in shown if result.invoking not in callers}
    return sorted(msg_id for msg_id in gone if msg_id is not None)


def _fact(messages: Sequence[Message]) -> str:
    """How the sentence begins that answers the question."""
    question = next((message.content or "" for message in messages if message.role == "user"), "")
    # Sentence by sentence: looking for the mark from every beginning would take the square of the text.
    for sentence in question.split("?")[:-1]:
        if asked := _QUESTION.search(sentence):
            return f"The {asked['asked']} is"
    return question


def _answer(fact: str, text: str) -> str | None:
    """The word behind the fact, where it ends its sentence."""
    place = text.find(fact)
    while place >= 0:
        if answer := _ANSWER.match(text, place + len(fact)):
            return answer[1]
        place = text.find(fact, place + len(fact))
    return None


def _begins(fact: str, *, at_the_end_of: str) -> bool:
    words = re.split(r"[.\n]", at_the_end_of)[-1].strip()
    return bool(words) and (fact.startswith(words) or words.startswith(fact))
