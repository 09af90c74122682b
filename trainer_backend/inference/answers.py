"""Pure: earlier answers of a conversation, and the text of a prompt in which they stand as they were sampled.

A template that is given the parsed message writes it in its own way. So it is given, in the place of every
answer that stands unedited, the text that was sampled; what it makes of that is compared, never assumed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainer_backend.errors import BadChatRequest
from trainer_backend.inference.rendering import ChatRenderer

JsonObject = Mapping[str, Any]

# Around a text whose outer white space a template would trim. Unicode leaves these to a program's own use.
OPEN, CLOSE = "\ufdd0", "\ufdd1"


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the model, and its place among the messages.

    Attributes:
        said: what it says, parsed, as `said` of the message that was given out.
        raw_text, stop_text: the response as sampled, and its stop token apart ("" if there is none).
        content: what the template is given in its place; None: the message, as the caller sends it back.
        guarded: OPEN and CLOSE stand around it.
    """

    index: int
    said: int
    raw_text: str
    stop_text: str
    content: str | None = None
    guarded: bool = False

    def stands_in(self, all_said: Sequence[int]) -> bool:
        """Whether it is there, unedited."""
        return self.index < len(all_said) and all_said[self.index] == self.said

    def forms(self) -> Iterator["Answer"]:
        """The ways to have its exact text written, the likeliest first; the parsed message comes last."""
        yield replace(self, content=self.raw_text)
        if self.raw_text != self.raw_text.strip():
            yield replace(self, content=f"{OPEN}{self.raw_text}{CLOSE}", guarded=True)
        yield replace(self, content=None)


def said(message: JsonObject) -> int:
    """A number for what a message says, of 64 bits. Clients add and drop empty fields: those do not count.

    Every message of every request passes here, so a number that is compared later is kept, and no message.
    """
    get = message.get
    content, calls = get("content") or "", get("tool_calls")
    if type(content) is not str:
        content = repr(content)
    functions = tuple(map(_function, calls)) if calls else ()
    return hash((get("role"), content, functions, get("tool_call_id")))


def _function(call: Any) -> object:
    function = call.get("function") if type(call) is dict else call
    if type(function) is dict:
        return str(function.get("name")), str(function.get("arguments"))
    return repr(function)


@dataclass(slots=True)
class View:
    """The messages of a request, in which the answers of `earlier` stand in forms that were settled before.

    Rendering costs the most of all that is done here, so no text is rendered twice.
    """

    messages: Sequence[JsonObject]
    tools: Sequence[JsonObject]
    earlier: Sequence[Answer]
    renderer: ChatRenderer
    _texts: dict[str | None, str | None] = field(default_factory=dict)

    def text(self, newest: Answer) -> str | None:
        """The prompt with the last answer in this form; None where the template cannot write that."""
        if newest.content not in self._texts:
            answers = [*self.earlier, newest]
            self._texts[newest.content] = text_with(self.messages, answers, self.tools, self.renderer)
        return self._texts[newest.content]

    def extending(self, newest: Answer, text: str) -> Answer | None:
        """The form in which the prompt begins with `text`."""
        return next((form for form in newest.forms() if (self.text(form) or "").startswith(text)), None)

    def exact(self, newest: Answer) -> Answer:
        """The form in which the answer stands as it was sampled, behind a conversation that was edited.

        There no earlier text can tell, so it is compared with what the model would now see before it.
        """
        before = text_with(self.messages[: newest.index], self.earlier, self.tools, self.renderer)
        if before is None:
            return replace(newest, content=None)
        wanted = before + newest.raw_text + newest.stop_text
        return self.extending(newest, wanted) or replace(newest, content=None)


def text_with(
    messages: Sequence[JsonObject],
    answers: Sequence[Answer],
    tools: Sequence[JsonObject],
    renderer: ChatRenderer,
) -> str | None:
    """The prompt in which each of `answers` stands in its form; None where the template cannot write that."""
    shown = list(messages)
    for answer in answers:
        if answer.content is not None:
            shown[answer.index] = {"role": "assistant", "content": answer.content}
    try:
        text = renderer.prompt_text(shown, tools)
    except BadChatRequest:
        return None  # some templates count the turns, and a call counts otherwise than its text
    guarded = sum([answer.guarded for answer in answers])
    if not guarded:
        return text
    if text.count(OPEN) != guarded or text.count(CLOSE) != guarded:
        return None  # a guard was dropped with what it guards, or somebody else uses these characters
    return text.replace(OPEN, "").replace(CLOSE, "")
