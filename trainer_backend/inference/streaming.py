"""Stream a chat completion as server-sent events: role, content, tool calls, end of choice, usage, [DONE].

Content is sent as soon as it cannot change: whole characters only, and no text that may begin a stop string
or a tool call. Tool calls are parsed from the whole text, so they are sent at the end. The last chunk of a
choice has `finish_reason` and the token fields of an unstreamed reply: the exact tokens and, if requested,
the prompt's ids.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from trainer_backend.inference.actor import Generation, SampledToken
from trainer_backend.inference.asgi import EventStream
from trainer_backend.inference.completion import Completion
from trainer_backend.inference.reply import REASONING, TOOL_CALL_ERROR, Choice, usage_body
from trainer_backend.inference.stop_strings import GrowingText, earliest, possible_start


async def stream_reply(
    completion: Completion, events: EventStream, remember: Callable[[Choice], None]
) -> None:
    """Sample all choices and send them as events. Errors are raised, also after the first event."""
    usage = {"usage": None} if completion.request.include_usage else {}
    frame = {**completion.frame("chat.completion.chunk"), **usage}
    streams = [ChoiceStream(completion, index) for index in range(completion.request.n)]
    generations: list[Generation] = []
    async with aclosing(_outcomes(completion)) as outcomes:
        async for index, outcome in outcomes:
            if isinstance(outcome, SampledToken):
                deltas = streams[index].take(outcome)
            else:
                choice = completion.choice(index, outcome)
                remember(choice)
                generations.append(outcome)
                deltas = streams[index].end(choice)
            for delta in deltas:
                prompt = completion.prompt_fields() if delta["finish_reason"] else {}
                await events.send({**frame, "choices": [delta], **prompt})
    if completion.request.include_usage:
        await events.send({**frame, "choices": [], "usage": usage_body(completion.prompt.ids, generations)})
    await events.end()


async def _outcomes(completion: Completion) -> AsyncGenerator[tuple[int, SampledToken | Generation], None]:
    """Yield (choice index, token) as tokens are sampled, and (index, generation) when a choice ends."""
    queue: asyncio.Queue[tuple[int, SampledToken | asyncio.Task[Generation]]] = asyncio.Queue()
    tasks: list[asyncio.Task[Generation]] = []
    for index in range(completion.request.n):

        def put(what: SampledToken | asyncio.Task[Generation], index: int = index) -> None:
            queue.put_nowait((index, what))

        tasks.append(asyncio.create_task(completion.generation(index, on_token=put)))
        tasks[-1].add_done_callback(put)
    try:
        unfinished = len(tasks)
        while unfinished:
            index, what = await queue.get()
            if isinstance(what, SampledToken):
                yield index, what
            else:
                unfinished -= 1
                yield index, what.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class ChoiceStream:
    """Makes the chunks of a choice: call `take` with all tokens but the last, then `end` with the choice."""

    def __init__(self, completion: Completion, index: int) -> None:
        self._completion = completion
        self._index = index
        self._text = GrowingText(completion.policy.renderer.decode)
        self._ends = (*completion.request.stop, *completion.policy.tool_format.openers)
        self._has_begun = False
        self._count = 0
        # False if a call is forced, or once a string of `_ends` has appeared: the rest is sent at the end.
        self._open = not completion.call_opening
        self._pending = ""
        self._sent_text = ""
        self._unreported: list[SampledToken] = []  # tokens whose log-probs were not sent yet

    def take(self, token: SampledToken) -> list[dict[str, Any]]:
        """Return the chunks that can be sent after this token."""
        self._count += 1
        self._unreported.append(token)
        self._pending += self._text.take(token.token_id)
        certain = self._certain()
        return [*self._first_chunk(), *([self._chunk({"content": certain})] if certain else [])]

    def end(self, choice: Choice) -> list[dict[str, Any]]:
        """Return the last chunks: the rest of the content, the tool calls, and the finish reason."""
        self._unreported += choice.generation.sampled()[self._count :]
        message = choice.message
        deltas = [{REASONING: message[REASONING]}] if REASONING in message else []
        if rest := unsent(message["content"] or "", self._sent_text):
            deltas.append({"content": rest})
        if "tool_calls" in message:
            calls = [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
            deltas.append({"tool_calls": calls})
        if TOOL_CALL_ERROR in message:
            deltas.append({TOOL_CALL_ERROR: message[TOOL_CALL_ERROR]})
        last = {**self._chunk({}), **self._completion.exact_fields(choice)}
        return [*self._first_chunk(), *map(self._chunk, deltas), last]

    def _first_chunk(self) -> list[dict[str, Any]]:
        if self._has_begun:
            return []
        self._has_begun = True
        return [self._chunk({"role": "assistant", "content": ""})]

    def _chunk(self, delta: dict[str, Any]) -> dict[str, Any]:
        """Return the `choices` entry of a chunk, with the log-probs that were not sent yet."""
        logprobs = None
        if delta.get("role") is None and self._completion.request.logprobs and self._unreported:
            logprobs = self._completion.logprobs_body(self._unreported)
            self._unreported = []
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _certain(self) -> str:
        """Remove and return the pending text that cannot belong to a stop string or a tool call."""
        if not self._open:
            return ""
        match = earliest(self._pending, self._ends)
        self._open = match is None
        length = match[0] if match else len(self._pending) - possible_start(self._pending, self._ends)
        certain, self._pending = self._pending[:length], self._pending[length:]
        self._sent_text += certain
        return certain


def unsent(content: str, sent: str) -> str:
    """Return the rest of `content` after `sent`, whose leading white space `content` may lack."""
    removed = 0 if content.startswith(sent) else len(sent) - len(sent.lstrip())
    return content[len(sent) - removed :]
