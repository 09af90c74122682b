"""Runs one interaction in one episode: start, responses, scores, and exactly one finalisation."""

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
    """An interaction that uses parts of the service, such as its HTTP client."""

    def check(self, settings: Settings) -> None:
        """Check the config when the service starts; raise TaskAppError if the interaction cannot run here."""

    def connect(self, context: PolicyContext) -> None:
        """Take parts of the service from `context`; an episode calls this method before all others."""


@dataclass(frozen=True, slots=True)
class InteractionReply:
    """The user's answer to the model."""

    should_terminate: bool
    """Whether the episode ends. If it ends, the model does not see `response`."""
    response: str
    score: float | None
    """Reward of the answered decision; None if the interaction gives none."""
    metadata: dict[str, Any]
    """JSON-able data that the step's record stores."""


class Calls:
    """Builds one interaction object and calls its published methods, one call at a time.

    All methods here run on the interaction's event loop, because every call may block, even the constructor.
    If `start_interaction` returns an id, this id replaces the given `instance_id`.
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
        # A call that timed out may still run; the next call waits for its end.
        self._turn = asyncio.Lock()
        self._closed = self.is_started = False
        self._interaction: BaseInteraction | None = None

    async def start(self) -> None:
        async with self._its_turn():
            interaction = self._entry.build()
            if isinstance(interaction, ConnectedInteraction):
                interaction.connect(self._context)
            # Set it before the call: even if the call fails, the object may hold resources.
            self._interaction = interaction
            answer = await _wait(interaction.start_interaction(self.instance_id, **deepcopy(self._kwargs)))
            self.instance_id = read_instance_id(answer, self.instance_id, name=self._entry.name)
            self.is_started = True

    async def respond(self, messages: Sequence[dict[str, Any]]) -> InteractionReply:
        async with self._its_turn():
            # Copies, because the class may change its arguments.
            copies, kwargs = deepcopy(list(messages)), deepcopy(self._kwargs)
            respond = self._require_started().generate_response
            answer = await _wait(respond(self.instance_id, copies, **kwargs))
            return read_reply(answer, name=self._entry.name, at_most_bytes=self._at_most_bytes)

    async def score(self) -> float:
        async with self._its_turn():
            answer = await self._call_with_id(self._require_started().calculate_score)
            return read_score(answer, where=f"interaction {self._entry.name!r}: calculate_score")

    async def finalise(self, within_s: float) -> None:
        """Wait at most `within_s` seconds for a running call, then finalise the object if it was built.

        Calls that still wait for their turn, and later calls, are refused.

        Raises:
            TimeoutError: finalize_interaction took longer than `within_s` seconds.
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
        # Also check before the wait, because `finalise` never releases the lock.
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
        # The published base class has no parameter for the id here; the published subclasses have it.
        try:
            inspect.signature(method).bind(self.instance_id)
        except TypeError:
            return await _wait(method())
        return await _wait(method(self.instance_id))


async def _wait(answer: Any) -> Any:
    return await answer if inspect.isawaitable(answer) else answer


T = TypeVar("T")

log = structlog.get_logger("task_app")

DEADLINE = "interaction_deadline"


class LiveInteraction:
    """Runs an interaction for the episode loop and the HTTP routes. The caller that starts it must close it.

    The calls run on `loop`: the service's own event loop, or a loop that `loop_in_thread` started and that
    stops when the interaction is finalised. `on_end` is called when the interaction is finalised. If a
    hanging call prevents this, `on_end` is called after a time limit, and again if the call returns later.
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
        """Build the interaction object and call its start_interaction."""
        await self._call("start_interaction", self._calls.start())
        self._log("interaction_started")

    async def respond(self, messages: Sequence[Message]) -> InteractionReply:
        """Return the user's answer to the last assistant message of the conversation, with its score."""
        # In OpenAI's form, but content is never None, because published classes fail on None.
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
        score = await self._call("calculate_score", self._calls.score())
        self._log("interaction_scored", score=score)
        return score

    async def close(self) -> None:
        """Finalise the interaction, even if the caller is cancelled.

        An error of the interaction's class is logged and not raised, because the episode is complete.
        """
        await asyncio.shield(self.begin_close())

    def begin_close(self) -> "asyncio.Task[None]":
        """Start to finalise the interaction, and return the task. Later calls return the same task."""
        if self._end_task is None:
            self._end_task = asyncio.get_running_loop().create_task(self._end())
        return self._end_task

    def _log(self, event: str, **facts: Any) -> None:
        """Log an event at level debug. Log lines never contain the conversation."""
        log.debug(event, interaction=self.name, instance_id=self._calls.instance_id, **facts)

    def _submit(self, where: str, work: Coroutine[Any, Any, T]) -> "asyncio.Future[T]":
        """Start a call on the interaction's loop; cancelling the returned future cancels the call."""

        async def guarded() -> T:
            # `boundary` is inside the coroutine, because a SystemExit would end the loop and its thread.
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
            # Any error counts as a failure of the infrastructure, for example of the simulated user's server.
            has_name = exc.detail.startswith(f"interaction {self.name!r}")
            raise InteractionFailed(exc.detail if has_name else f"{where}: {exc.detail}") from exc

    async def _end(self) -> None:
        where = f"interaction {self.name!r}: finalize_interaction"
        task = self._submit(where, self._calls.finalise(self._deadline_s))

        def end_late(task: "asyncio.Future[None]") -> None:
            self.hangs = False
            task.exception()  # boundary() has logged it
            self._stop_loop()
            self._on_end(self)

        # Long enough for both waits in `finalise`, and a second for the threads.
        await asyncio.wait({task}, timeout=2 * self._deadline_s + 1.0)
        self.hangs = not task.done()
        if self.hangs:
            # A call blocks its thread. If this call returns later, `finalise` runs after it.
            log.error("interaction_hangs", interaction=self.name, after_s=self._deadline_s)
            task.add_done_callback(end_late)
        else:
            task.exception()  # boundary() has logged it
            self._stop_loop()
            self._log("interaction_finalised")
        self._on_end(self)


def loop_in_thread(name: str) -> asyncio.AbstractEventLoop:
    """Start an event loop in its own daemon thread; the thread ends when the loop stops.

    All calls of an interaction must use the same loop: the interaction may have created a client session, a
    lock or a task, which works only on the loop that created it.
    """
    loop = asyncio.new_event_loop()

    async def cancel_tasks() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)

    def run() -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            loop.run_until_complete(cancel_tasks())
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

    threading.Thread(target=run, name=name, daemon=True).start()
    return loop


def read_reply(value: Any, *, name: str, at_most_bytes: int) -> InteractionReply:
    """Convert the return value of generate_response.

    Raises:
        InteractionFailed: the value is invalid, or text and metadata together exceed `at_most_bytes`.
    """
    where = f"interaction {name!r}: generate_response"
    if not isinstance(value, tuple | list) or len(value) != 4:
        needed = "(should_terminate, response, score, metadata)"
        raise InteractionFailed(f"{where} returned {_describe(value)}; {needed} is needed")
    should_terminate, response, score, metadata = value
    reply = InteractionReply(
        should_terminate=_read_flag(should_terminate, where=where),
        response=_read_response(response, where=where, at_the_end=bool(should_terminate)),
        score=None if score is None else read_score(score, where=where),
        metadata=_read_metadata(metadata, where=where),
    )
    size = len(reply.response.encode()) + len(json.dumps(reply.metadata))
    if size > at_most_bytes:
        raise InteractionFailed(f"{where} returned {size} bytes; at most {at_most_bytes} are allowed")
    return reply


def read_score(value: Any, *, where: str) -> float:
    """Convert a score that a class returned to a float. Scalars of Python, numpy and torch are allowed.

    Raises:
        InteractionFailed: the score is no number, or it is NaN or infinite (it would reach the gradient).
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
    """Check and return the id that start_interaction returned; return `default` if it returned None."""
    if value is None:
        return default
    if not isinstance(value, str) or not value:
        raise InteractionFailed(
            f"interaction {name!r}: start_interaction returned {_describe(value)}; an instance_id is needed"
        )
    return value


def _read_flag(value: Any, *, where: str) -> bool:
    """Convert a bool of Python or numpy to a bool; refuse any other value, such as the text "False"."""
    scalar = value.item() if type(value).__module__ == "numpy" and hasattr(value, "item") else value
    if not isinstance(scalar, bool):
        raise InteractionFailed(f"{where} returned {_describe(value)} as should_terminate; a bool is needed")
    return scalar


def _read_response(value: Any, *, where: str, at_the_end: bool) -> str:
    if value is None and at_the_end:
        return ""
    if not isinstance(value, str):
        raise InteractionFailed(f"{where} returned {_describe(value)} as the response; text is needed")
    return encodable(value)


def _read_metadata(value: Any, *, where: str) -> dict[str, Any]:
    """Convert metadata to JSON-able values: arrays become lists, values without a JSON form become text."""
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
    """Describe a value for an error message: a scalar by its value, anything else by its type."""
    if value is None or isinstance(value, bool | int | float | str):
        return f"{value!r:.80}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
