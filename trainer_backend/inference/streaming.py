"""A chat completion as server-sent events: role, content as it comes, tool calls, the end, usage, [DONE].

Content is sent as soon as it is certain: whole characters only, and nothing that may be the beginning of a
stop string or of a tool call. Calls are parsed from the whole text and sent at the end. The last chunk of a
choice has, beside `finish_reason`, the fields that a whole reply would have: its exact tokens, and the
prompt's ids where they are asked for.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from trainer_backend.inference.asgi import EventStream
from trainer_backend.inference.completion import Completion
from trainer_backend.inference.protocol import Generation, Sampled
from trainer_backend.inference.reply import TOOL_CALL_ERROR, Choice, usage_body
from trainer_backend.inference.stopping_text import GrowingText, earliest, possible_start


async def stream_reply(
    completion: Completion, events: EventStream, remember: Callable[[Choice], None]
) -> None:
    """Sample all choices and send what comes of them. What fails before the first event raises unsent."""
    usage = {"usage": None} if completion.request.include_usage else {}
    frame = {**completion.frame("chat.completion.chunk"), **usage}
    streams = [ChoiceStream(completion, index) for index in range(completion.request.n)]
    generations: list[Generation] = []
    async with aclosing(_arriving(completion)) as arriving:
        async for index, arrived in arriving:
            if isinstance(arrived, Sampled):
                deltas = streams[index].take(arrived)
            else:
                choice = completion.choice(index, arrived)
                remember(choice)
                generations.append(arrived)
                deltas = streams[index].end(choice)
            for delta in deltas:
                prompt = completion.prompt_fields() if delta["finish_reason"] else {}
                await events.send({**frame, "choices": [delta], **prompt})
    if completion.request.include_usage:
        await events.send({**frame, "choices": [], "usage": usage_body(completion.prompt.ids, generations)})
    await events.end()


async def _arriving(completion: Completion) -> AsyncGenerator[tuple[int, Sampled | Generation], None]:
    """Tokens of all choices in the order in which they were sampled, and each generation after its own."""
    arrived: asyncio.Queue[tuple[int, Sampled | asyncio.Task[Generation]]] = asyncio.Queue()
    tasks: list[asyncio.Task[Generation]] = []
    for index in range(completion.request.n):

        def put(what: Sampled | asyncio.Task[Generation], index: int = index) -> None:
            arrived.put_nowait((index, what))

        tasks.append(asyncio.create_task(completion.generation(index, on_token=put)))
        tasks[-1].add_done_callback(put)
    try:
        running = len(tasks)
        while running:
            index, what = await arrived.get()
            if isinstance(what, Sampled):
                yield index, what
            else:
                running -= 1
                yield index, what.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class ChoiceStream:
    """The chunks of one choice: takes its tokens but the last, then the choice as a whole."""

    def __init__(self, completion: Completion, index: int) -> None:
        self._completion = completion
        self._index = index
        self._text = GrowingText(completion.policy.renderer.decode)
        self._ends = (*completion.request.stop, *completion.policy.tool_format.openers)
        self._begun = False
        self._taken = 0
        self._open = True  # False from the first of `_ends` on: the rest comes with the end
        self._pending = ""
        self._sent = ""
        self._untold: list[Sampled] = []  # tokens whose log-probs were not sent yet

    def take(self, sampled: Sampled) -> list[dict[str, Any]]:
        """The chunks that this token allows."""
        self._taken += 1
        self._untold.append(sampled)
        self._pending += self._text.take(sampled.token_id)
        certain = self._certain()
        return [*self._beginning(), *([self._chunk({"content": certain})] if certain else [])]

    def end(self, choice: Choice) -> list[dict[str, Any]]:
        """The rest of the content, the calls, and the end."""
        self._untold += choice.generation.sampled()[self._taken :]
        message = choice.message
        deltas: list[dict[str, Any]] = []
        if rest := unsent(message["content"] or "", self._sent):
            deltas.append({"content": rest})
        if "tool_calls" in message:
            calls = [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
            deltas.append({"tool_calls": calls})
        if TOOL_CALL_ERROR in message:
            deltas.append({TOOL_CALL_ERROR: message[TOOL_CALL_ERROR]})
        last = {**self._chunk({}), **self._completion.exact_fields(choice)}
        return [*self._beginning(), *map(self._chunk, deltas), last]

    def _beginning(self) -> list[dict[str, Any]]:
        if self._begun:
            return []
        self._begun = True
        return [self._chunk({"role": "assistant", "content": ""})]

    def _chunk(self, delta: dict[str, Any]) -> dict[str, Any]:
        """A choice of a chunk; the log-probs of tokens go with the first content behind them, or the end."""
        logprobs = None
        if delta.get("role") is None and self._completion.request.logprobs and self._untold:
            logprobs = self._completion.logprobs_body(self._untold)
            self._untold = []
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _certain(self) -> str:
        """Takes from the pending text what no stop string and no call can begin with."""
        if not self._open:
            return ""
        found = earliest(self._pending, self._ends)
        self._open = found is None
        length = found[0] if found else len(self._pending) - possible_start(self._pending, self._ends)
        certain, self._pending = self._pending[:length], self._pending[length:]
        self._sent += certain
        return certain


def unsent(content: str, sent: str) -> str:
    """What of the final content was not sent: parsers may have removed white space at either end."""
    removed = 0 if content.startswith(sent) else len(sent) - len(sent.lstrip())
    return content[len(sent) - removed :]
