"""The calls of one interaction object, as they run on its loop: one at a time, in the published form."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from task_app.errors import InteractionFailed
from task_app.interactions.entry import InteractionEntry
from task_app.interactions.replies import InteractionReply, read_instance_id, read_reply, read_score
from task_app.protocols import BaseInteraction


class Calls:
    """Everything here runs on the interaction's loop, the object's construction too: any of it may block.

    Args:
        entry: what it is built from.
        instance_id: given to start_interaction; the class may return another one.
        kwargs: given to start_interaction and generate_response, as published.
        connect: called with the new object before anything else is.
        at_most_bytes: of one answer.
    """

    def __init__(
        self,
        entry: InteractionEntry,
        instance_id: str,
        kwargs: Mapping[str, Any],
        *,
        connect: Callable[[BaseInteraction], None],
        at_most_bytes: int,
    ) -> None:
        self._entry = entry
        self.instance_id = instance_id
        self._kwargs = {**kwargs, "name": entry.name}
        self._connect = connect
        self._at_most_bytes = at_most_bytes
        # A start that was given up on may still run: what comes next waits for its end.
        self._turn = asyncio.Lock()
        self._closed = False
        self._interaction: BaseInteraction | None = None
        self.started = False

    async def start(self) -> None:
        async with self._its_turn():
            interaction = self._entry.build()
            self._connect(interaction)
            # From here on it may hold something, whatever the call comes to.
            self._interaction = interaction
            found = await _answer_of(interaction.start_interaction, self.instance_id, **_copied(self._kwargs))
            self.instance_id = read_instance_id(found, self.instance_id, name=self._entry.name)
            self.started = True

    async def respond(self, messages: Sequence[dict[str, Any]]) -> InteractionReply:
        async with self._its_turn():
            found = await _answer_of(
                self._started().generate_response,
                self.instance_id,
                [_copied(message) for message in messages],
                **_copied(self._kwargs),
            )
            return read_reply(found, name=self._entry.name, at_most_bytes=self._at_most_bytes)

    async def score(self) -> float:
        async with self._its_turn():
            found = await self._with_id_if_taken(self._started().calculate_score)
            return read_score(found, where=f"interaction {self._entry.name!r}: calculate_score")

    async def finalise(self, within_s: float) -> None:
        """What was begun is finalised, after the call that still runs, for which it waits so long; what
        is queued behind it, or comes later, is refused."""
        self._closed = True
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._turn.acquire()
        if self._interaction is not None:
            async with asyncio.timeout(within_s):
                await self._with_id_if_taken(self._interaction.finalize_interaction)

    @asynccontextmanager
    async def _its_turn(self) -> AsyncIterator[None]:
        # Before the wait too: who finalises never gives the turn back.
        self._refuse_when_closed()
        async with self._turn:
            self._refuse_when_closed()
            yield

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise InteractionFailed(f"interaction {self._entry.name!r} is finalised; it answers no more")

    def _started(self) -> BaseInteraction:
        if self._interaction is None or not self.started:
            raise InteractionFailed(f"interaction {self._entry.name!r} was not started")
        return self._interaction

    async def _with_id_if_taken(self, method: Callable[..., Any]) -> Any:
        # The published base class takes no id here, and the published subclasses do.
        try:
            inspect.signature(method).bind(self.instance_id)
        except TypeError:
            return await _answer_of(method)
        return await _answer_of(method, self.instance_id)


async def _answer_of(method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """What a class's method says; nothing that it raises may end the loop, or look like our own cancel."""
    try:
        answer = method(*arguments, **named)
        return await answer if inspect.isawaitable(answer) else answer
    except (SystemExit, KeyboardInterrupt) as exc:
        raise RuntimeError(f"{type(exc).__name__}({exc})") from exc
    except asyncio.CancelledError as exc:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RuntimeError("it cancelled itself") from exc


def _copied(value: Any) -> Any:
    """JSON-able data that a class may change as it likes."""
    if isinstance(value, dict):
        return {name: _copied(one) for name, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list | tuple) else value
