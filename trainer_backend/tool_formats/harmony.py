"""Parses replies of gpt-oss. A reply is a sequence of messages, and each message belongs to a channel:

<|channel|>analysis<|message|>I need a tree.<|end|><|start|>assistant<|channel|>commentary
 to=functions.interact_many <|constrain|>json<|message|>{"actions": ["do"]}<|call|>

Messages of the channel `analysis` are reasoning. A message with a recipient (`to=`) is a tool call. Messages
of `final`, and of `commentary` without a recipient, are content. The recipient may also come before the
channel, as in the chat template: ` to=functions.NAME<|channel|>commentary json`.

Source: OpenAI's harmony response format.
"""

import re

from trainer_backend.tool_formats.calls import ParsedCall, ParsedReply, Tools, as_call, read_json, skip_space

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
CONSTRAIN, RETURN, CALL = "<|constrain|>", "<|return|>", "<|call|>"
_TOKENS = (START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL)
_TOKEN = re.compile("|".join(map(re.escape, _TOKENS)))
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."


def parse_harmony(text: str, tools: Tools) -> ParsedReply:
    """Parse the messages of a reply into content, reasoning and at most one call.

    A second call is an error, because the chat template drops all calls of a message except the first.

    If a message cannot be read, `content` is the content before that message, followed by the unread text
    without the format's special tokens, because the chat template refuses special tokens in the content.

    If there is a call, the chat template accepts either reasoning or content. So if there is also reasoning,
    the content is appended to the reasoning, and `content` is empty.
    """
    reader = _Reader(text)
    try:
        reader.read()
    except (ValueError, RecursionError) as error:
        reason = str(error)
        return ParsedReply(reader.all_text(), error=reason, reasoning="\n".join(reader.thoughts))
    content, reasoning = "".join(reader.content), "\n".join(reader.thoughts)
    if reader.call is None:
        return ParsedReply(content, reasoning=reasoning)
    if reasoning and content.strip():
        content, reasoning = "", f"{reasoning}\n{content.strip()}"
    return ParsedReply(content.strip(), (reader.call,), reasoning=reasoning)


class _Reader:
    """Reads the messages of a reply one by one, and collects their content, their reasoning and the call."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        self.content: list[str] = []
        self.thoughts: list[str] = []
        self.call: ParsedCall | None = None
        self._is_thinking = False

    def read(self) -> None:
        """Read all messages. Raises ValueError if a message cannot be read."""
        while self._position < len(self._text):
            start = self._text.find(MESSAGE, self._position)
            if start < 0:
                self._read_end()
                break
            header = self._text[self._position : start]
            self._position = start + len(MESSAGE)
            self._read_message(header)
        if self._is_thinking:
            raise ValueError("the reply ends in its reasoning: no answer or call follows it")

    def all_text(self) -> str:
        """Return the content so far, followed by the unread text without the format's special tokens."""
        return "".join([*self.content, *_TOKEN.split(self._text[self._position :])]).strip()

    def _read_end(self) -> None:
        rest = self._text[self._position :]
        if CHANNEL in rest or START in rest:
            raise ValueError(f"the message after {rest[:40]!r} was cut off before {MESSAGE}")
        self._position = len(self._text)
        if text := _TOKEN.sub("", rest):  # a model that leaves out all headers
            self.content.append(text)
            self._is_thinking = False

    def _read_message(self, header: str) -> None:
        role, _, channel = header.removeprefix(START).partition(CHANNEL)
        recipients = _RECIPIENT.findall(header)
        author = _RECIPIENT.sub("", role).strip()
        if author not in ("", "assistant"):
            raise ValueError(f"expected a message of the assistant, found the header {header[:40]!r}")
        if recipients and recipients[-1] != "assistant":
            self._read_call(recipients[-1].removeprefix(_FUNCTIONS))
            return
        match = _TOKEN.search(self._text, self._position)
        end = match.start() if match else len(self._text)
        body = self._text[self._position : end]
        self._position = end
        self._is_thinking = channel.split(CONSTRAIN)[0].split()[:1] == ["analysis"]
        (self.thoughts if self._is_thinking else self.content).append(body)
        self._skip_end()

    def _read_call(self, name: str) -> None:
        if self.call is not None:
            raise ValueError("a second tool call follows the first; a message holds one")
        try:
            value, end = read_json(self._text, self._position)
            self.call = as_call({"name": name, "arguments": value})
        except (ValueError, RecursionError) as error:
            raise ValueError(f"tool call 1 cannot be read: {error}") from error
        position = skip_space(self._text, end)
        if position < len(self._text) and not self._text.startswith(_TOKENS, position):
            found = self._text[position : position + 20]
            raise ValueError(f"tool call 1 cannot be read: {found!r} follows its JSON")
        self._position, self._is_thinking = position, False
        self._skip_end()

    def _skip_end(self) -> None:
        for token in (END, CALL, RETURN):
            if self._text.startswith(token, self._position):
                self._position += len(token)
                return
