"""HTTP client of one task app. It also records whether the app answers, and which rollouts the app runs.

Every call has a deadline; retries are limited in number and time.
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import Any, Literal, Self
from urllib.parse import urlsplit

import aiohttp
import stamina
from aiohttp.payload import BytesIOPayload
from pydantic import AliasChoices, Field, SecretStr
from stamina.instrumentation import set_on_retry_hooks

from service_kit.replies import (
    Model,
    ReplyFault,
    ReplyInvalid,
    plain_session,
    read_bounded,
    read_reply,
    redirect_target,
    show_found,
)
from shared_schemas.base import Count, StrictReply
from shared_schemas.replay import ReplayFrame, ReplayReply, ReplayRequest
from shared_schemas.rollouts import (
    Id,
    InstanceId,
    RolloutAck,
    RolloutAcked,
    RolloutPage,
    RolloutRequest,
    RolloutsAccepted,
)
from trainer_backend.collect.arrival import read_page
from trainer_backend.collect.wire import (
    DEFAULT_BODY_BYTES,
    TaskAppLost,
    is_final,
    json_in,
    refusal,
    slices,
    word_answer,
)
from trainer_backend.errors import TaskAppError

# stamina's default hooks report every retry; `TaskApps` reports once that a task app is lost.
set_on_retry_hooks(())

# Attempts of one request. Few, because another task app can run the rollout, and a lost app is asked again
# until it answers.
_ATTEMPTS = 4
_POLL_S = 20.0
# First and longest interval between attempts to reach a lost task app.
_FIRST_LOOK_S, _MOST_LOOK_S = 0.25, 5.0
_ACK_AT_ONCE = 1024
# Concurrent cancellations. They are fewer than the connections of a client, so that requests and polls find a
# free connection.
_CANCELS_AT_ONCE = 8
# The assumed number of concurrent rollouts of a task app that has not reported its limit.
_MANY = 1_000_000
_LEAST_WEIGHT = 1 / 64
_LATER = (429, 502, 503, 504)
# Limit of a reply's bytes on routes that are not in _LONG.
_MOST_SHORT_BYTES = 16 << 20
# A reply on a route in _LONG may have 1.5 times the task app's TURNWISE_MAX_PAGE_BYTES, because a page may
# exceed that setting by one rollout. The limit is never below 48 MiB. It is at most 1 GiB, which is the
# default of TURNWISE_MAX_HELD_BYTES.
_MOST_REPLY_BYTES, _MOST_PAGE_BYTES = 48 << 20, 1 << 30
_LONG = ("/rollouts", "/replay")

State = Literal["starting", "serving", "lost", "gone"]
# Called with an app whose state or fault has changed.
Show = Callable[["TaskAppClient", State], None]


def show_nothing(app: "TaskAppClient", state: State) -> None:
    """Ignore a change of state. This is the default of `TaskAppClient.show`."""


class _Unreachable(Exception):
    """The task app did not answer, or asked to try again later; the request may be repeated."""


class _Limits(StrictReply):
    max_concurrent_rollouts: Count = Field(ge=1)
    max_body_bytes: Count = Field(default=DEFAULT_BODY_BYTES, ge=1)
    max_frames: Count = Field(default=2, ge=2)
    max_page_bytes: Count = Field(default=1, ge=1)


class _Service(StrictReply):
    instance_id: InstanceId


class _Capabilities(StrictReply):
    reward_functions: dict[str, str] = Field(default_factory=dict)
    interactions: tuple[str, ...] = ()
    number_interactions: tuple[str, ...] = ()


class About(StrictReply):
    """The part of the reply to GET /info that a trainer uses."""

    service: _Service
    """`instance_id` identifies the process of the task app, and changes when the app restarts."""
    limits: _Limits
    """The maximum of concurrent rollouts, of a request's bytes, of the frames that one replay request can
    draw, and of the bytes of a page of results."""
    capabilities: _Capabilities = _Capabilities()
    """The plug-ins that a rollout can name: `reward_functions` with their modes, and `interactions`.
    `number_interactions` are those interactions whose ground truth must be a number."""


class InstanceInfo(StrictReply):
    """A task app's description of an environment."""

    conversation: bool = False
    """Whether the task app stores the messages of an episode as a conversation."""
    takes_answers: bool = True
    """Whether the environment accepts a text without a tool call as an action."""
    restorable: bool | None = None
    """Whether the environment supports snapshots; None: the task app is too old to report this."""
    reseedable: bool = False
    """Whether the environment can continue from a snapshot with a new random seed."""
    rewards_calls: bool = False
    """Whether the environment is an agent (an external program), whose model calls may get rewards."""
    state_keys: tuple[str, ...] = ()


class _FirstObservation(StrictReply):
    achievements_counts: dict[str, Count] = Field(default_factory=dict)


class Instance(StrictReply):
    """The reply to `TaskAppClient.create`: the id and description of a new environment or policy."""

    id: Id = Field(validation_alias=AliasChoices("env_id", "policy_id"))
    observation: _FirstObservation = _FirstObservation()
    """The first observation of an environment. `achievements_counts` says how often each achievement was
    reached; it is empty if the environment has no achievements."""
    info: InstanceInfo = InstanceInfo()


class _Done(StrictReply):
    """A reply whose content is ignored."""


@contextmanager
def _as_task_app_error() -> Iterator[None]:
    try:
        yield
    except ReplyInvalid as error:
        raise TaskAppError(
            str(error),
            hint="Another service may listen at this address, or a task app of another version.",
        ) from error


class TaskAppClient:
    """Client of one task app. Used as an async context manager.

    Args:
        timeout_s: deadline of one request. The deadline of a long poll is its waiting time plus `timeout_s`.
        name: the host name that was resolved to this address (`addresses.Address.name`), or empty.
        label: name of the app in metrics; empty: its host and port.
        fault: why the app cannot run rollouts yet; None: it can run them.
        most_reply_bytes: limit of a reply's bytes. Pages of results may be longer, if the app's own limit is
            higher.
    """

    def __init__(
        self, url: str, api_key: SecretStr, *, timeout_s: float, name: str = "", label: str = "",
        fault: str | None = None, most_reply_bytes: int = _MOST_REPLY_BYTES,
    ) -> None:  # fmt: skip
        self.url, self.api_key, self.name = url.rstrip("/"), api_key, name
        self.label = label or urlsplit(self.url).netloc
        self._timeout_s, self._most_reply_bytes = timeout_s, most_reply_bytes
        self._limits = _Limits(max_concurrent_rollouts=1)
        self._session: aiohttp.ClientSession | None = None
        self._fault, self._has_answered = fault, fault is None
        self.show: Show = show_nothing  # called when `fault` has changed
        self.retired = False  # whether DNS no longer returns its address; it is dropped when a request fails
        self.instance_id = ""  # identifies the process that answered the last `about`
        self.at_most = _MANY  # maximum of concurrent rollouts
        self.weight = 1.0  # its share of the unfinished rollouts, relative to the weights of the other apps
        self.begin_run("", asyncio.Event())

    def begin_run(self, run_id: str, change: asyncio.Event) -> None:
        """Forget all rollouts and results of the previous run, and begin a new run.

        Args:
            change: an event that the client sets whenever the app starts or stops answering.
        """
        self._run_id, self._change = run_id, change
        self.answers = self.fault is None
        # `requests` contains all unfinished rollouts of this app. Each is either in `unsent`, or in
        # `accepted` with the instance_id of the process that accepted it ("" until the app has answered).
        self.requests: dict[str, RolloutRequest] = {}
        self.unsent: dict[str, RolloutRequest] = {}
        self.accepted: dict[str, str] = {}
        # Ids of the rollouts that were requested since the last poll began, and the instance_ids of all
        # processes that accepted rollouts.
        self._fresh: set[str] = set()
        self._instances: set[str] = set()
        # Ids of rollouts that the app may still run or store, although another app runs them now or no batch
        # needs them.
        self.stale: set[str] = set()
        self.discard: list[str] = []  # ids of results that the app may delete at once
        self.unacked: list[str] = []  # ids of results that the app keeps until they are stored
        self.wake = asyncio.Event()  # set when there is something to send
        self._sending = asyncio.Lock()
        self.cursor: str | None = None
        self._last_instance = self.instance_id  # instance_id of the process that accepted the last request
        self.strikes = 0  # how many times in a row the app was found to have lost accepted rollouts
        self._look_s = 0.0

    @property
    def fault(self) -> str | None:
        """The error that made the app unavailable; None: the app can run rollouts."""
        return self._fault

    @fault.setter
    def fault(self, fault: str | None) -> None:
        self._fault = fault
        self._has_answered |= fault is None
        self.show(self, self.state)

    @property
    def state(self) -> State:
        if self._fault is None:
            return "serving"
        return "lost" if self._has_answered else "starting"

    @property
    def is_open(self) -> bool:
        return self._fault is None and not self.retired

    @property
    def has_room(self) -> bool:
        return self.is_open and len(self.requests) < self.at_most

    def judge(self, *, finished: bool) -> None:
        """Update `weight` after a rollout of this app has ended. Call it only if all other apps had work too.

        Each finished rollout adds 1, so that faster apps get a larger weight. Each failure halves the weight,
        because an app that fails every rollout immediately would otherwise be given all rollouts.
        """
        self.weight = self.weight + 1 if finished else max(self.weight / 2, _LEAST_WEIGHT)

    def take(self, request: RolloutRequest) -> None:
        self.requests[request.rollout_id] = self.unsent[request.rollout_id] = request
        self.wake.set()

    def take_back(self, rollout_id: str) -> bool:
        """Remove a rollout from this client, and return whether the app may have received the request."""
        del self.requests[rollout_id]
        self.unsent.pop(rollout_id, None)
        return self.accepted.pop(rollout_id, None) is not None

    def stop(self, rollout_id: str) -> None:
        """Remove a rollout that is not needed any more.

        If the app may be running it, the next call of `_send` cancels it there.
        """
        if self.take_back(rollout_id):
            self.stale.add(rollout_id)
            self.wake.set()

    def discard_results(self) -> None:
        """Move all results in `unacked` to `discard`; the next call of `_send` lets the app delete them.

        The finished rollouts must be stored on disk before this call.
        """
        self.discard += self.unacked
        self.unacked = []
        self.wake.set()

    async def keep_sending(self) -> None:
        while True:
            await self.wake.wait()
            await self._send()

    async def next_page(self) -> RolloutPage:
        """Wait until this app has been given rollouts, request them, and return the next page of results.

        Raises the same errors as `poll`.
        """
        await self._send()  # before the poll, so that the app is not idle; `keep_sending` may send more later
        while self.unsent or not self.requests:
            if not self.requests:
                await self.wake.wait()
            await self._send()
        self._fresh.clear()
        page = await self.poll_run(wait_s=_POLL_S)
        self.note_answer()
        return page

    async def poll_run(self, *, wait_s: float) -> RolloutPage:
        page = await self.poll(self._run_id, self.cursor, wait_s=wait_s)
        self.cursor = page.cursor
        return page

    def find_missing(self) -> list[str]:
        """Return the ids of rollouts that were requested before the last poll and have no result yet."""
        return [name for name in self.accepted if name not in self._fresh]

    def find_restarted(self, instance_id: str) -> list[str]:
        """Return those ids from `find_missing` that a process other than `instance_id` accepted."""
        if self._instances <= {instance_id}:
            return []  # the usual case, which must stay fast with many unfinished rollouts
        restarted = [name for name in self.find_missing() if self.accepted[name] != instance_id]
        self._instances = set(self.accepted.values())
        return restarted

    def note_answer(self, *, answers: bool = True) -> None:
        if answers:
            self._look_s = 0.0
        if self.answers != answers:
            self.answers = answers
            self._change.set()

    async def look(self) -> bool:
        """Ask a lost app for GET /info at growing intervals, and return True once it answers.

        Return False if DNS no longer returns this address. If a restarted process answers, the cursor and
        `stale` are cleared, because the new process has no rollouts of this run.
        """
        while True:
            await asyncio.sleep(self._look_s)
            self._look_s = min(max(2 * self._look_s, _FIRST_LOOK_S), _MOST_LOOK_S)
            if self.retired:
                return False
            try:
                await self.about(attempts=1)
                break
            except TaskAppError as error:  # a refusal too, because another service may have this address now
                self.fault = str(error)
        if not self.is_same_process:
            self.cursor = None
            self.stale.clear()
        return True

    @property
    def is_same_process(self) -> bool:
        """Whether the process that answered `about` is the one that accepted the last request."""
        return self.instance_id == self._last_instance

    async def let_go(self) -> None:
        """Cancel the rollouts in `stale` at the app, and let the app delete the results in `discard`."""
        names = sorted(self.stale)
        for first in range(0, len(names), _CANCELS_AT_ONCE):
            async with asyncio.TaskGroup() as group:
                for name in names[first : first + _CANCELS_AT_ONCE]:
                    group.create_task(self._cancel(name))
        results, self.discard = self.discard, []
        try:
            await self.ack(self._run_id, [*names, *results])
        except BaseException:
            self.discard += results  # the app may not have deleted them
            raise
        self.stale.difference_update(names)

    async def _send(self) -> None:
        """Send all pending cancellations, acknowledgements and rollout requests."""
        async with self._sending:
            self.wake.clear()
            await self.let_go()
            # If the app may still store an earlier result under the same id, the request waits for the next
            # call. By then the app has deleted that result.
            held = self.stale.union(self.discard)
            batch = {name: request for name, request in self.unsent.items() if name not in held}
            self.unsent = {name: request for name, request in self.unsent.items() if name in held}
            if batch:
                await self._submit(batch)

    async def _submit(self, batch: Mapping[str, RolloutRequest]) -> None:
        # Recorded before the call, because the app may accept requests even if the call fails or is
        # cancelled.
        self.accepted |= dict.fromkeys(batch, "")
        self._fresh |= batch.keys()
        self._last_instance = await self.submit([*batch.values()])
        self.note_answer()
        self._instances.add(self._last_instance)
        for name in batch.keys() & self.accepted.keys():
            self.accepted[name] = self._last_instance

    async def _cancel(self, name: str) -> None:
        try:
            await self.cancel(name)
        except TaskAppError as error:  # any error except TaskAppLost means that the rollout is unknown there
            if isinstance(error, TaskAppLost):
                raise

    async def __aenter__(self) -> Self:
        self._session = plain_session(
            headers={"X-API-Key": self.api_key.get_secret_value()}
            | ({"Host": self.name} if self.name else {}),
            connector=aiohttp.TCPConnector(limit=16),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def about(self, *, attempts: int = _ATTEMPTS) -> About:
        """Fetch GET /info, and store the app's limits and instance_id.

        If the call succeeds, the app is running and accepts the API key.
        """
        about = await self._answer(About, "GET", "/info", attempts=attempts)
        self._limits, self.instance_id = about.limits, about.service.instance_id
        self.at_most = about.limits.max_concurrent_rollouts
        return about

    def refuse_too_large(self, request: RolloutRequest) -> None:
        """Raise JobError if a request exceeds the size limit that the app reported in the last `about`."""
        for _ in slices([request], max_body_bytes=self._limits.max_body_bytes, url=self.url):
            pass

    async def submit(self, requests: Sequence[RolloutRequest]) -> str:
        """Request rollouts with one or several POST calls. Sending the same requests twice is harmless.

        Returns:
            The instance_id of the process that accepted the last of these calls.
        """
        instance_id = ""
        for part in slices(requests, max_body_bytes=self._limits.max_body_bytes, url=self.url):
            accepted = await self._answer(RolloutsAccepted, "POST", "/rollouts", body={"rollouts": part})
            instance_id = accepted.instance_id
        return instance_id

    async def poll(self, run_id: str, cursor: str | None, *, wait_s: float) -> RolloutPage:
        """Return all rollouts that ended since `cursor`. If there are none, wait at most `wait_s` for one.

        An invalid rollout is returned as a failed rollout (`read_page`).

        Raises:
            CursorExpired: the process that issued the cursor has ended; poll again without a cursor.
            TaskAppLost: the app does not answer in time.
            TaskAppError: any other error.
        """
        params = {"run_id": run_id, "wait_s": str(wait_s)} | ({"cursor": cursor} if cursor else {})
        content = await self._call("GET", "/rollouts", params=params, extra_s=wait_s)
        with _as_task_app_error():
            return read_page(content, f"{self.url}: GET /rollouts")

    async def ack(self, run_id: str, rollout_ids: Sequence[str]) -> None:
        """Let the task app delete the results of these rollouts. Unknown ids are ignored."""
        for first in range(0, len(rollout_ids), _ACK_AT_ONCE):
            ack = RolloutAck(run_id=run_id, rollout_ids=tuple(rollout_ids[first : first + _ACK_AT_ONCE]))
            await self._answer(RolloutAcked, "POST", "/rollouts/ack", body=ack.model_dump(mode="json"))

    async def cancel(self, rollout_id: str) -> None:
        await self._answer(_Done, "DELETE", f"/rollouts/{rollout_id}")

    async def abort(self, run_id: str) -> None:
        """Let the app end all unfinished rollouts of a run and refuse new ones. Ignores an unknown run."""
        await self._answer(_Done, "POST", "/run/abort", body={"run_id": run_id})

    async def create(self, kind: Literal["env", "policy"], body: Mapping[str, Any]) -> Instance:
        """Create an environment or a policy outside any rollout; it exists until `terminate` is called.

        Raises:
            Refused: the task app does not provide this environment or policy, or refuses the config.
            TaskAppError: any other error.
        """
        return await self._answer(Instance, "POST", f"/{kind}/create", body=body)

    async def step_idly(self, env_id: str) -> None:
        """Take a decision without tool calls in an environment from `create`. Most environments run a no-op.

        Raises:
            PluginFailed, BackendFailed: the environment failed.
            TaskAppError: any other error, for example because a decision without tool calls is impossible.
        """
        await self._answer(_Done, "POST", "/env/step", body={"env_id": env_id, "tool_calls": []})

    async def snapshot(self, env_id: str) -> None:
        """Let the task app take a snapshot of an environment from `create`; the snapshot is not used.

        Raises:
            Refused: the environment does not support snapshots.
            TaskAppError: any other error.
        """
        await self._answer(_Done, "POST", "/env/snapshot", body={"env_id": env_id})

    async def replay(self, record: ReplayRequest) -> list[ReplayFrame]:
        """Replay an episode, and return its pictures at the turns in `record.frames`.

        Several requests are sent if `record.frames` has more turns than the app's `max_frames`.

        Raises:
            NoPictures: the environment draws no pictures, or the replay differs from the record.
            TaskAppError: any other error.
        """
        body, turns = record.model_dump(mode="json", exclude_defaults=True), sorted({*record.frames})
        frames: list[ReplayFrame] = []
        for first in range(0, len(turns), self._limits.max_frames):
            body["frames"] = turns[first : first + self._limits.max_frames]
            reply = await self._replay(body, "frames")
            frames += reply.frames
        return frames

    async def snapshots(self, record: ReplayRequest) -> dict[int, str]:
        """Replay an episode, and return its snapshots after the turns in `record.snapshots`, keyed by turn.

        Raises:
            ReplayDeparts: the replay differs from the record; the environment may have another version.
            Refused: the environment does not support snapshots.
            TaskAppError: any other error.
        """
        reply = await self._replay(record.model_dump(mode="json", exclude_defaults=True), "snapshots")
        return {item.turn: item.snapshot for item in reply.snapshots}

    async def _replay(self, body: Mapping[str, Any], name: Literal["frames", "snapshots"]) -> ReplayReply:
        """Send POST /replay without retries, and check that the reply has exactly the requested turns."""
        reply = await self._answer(ReplayReply, "POST", "/replay", body=body, attempts=1)
        turns = sorted(item.turn for item in getattr(reply, name))
        if turns != sorted({*body[name]}):
            raise TaskAppError(
                f"{self.url}: POST /replay: {name} are of the turns {show_found(turns)}; those of "
                f"{show_found(body[name])} are needed"
            )
        return reply

    async def terminate(self, kind: Literal["env", "policy"], created_id: str) -> None:
        await self._answer(_Done, "POST", f"/{kind}/terminate", body={f"{kind}_id": created_id})

    async def _answer(self, model: type[Model], method: str, path: str, **options: Any) -> Model:
        answer = await self._call(method, path, **options)
        with _as_task_app_error():
            return read_reply(model, answer, f"{self.url}: {method} {path}")

    async def _call(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        params: dict[str, str] | None = None,
        extra_s: float = 0.0,
        attempts: int = _ATTEMPTS,
    ) -> bytes:
        try:
            async for attempt in stamina.retry_context(
                on=_Unreachable, attempts=attempts, timeout=self._timeout_s, wait_max=2.0
            ):
                with attempt:
                    return await self._once(method, path, body, params, self._timeout_s + extra_s)
        except _Unreachable as error:
            raise TaskAppLost(f"{self.url}: {method} {path}: {error}") from error
        raise AssertionError("retry_context returns or raises")

    async def _once(
        self, method: str, path: str, body: Any, params: dict[str, str] | None, timeout_s: float
    ) -> bytes:
        assert self._session is not None, "use TaskAppClient as an async context manager"
        timeout = aiohttp.ClientTimeout(total=timeout_s, connect=10.0)
        data = None
        if body is not None:  # sent in chunks: a large body as one string would block the event loop
            content = BytesIO(json.dumps(body).encode("ascii"))
            data = BytesIOPayload(content, content_type="application/json")
        try:
            async with self._session.request(
                method, self.url + path, data=data, params=params, timeout=timeout,
                server_hostname=self._certificate_host, allow_redirects=False,
            ) as reply:  # fmt: skip
                status, location = reply.status, reply.headers.get("Location")
                answer = await read_bounded(reply.content.iter_any(), self._most_bytes(path))
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
            raise _Unreachable(str(error) or type(error).__name__) from error
        except aiohttp.ClientError as error:
            raise TaskAppError(f"{self.url}: {method} {path}: {error}") from error
        except ReplyFault as error:
            raise TaskAppError(
                f"{self.url}: {method} {path}: {error}",
                hint="TURNWISE_MAX_PAGE_BYTES of the task app sets how long its pages are, and may be here.",
            ) from error
        if target := redirect_target(status, location, self.url + path):
            raise TaskAppError(
                f"{self.url}: {method} {path}: status {status} redirects to {target}, "
                "and the key is sent to no other address",
                hint="services.task_url must name the final address.",
            )
        if status < 400:
            return answer
        # The status is checked before the body is parsed, because a proxy may answer with HTML while the task
        # app starts.
        text = answer.decode(errors="replace")
        problem = json_in(text)
        if status in _LATER and not is_final(status, problem):
            raise _Unreachable(f"status {status}: {word_answer(problem, text)}")
        sentence = f"{self.url}: {method} {path}: status {status}: {word_answer(problem, text)}"
        raise refusal(status, problem, sentence)

    def _most_bytes(self, path: str) -> int:
        if path not in _LONG:
            return min(_MOST_SHORT_BYTES, self._most_reply_bytes)
        return max(self._most_reply_bytes, min(3 * self._limits.max_page_bytes // 2, _MOST_PAGE_BYTES))

    @property
    def _certificate_host(self) -> str | None:
        """The host name in the TLS certificate; None if the URL contains it or is not HTTPS."""
        return self.name.rpartition(":")[0] if self.name and self.url.startswith("https:") else None
