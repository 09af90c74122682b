"""One interaction of one episode: start, respond, score, and finalised exactly once, on every path."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import structlog

from shared_schemas.messages import Message
from task_app.errors import EpisodeFailed, InteractionFailed, TaskAppError, boundary
from task_app.interactions.calls import Calls
from task_app.interactions.replies import InteractionReply

T = TypeVar("T")

log = structlog.get_logger("task_app")

DEADLINE = "interaction_deadline"


class LiveInteraction:
    """What the episode loop and the routes use. Whoever starts it closes it.

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
        """For who traces the flow; what was said stands in no line."""
        log.debug(event, interaction=self.name, instance_id=self._calls.instance_id, **facts)

    def _submit(self, work: Coroutine[Any, Any, T]) -> "asyncio.Future[T]":
        """Begin it on its loop; to cancel what is returned cancels it there."""
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
    """In OpenAI's form. Of calls alone the content is None there, which published classes break on."""
    return {**message.model_dump(mode="json", exclude_none=True), "content": message.content or ""}
