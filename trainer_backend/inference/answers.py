"""Build the text of a prompt that contains earlier answers exactly as they were sampled. Pure functions.

A template writes a parsed message in its own way. Therefore the template gets the sampled text of every
unedited answer, and its output is compared with the expected text.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainer_backend.errors import BadChatRequest
from trainer_backend.inference.rendering import BLANK, ChatRenderer, JsonObject

# Guards around text whose outer white space a template would trim. Unicode reserves them for private use.
OPEN, CLOSE = "\ufdd0", "\ufdd1"


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the model, and its index among the messages."""

    index: int
    message_hash: int  # `hash_message` of the message that was returned to the caller
    raw_text: str  # the response as sampled
    stop_text: str  # its stop token; "" if there is none
    opening: str = ""  # the beginning of the answer that stood in the prompt, if a call was forced
    reasoning: str = ""  # the reasoning that the message has apart from its content, if any
    content: str | None = None  # given to the template; None: the message as the caller sends it back
    has_guards: bool = False  # whether OPEN and CLOSE surround the content

    @property
    def written(self) -> str:
        """Return the whole answer, without its stop token."""
        return self.opening + self.raw_text

    def thought(self, renderer: ChatRenderer) -> str:
        """Return the reasoning of the answer, from the message or from the sampled text."""
        return self.reasoning.strip(BLANK) or renderer.find_reasoning(self.written)

    def shown(self, message: JsonObject, renderer: ChatRenderer) -> JsonObject:
        """Return the message that the template gets. The caller may have dropped the reasoning."""
        if self.content is not None:
            return {"role": "assistant", "content": self.content}
        return renderer.with_reasoning(message, self.reasoning)

    def stands_in(self, hashes: Sequence[int]) -> bool:
        """Return whether the conversation still contains the answer, unedited."""
        return self.index < len(hashes) and hashes[self.index] == self.message_hash

    def forms(self) -> Iterator["Answer"]:
        """Yield the forms that may reproduce the sampled text, most likely first, the parsed message last."""
        yield replace(self, content=self.written)
        if self.written != self.written.strip():
            yield replace(self, content=f"{OPEN}{self.written}{CLOSE}", has_guards=True)
        yield replace(self, content=None)


def hash_message(message: JsonObject) -> int:
    """Return a 64-bit hash of a message's content, without empty fields, which clients add and drop.

    Every message of every request is compared, so the hash is stored instead of the message.
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
    """The messages of a request, rendered with a form (`Answer.forms`) of each sampled answer.

    The forms of `earlier` answers are known; callers try forms of the newest. Each text is rendered once.
    """

    messages: Sequence[JsonObject]
    tools: Sequence[JsonObject]
    earlier: Sequence[Answer]
    renderer: ChatRenderer
    _texts: dict[Answer, str | None] = field(default_factory=dict)

    def text(self, newest: Answer) -> str | None:
        """Return the prompt with the last answer in this form, or None if the template cannot write it."""
        if newest not in self._texts:
            answers = [*self.earlier, newest]
            self._texts[newest] = text_with(self.messages, answers, self.tools, self.renderer)
        return self._texts[newest]

    def form_extending(self, newest: Answer, text: str) -> Answer | None:
        """Return the form for which the prompt begins with `text`, or None."""
        return next((form for form in newest.forms() if (self.text(form) or "").startswith(text)), None)

    def continuation(self, newest: Answer, prompt: str) -> tuple[Answer, int] | None:
        """Return a form for which the text continues `prompt`, and where in the text the answer ends.

        The caller replaces the template's version of the answer by the sampled text. The result is None if
        the template writes the text before the answer differently from `prompt`, drops the answer's
        reasoning, or writes the answer differently because other messages follow.
        """
        thought = newest.thought(self.renderer)
        form = replace(newest, content=None, has_guards=False)
        # If prompts begin reasoning, GLM and Nemotron write an answer without reasoning differently.
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
        """Return the form that reproduces the sampled answer after an edit, or else the parsed message.

        The prompt must begin with the new text before the answer, followed by the sampled answer.
        """
        before = text_with(self.messages[: newest.index], self.earlier, self.tools, self.renderer)
        if before is None:
            return replace(newest, content=None)
        target = before + newest.written + newest.stop_text
        return self.form_extending(newest, target) or replace(newest, content=None)


def _end_of_answer(upto: str, whole: str, stop: str, eos: str) -> int | None:
    """Return where the answer at the end of `upto` ends in `whole`; None if `whole` writes it differently.

    The end lies after the stop token, if one was sampled. White space may follow an end token, and the stop
    token may be the beginning of the next message.
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
    """Return the prompt with each of `answers` in its form, or None if the template cannot write them."""
    shown = list(messages)
    for answer in answers:
        shown[answer.index] = answer.shown(messages[answer.index], renderer)
    try:
        text = renderer.prompt_text(shown, tools, add_generation_prompt=add_generation_prompt)
    except BadChatRequest:
        return None  # some templates count turns, and count a call differently from its text
    if any([answer.reasoning == BLANK for answer in answers]):
        text = text.replace(BLANK, "")
    guards = sum([answer.has_guards for answer in answers])
    if not guards:
        return text
    if text.count(OPEN) != guards or text.count(CLOSE) != guards:
        return None  # the template dropped a guard with its content, or a message uses these characters
    return text.replace(OPEN, "").replace(CLOSE, "")
