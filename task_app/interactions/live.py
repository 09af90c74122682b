"""One interaction of one episode: start, respond, score, and finalised exactly once, on every path."""

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import structlog

from shared_schemas.messages import Message
from task_app.errors import EpisodeFailed, InteractionFailed, TaskAppError, boundary
from task_app.interactions.replies import InteractionReply, read_instance_id, read_reply, read_score
from task_app.plugins import InteractionEntry
from task_app.protocols import BaseInteraction

# The calls of one interaction object, as they run on its loop: one at a time, in the published form.


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


T = TypeVar("T")

log = structlog.get_logger("task_app")

DEADLINE = "interaction_deadline"


class LiveInteraction:
    """A running interaction, as the episode loop and the routes use it. The caller that starts it closes it.

    Args:
        name: of its entry.
        calls: of its object.
        loop: where they run: the service's, or `loop_in_thread`, which is stopped at the end.
        deadline_s: for each call.
        on_end: told when it is finalised, or given up because it `hangs`; then again, should that end.
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
        self.name = name
        self._calls = calls
        self._loop = loop
        self._deadline_s = deadline_s
        self._on_end = on_end
        self._ending: asyncio.Task[None] | None = None
        self.terminated = False
        self.hangs = False

    async def start(self) -> None:
        """Build the object and begin the episode.

        Raises:
            InteractionFailed: it raised, returned no id, or was not ready in time.
        """
        await self._call("start_interaction", self._calls.start())
        self._log("interaction_started")

    async def respond(self, messages: Sequence[Message]) -> InteractionReply:
        """The user's answer to the last assistant message, with its score.

        Args:
            messages: the conversation so far.

        Raises:
            InteractionFailed: it raised, took too long, or returned what is no answer.
        """
        told = [_published(message) for message in messages]
        reply = await self._call("generate_response", self._calls.respond(told))
        self.terminated = reply.should_terminate
        self._log("interaction_answered", should_terminate=reply.should_terminate, chars=len(reply.response))
        if reply.score is not None:
            self._log("interaction_scored", score=reply.score)
        return reply

    async def score(self) -> float:
        """What calculate_score says now; errors as in `respond`."""
        score = await self._call("calculate_score", self._calls.score())
        self._log("interaction_scored", score=score)
        return score

    async def close(self) -> None:
        """Finalise. A second call, or one that is cancelled, changes nothing: it goes on to its end.

        What the class does wrong here is logged; the episode is over, and its data is right.
        """
        await asyncio.shield(self.begin_close())

    def begin_close(self) -> "asyncio.Task[None]":
        """`close` for who cannot wait for it; the service does, when it stops."""
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._end())
        return self._ending

    def _log(self, event: str, **facts: Any) -> None:
        """Log an event for tracing; log lines never contain the conversation."""
        log.debug(event, interaction=self.name, instance_id=self._calls.instance_id, **facts)

    def _submit(self, work: Coroutine[Any, Any, T]) -> "asyncio.Future[T]":
        """Start a call on the interaction's loop; a cancel of the returned future cancels the call there."""
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def _stop_loop(self) -> None:
        if self._loop is not asyncio.get_running_loop():
            self._loop.call_soon_threadsafe(self._loop.stop)

    async def _call(self, what: str, work: Coroutine[Any, Any, T]) -> T:
        where = f"interaction {self.name!r}: {what}"
        try:
            async with asyncio.timeout(self._deadline_s):
                with boundary(where):
                    return await self._submit(work)
        except TimeoutError as exc:
            told = f"{where} gave no answer within {self._deadline_s:g} s"
            raise InteractionFailed(told, code=DEADLINE) from exc
        except EpisodeFailed as exc:
            # Whatever it is: a user simulator's model that is away, or full, is not the policy's.
            named = exc.detail.startswith(f"interaction {self.name!r}")
            raise InteractionFailed(exc.detail if named else f"{where}: {exc.detail}") from exc

    async def _end(self) -> None:
        ending = self._submit(self._calls.finalise(self._deadline_s))
        # Both waits in `finalise`, and a moment for the threads.
        await asyncio.wait({ending}, timeout=2 * self._deadline_s + 1.0)
        self.hangs = not ending.done()
        if self.hangs:
            # It blocks its thread. Finalising is next there, should the call ever end.
            log.error("interaction_hangs", interaction=self.name, after_s=self._deadline_s)
            ending.add_done_callback(self._ended_late)
        else:
            self._tell_failure(ending)
            self._stop_loop()
            self._log("interaction_finalised")
        self._on_end(self)

    def _ended_late(self, ending: "asyncio.Future[None]") -> None:
        self.hangs = False
        self._tell_failure(ending)
        self._stop_loop()
        self._on_end(self)

    def _tell_failure(self, ending: "asyncio.Future[None]") -> None:
        """A class that failed to start knows no such instance, and says so: no news."""
        if not self._calls.started:
            ending.exception()
            return
        try:
            with boundary(f"interaction {self.name!r}: finalize_interaction"):
                ending.result()
        except TaskAppError:
            pass  # in the log by now, with its traceback


def loop_in_thread(name: str) -> asyncio.AbstractEventLoop:
    """An event loop in a daemon thread of its own, which ends when the loop is stopped, or with the process.

    One loop serves an interaction from start to finalise: what a class opens in one call (a client session, a
    lock, a task) is bound to the loop that it was opened on.
    """
    loop = asyncio.new_event_loop()

    def run() -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            loop.run_until_complete(_end_of(asyncio.all_tasks(loop)))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

    threading.Thread(target=run, name=name, daemon=True).start()
    return loop


async def _end_of(tasks: set[asyncio.Task[Any]]) -> None:
    """What a class left running: told to end, and given a moment."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=1.0)


def _published(message: Message) -> dict[str, Any]:
    """Return messages in OpenAI's form, but never with content None: published classes fail on that."""
    return {**message.model_dump(mode="json", exclude_none=True), "content": message.content or ""}
