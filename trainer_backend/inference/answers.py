"""Build the text of a prompt that contains earlier answers exactly as they were sampled. Pure functions.

A chat template may write a parsed message differently from the text that the model sampled. Therefore the
template gets the sampled text of every unedited answer as content, and its output is compared with that text.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainer_backend.errors import BadChatRequest
from trainer_backend.inference.rendering import BLANK, ChatRenderer, JsonObject

# These characters surround a text whose outer white space a template would trim. Unicode reserves them for
# private use.
OPEN, CLOSE = "\ufdd0", "\ufdd1"


@dataclass(frozen=True, slots=True)
class Answer:
    """An earlier answer of the model, and the content that the chat template gets for it.

    `index` is the position of the answer among the messages of the request.
    """

    index: int
    message_hash: int  # `hash_message` of the message that was returned to the caller
    raw_text: str  # all sampled text, without the stop token
    stop_text: str  # the text of the stop token; "" if there is none
    opening: str = ""  # if a call was forced: the beginning of the answer, which was a part of the prompt
    reasoning: str = ""  # the reasoning that the message contains outside its content, if any
    content: str | None = None  # what the template gets; None: the message as the caller sends it back
    has_guards: bool = False  # whether OPEN and CLOSE surround the content

    @property
    def written(self) -> str:
        """Return the text of the answer, including the beginning of a forced call, without the stop token."""
        return self.opening + self.raw_text

    def thought(self, renderer: ChatRenderer) -> str:
        """Return the reasoning of the answer: from the message if possible, else from the sampled text."""
        return self.reasoning.strip(BLANK) or renderer.find_reasoning(self.written)

    def shown(self, message: JsonObject, renderer: ChatRenderer) -> JsonObject:
        """Return the message for the template. If the caller dropped the reasoning, it is restored."""
        if self.content is not None:
            return {"role": "assistant", "content": self.content}
        return renderer.with_reasoning(message, self.reasoning)

    def stands_in(self, hashes: Sequence[int]) -> bool:
        """Return whether a conversation with these message hashes still contains the answer, unedited."""
        return self.index < len(hashes) and hashes[self.index] == self.message_hash

    def forms(self) -> Iterator["Answer"]:
        """Yield copies of this answer whose `content` may make the template reproduce the sampled text.

        The most promising form comes first, and the parsed message (`content` is None) comes last.
        """
        yield replace(self, content=self.written)
        if self.written != self.written.strip():
            yield replace(self, content=f"{OPEN}{self.written}{CLOSE}", has_guards=True)
        yield replace(self, content=None)


def hash_message(message: JsonObject) -> int:
    """Return a 64-bit hash of the role, content, tool calls and `tool_call_id` of a message.

    Empty content counts as absent, and so does an empty list of calls, because clients add and drop both. The
    gateway compares every message of every request with the stored conversation, and stores only the hashes.
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
    """Renders the messages of a request, with each sampled answer in one of its forms (`Answer.forms`).

    The answers in `earlier` already have their forms. The newest answer does not, so callers try several
    forms of it. The text for each form is rendered once and then cached.
    """

    messages: Sequence[JsonObject]
    tools: Sequence[JsonObject]
    earlier: Sequence[Answer]
    renderer: ChatRenderer
    _texts: dict[Answer, str | None] = field(default_factory=dict)

    def text(self, newest: Answer) -> str | None:
        """Return the prompt with the newest answer in this form, or None if the template cannot render it."""
        if newest not in self._texts:
            answers = [*self.earlier, newest]
            self._texts[newest] = text_with(self.messages, answers, self.tools, self.renderer)
        return self._texts[newest]

    def form_extending(self, newest: Answer, text: str) -> Answer | None:
        """Return the first form of the newest answer with which the prompt begins with `text`, or None."""
        return next((form for form in newest.forms() if (self.text(form) or "").startswith(text)), None)

    def continuation(self, newest: Answer, prompt: str) -> tuple[Answer, int] | None:
        """Return a form of the newest answer, and the index at which the answer ends in the rendered request.

        With this form, the rendered request begins with `prompt`, so that the caller can replace the text
        between `prompt` and the index by the sampled text. Return None if no form achieves that, because the
        template changes the text before the answer, drops the reasoning of the answer, or writes the answer
        differently when messages follow it.
        """
        thought = newest.thought(self.renderer)
        form = replace(newest, content=None, has_guards=False)
        # If the prompt begins the reasoning, the templates of GLM and Nemotron write an answer without
        # reasoning differently. BLANK is an empty reasoning that they do not trim.
        forms = [form] if thought else [form, replace(form, reasoning=BLANK)]
        for form in forms:
            upto = text_with(
                self.messages[: newest.index + 1],
                [*self.earlier, form],
                self.tools,
                self.renderer,
                add_generation_prompt=False,
            )
            if upto is not None and upto.startswith(prompt) and (whole := self.text(form)) is not None:
                end = _end_of_answer(upto, whole, newest.stop_text, self.renderer.tokenizer.eos_token or "")
                is_shown = end is not None and thought in whole[len(prompt) : end]
                return (form, end) if end is not None and is_shown else None
        return None

    def exact(self, newest: Answer) -> Answer:
        """Return the form with which the template reproduces the sampled text of the newest answer.

        The messages before the answer may have been edited. If no form reproduces the sampled text, return
        the form with the parsed message.
        """
        before = text_with(self.messages[: newest.index], self.earlier, self.tools, self.renderer)
        if before is None:
            return replace(newest, content=None)
        target = before + newest.written + newest.stop_text
        return self.form_extending(newest, target) or replace(newest, content=None)


def _end_of_answer(upto: str, whole: str, stop: str, eos: str) -> int | None:
    """Return the index in `whole` at which the last answer of `upto` ends.

    `upto` is the conversation rendered up to this answer, and `whole` the conversation with later messages.
    Return None if `whole` begins differently. If a stop token was sampled, the answer ends after this token.
    `upto` lacks the token if the template writes it as the beginning of the next message.
    """
    body = upto.rstrip()
    if not stop:
        body = body.removesuffix(eos) if eos and body.endswith(eos) else upto
    elif not body.endswith(stop):
        body = upto + stop
    return len(body) if whole.startswith(body) else None


def text_with(
    messages: Sequence[JsonObject],
    answers: Sequence[Answer],
    tools: Sequence[JsonObject],
    renderer: ChatRenderer,
    *,
    add_generation_prompt: bool = True,
) -> str | None:
    """Render the messages with each of `answers` in its form; return None if the template cannot do that."""
    shown = list(messages)
    for answer in answers:
        shown[answer.index] = answer.shown(messages[answer.index], renderer)
    try:
        text = renderer.prompt_text(shown, tools, add_generation_prompt=add_generation_prompt)
    except BadChatRequest:
        return None  # for example, a template that counts turns treats a call differently from its text
    if any([answer.reasoning == BLANK for answer in answers]):
        text = text.replace(BLANK, "")
    guards = sum([answer.has_guards for answer in answers])
    if not guards:
        return text
    if text.count(OPEN) != guards or text.count(CLOSE) != guards:
        return None  # the template dropped a guard and its content, or a message contains these characters
    return text.replace(OPEN, "").replace(CLOSE, "")
