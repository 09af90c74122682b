"""One interaction in one episode: it starts, responds, scores, and is always finalised exactly once."""

import asyncio
import inspect
import json
import math
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import structlog

from shared_schemas.json_text import encodable_json
from shared_schemas.messages import Message
from shared_schemas.plain_text import encodable
from task_app.errors import EpisodeFailed, InteractionFailed, boundary
from task_app.plugins import InteractionEntry, PolicyContext
from task_app.protocols import BaseInteraction
from task_app.settings import Settings


@runtime_checkable
class ConnectedInteraction(Protocol):
    """An interaction that uses parts of the service: its HTTP client, its list of hosts."""

    def check(self, settings: Settings) -> None:
        """Refuse at the service's start a config that cannot work here, by raising a TaskAppError."""

    def connect(self, context: PolicyContext) -> None:
        """Called before the first call of an episode."""


@dataclass(frozen=True, slots=True)
class InteractionReply:
    """An answer of the user."""

    should_terminate: bool
    """The episode ends; `response` is not shown to the model."""
    response: str
    score: float | None
    """Reward of the answered decision; None if the interaction gives none."""
    metadata: dict[str, Any]
    """JSON-able, stored in the record."""


class Calls:
    """The calls to one interaction object, in their published form, one at a time.

    All of it runs on the interaction's loop, the object's construction too: any of it may block. The class
    may return another instance_id than this one.
    """

    def __init__(
        self,
        entry: InteractionEntry,
        instance_id: str,
        kwargs: Mapping[str, Any],
        *,
        context: PolicyContext,
        at_most_bytes: int,
    ) -> None:
        self._entry, self.instance_id, self._context = entry, instance_id, context
        self._kwargs = {**kwargs, "name": entry.name}
        self._at_most_bytes = at_most_bytes
        # A start that timed out may still run; the next call waits for its end.
        self._turn = asyncio.Lock()
        self._closed = self.is_started = False
        self._interaction: BaseInteraction | None = None

    async def start(self) -> None:
        async with self._its_turn():
            interaction = self._entry.build()
            if isinstance(interaction, ConnectedInteraction):
                interaction.connect(self._context)
            # The object may hold resources from here on, even if the call fails.
            self._interaction = interaction
            answer = await _wait(interaction.start_interaction(self.instance_id, **deepcopy(self._kwargs)))
            self.instance_id = read_instance_id(answer, self.instance_id, name=self._entry.name)
            self.is_started = True

    async def respond(self, messages: Sequence[dict[str, Any]]) -> InteractionReply:
        async with self._its_turn():
            # Copies: the class may change what it is given.
            copies, kwargs = deepcopy(list(messages)), deepcopy(self._kwargs)
            respond = self._require_started().generate_response
            answer = await _wait(respond(self.instance_id, copies, **kwargs))
            return read_reply(answer, name=self._entry.name, at_most_bytes=self._at_most_bytes)

    async def score(self) -> float:
        async with self._its_turn():
            answer = await self._call_with_id(self._require_started().calculate_score)
            return read_score(answer, where=f"interaction {self._entry.name!r}: calculate_score")

    async def finalise(self, within_s: float) -> None:
        """Finalise the object, if it was built.

        A call that still runs gets `within_s` seconds to end; queued and later calls are refused.
        """
        self._closed = True
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._turn.acquire()
        if self._interaction is not None:
            async with asyncio.timeout(within_s):
                await self._call_with_id(self._interaction.finalize_interaction)

    @asynccontextmanager
    async def _its_turn(self) -> AsyncIterator[None]:
        # Checked before the wait too: `finalise` never releases the lock.
        self._refuse_when_closed()
        async with self._turn:
            self._refuse_when_closed()
            yield

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise InteractionFailed(f"interaction {self._entry.name!r} is finalised; it takes no more calls")

    def _require_started(self) -> BaseInteraction:
        if self._interaction is None or not self.is_started:
            raise InteractionFailed(f"interaction {self._entry.name!r} was not started")
        return self._interaction

    async def _call_with_id(self, method: Callable[..., Any]) -> Any:
        # The published base class takes no id here; the published subclasses do.
        try:
            inspect.signature(method).bind(self.instance_id)
        except TypeError:
            return await _wait(method())
        return await _wait(method(self.instance_id))


async def _wait(answer: Any) -> Any:
    """The answer of a method, which may be async."""
    return await answer if inspect.isawaitable(answer) else answer


T = TypeVar("T")

log = structlog.get_logger("task_app")

DEADLINE = "interaction_deadline"


class LiveInteraction:
    """A running interaction, as the episode loop and the routes use it. The caller that starts it closes it.

    The calls run on the `loop`: the service's, or one from `loop_in_thread`, which stops at the end. `on_end`
    is called when the interaction is finalised, or given up because it `hangs`; in the second case once more
    if the call returns after all.
    """

    def __init__(
        self,
        name: str,
        calls: Calls,
        loop: asyncio.AbstractEventLoop,
        *,
        deadline_s: float,
        on_end: Callable[["LiveInteraction"], None],
    ) -> None:
        self.name, self._calls, self._loop = name, calls, loop
        self._deadline_s, self._on_end = deadline_s, on_end
        self._end_task: asyncio.Task[None] | None = None
        self.terminated = self.hangs = False

    async def start(self) -> None:
        """Build the object and begin the episode."""
        await self._call("start_interaction", self._calls.start())
        self._log("interaction_started")

    async def respond(self, messages: Sequence[Message]) -> InteractionReply:
        """The user's answer to the last assistant message of the conversation, with its score."""
        # In OpenAI's form; content is never None, because published classes fail on that.
        dicts = [
            {**message.model_dump(mode="json", exclude_none=True), "content": message.content or ""}
            for message in messages
        ]
        reply = await self._call("generate_response", self._calls.respond(dicts))
        self.terminated = reply.should_terminate
        self._log("interaction_answered", should_terminate=reply.should_terminate, chars=len(reply.response))
        if reply.score is not None:
            self._log("interaction_scored", score=reply.score)
        return reply

    async def score(self) -> float:
        """The score that calculate_score returns now."""
        score = await self._call("calculate_score", self._calls.score())
        self._log("interaction_scored", score=score)
        return score

    async def close(self) -> None:
        """Finalise the interaction; the first call runs to its end, even if its caller is cancelled.

        An error of the class is only logged here: the episode is over, and its data is right.
        """
        await asyncio.shield(self.begin_close())

    def begin_close(self) -> "asyncio.Task[None]":
        """Start `close` without waiting for it; the service waits when it stops."""
        if self._end_task is None:
            self._end_task = asyncio.get_running_loop().create_task(self._end())
        return self._end_task

    def _log(self, event: str, **facts: Any) -> None:
        """Log an event for tracing; log lines never contain the conversation."""
        log.debug(event, interaction=self.name, instance_id=self._calls.instance_id, **facts)

    def _submit(self, where: str, work: Coroutine[Any, Any, T]) -> "asyncio.Future[T]":
        """Start a call on the interaction's loop; cancelling the returned future cancels the call."""

        async def guarded() -> T:
            # Here and not where the result is awaited: a SystemExit would end the loop and its thread.
            with boundary(where):
                return await work

        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(guarded(), self._loop))

    def _stop_loop(self) -> None:
        if self._loop is not asyncio.get_running_loop():
            self._loop.call_soon_threadsafe(self._loop.stop)

    async def _call(self, what: str, work: Coroutine[Any, Any, T]) -> T:
        where = f"interaction {self.name!r}: {what}"
        try:
            async with asyncio.timeout(self._deadline_s):
                return await self._submit(where, work)
        except TimeoutError as exc:
            detail = f"{where} gave no answer within {self._deadline_s:g} s"
            raise InteractionFailed(detail, code=DEADLINE) from exc
        except EpisodeFailed as exc:
            # Any error here is an infrastructure failure, never the policy's: a simulated user's model may
            # be down or full.
            has_name = exc.detail.startswith(f"interaction {self.name!r}")
            raise InteractionFailed(exc.detail if has_name else f"{where}: {exc.detail}") from exc

    async def _end(self) -> None:
        where = f"interaction {self.name!r}: finalize_interaction"
        task = self._submit(where, self._calls.finalise(self._deadline_s))
        # Both waits in `finalise`, and a moment for the threads.
        await asyncio.wait({task}, timeout=2 * self._deadline_s + 1.0)
        self.hangs = not task.done()
        if self.hangs:
            # It blocks its thread. `finalise` is the next call there, should this one return.
            log.error("interaction_hangs", interaction=self.name, after_s=self._deadline_s)
            task.add_done_callback(self._end_late)
        else:
            task.exception()  # boundary() has logged it
            self._stop_loop()
            self._log("interaction_finalised")
        self._on_end(self)

    def _end_late(self, task: "asyncio.Future[None]") -> None:
        self.hangs = False
        task.exception()  # boundary() has logged it
        self._stop_loop()
        self._on_end(self)


def loop_in_thread(name: str) -> asyncio.AbstractEventLoop:
    """Start an event loop in its own daemon thread; the thread ends when the loop stops.

    One loop serves an interaction from start to finalise, because a client session, lock or task that a class
    creates in one call is bound to the loop of that call.
    """
    loop = asyncio.new_event_loop()

    def run() -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            loop.run_until_complete(_cancel_tasks(asyncio.all_tasks(loop)))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

    threading.Thread(target=run, name=name, daemon=True).start()
    return loop


async def _cancel_tasks(tasks: set[asyncio.Task[Any]]) -> None:
    """Cancel the tasks that a class left behind, and give them a moment to end."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=1.0)


# What an interaction class returned is checked, and converted for the episode.


def read_reply(value: Any, *, name: str, at_most_bytes: int) -> InteractionReply:
    """Check what generate_response returned; `at_most_bytes` bounds text and metadata together."""
    where = f"interaction {name!r}: generate_response"
    if not isinstance(value, tuple | list) or len(value) != 4:
        needed = "(should_terminate, response, score, metadata)"
        raise InteractionFailed(f"{where} returned {_describe(value)}; {needed} is needed")
    should_terminate, response, score, metadata = value
    reply = InteractionReply(
        should_terminate=_flag(should_terminate, where=where),
        response=_response(response, where=where, at_the_end=bool(should_terminate)),
        score=None if score is None else read_score(score, where=where),
        metadata=_metadata(metadata, where=where),
    )
    size = len(reply.response.encode()) + len(json.dumps(reply.metadata))
    if size > at_most_bytes:
        raise InteractionFailed(f"{where} returned {size} bytes; at most {at_most_bytes} are allowed")
    return reply


def read_score(value: Any, *, where: str) -> float:
    """A returned score as a float: classes return 0, True, or numbers of numpy and torch.

    NaN is refused, because it would reach the gradient.
    """
    try:
        score = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        score = math.nan
    if not math.isfinite(score):
        raise InteractionFailed(
            f"{where} returned {_describe(value)} as the score; a finite number is needed"
        )
    return score


def read_instance_id(value: Any, default: str, *, name: str) -> str:
    """The id that start_interaction returned; `default` if it returned None."""
    if value is None:
        return default
    if not isinstance(value, str) or not value:
        raise InteractionFailed(
            f"interaction {name!r}: start_interaction returned {_describe(value)}; an instance_id is needed"
        )
    return value


def _flag(value: Any, *, where: str) -> bool:
    """A returned flag, which may be numpy's; the text "False" is refused, because it would count as true."""
    scalar = value.item() if type(value).__module__ == "numpy" and hasattr(value, "item") else value
    if not isinstance(scalar, bool):
        raise InteractionFailed(f"{where} returned {_describe(value)} as should_terminate; a bool is needed")
    return scalar


def _response(value: Any, *, where: str, at_the_end: bool) -> str:
    if value is None and at_the_end:
        return ""
    if not isinstance(value, str):
        raise InteractionFailed(f"{where} returned {_describe(value)} as the response; text is needed")
    return encodable(value)


def _metadata(value: Any, *, where: str) -> dict[str, Any]:
    """Return JSON unchanged. Arrays become lists, and values that JSON cannot hold (an exception) text."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InteractionFailed(f"{where} returned {_describe(value)} as metadata; a dict is needed")
    try:
        plain = {str(key): part for key, part in value.items()}
        text = json.dumps(
            plain, default=lambda one: one.tolist() if hasattr(one, "tolist") else repr(one)[:1_000]
        )
    except (TypeError, ValueError, RecursionError) as exc:
        raise InteractionFailed(f"{where} returned metadata that is no JSON: {exc}") from exc
    reply: dict[str, Any] = encodable_json(json.loads(text, parse_constant=str))
    return reply


def _describe(value: Any) -> str:
    """Describe a value in an error: a scalar itself, or its type."""
    if value is None or isinstance(value, bool | int | float | str):
        return f"{value!r:.80}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
