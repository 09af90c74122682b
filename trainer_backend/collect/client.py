"""The client of one task app: its routes, whether it answers, and the rollouts that it has.

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

# A hook would print a line for each try; `TaskApps` tells once that a task app is lost.
set_on_retry_hooks(())

# Few attempts, because another task app can play the rollout, and lost apps are tried again later.
_ATTEMPTS = 4
_POLL_S = 20.0
# Interval of attempts to reach a lost task app.
_FIRST_LOOK_S, _MOST_LOOK_S = 0.25, 5.0
_ACK_AT_ONCE = 1024
# Concurrent cancellations: fewer than a client's connections, so that requests and polls find a free one.
_CANCELS_AT_ONCE = 8
# The capacity of a task app that has not reported it.
_MANY = 1_000_000
_LEAST_WEIGHT = 1 / 64
_LATER = (429, 502, 503, 504)
# Limit of a reply on other routes than _LONG.
_MOST_SHORT_BYTES = 16 << 20
# Limits of a reply on _LONG: 1.5 times TURNWISE_MAX_PAGE_BYTES, which a page may exceed by one rollout; at
# least 48 MiB, and at most 1 GiB, the default of TURNWISE_MAX_HELD_BYTES.
_MOST_REPLY_BYTES, _MOST_PAGE_BYTES = 48 << 20, 1 << 30
_LONG = ("/rollouts", "/replay")

State = Literal["starting", "serving", "lost", "gone"]
# Receives an app whose state or fault has changed.
Show = Callable[["TaskAppClient", State], None]


def show_nothing(app: "TaskAppClient", state: State) -> None:
    """Ignore a change of state, the default."""


class _Unreachable(Exception):
    """No answer came, or the answer asks to try later; the request may be repeated."""


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
    """The part of GET /info that a trainer uses."""

    service: _Service
    """`instance_id` names the process, and changes with a restart."""
    limits: _Limits
    """The most rollouts that run at a time, bytes of a request's body, pictures that one replay draws
    (`max_frames`), and bytes of a page of results."""
    capabilities: _Capabilities = _Capabilities()
    """The `reward_functions` (with their modes) and `interactions` that a rollout can name;
    `number_interactions` need a number as ground truth."""


class InstanceInfo(StrictReply):
    """A task app's description of an environment."""

    conversation: bool = False
    """Whether the task app keeps the messages of an episode."""
    takes_answers: bool = True
    """Whether words without a call are accepted."""
    restorable: bool | None = None
    """Whether it has snapshots; None: the task app is too old to report this."""
    reseedable: bool = False
    """Whether it can draw other random numbers after a snapshot."""
    rewards_calls: bool = False
    """Whether it is an agent. Each of an agent's model calls may have a reward."""
    state_keys: tuple[str, ...] = ()


class _FirstObservation(StrictReply):
    achievements_counts: dict[str, Count] = Field(default_factory=dict)


class Instance(StrictReply):
    """An environment or policy that `create` made."""

    id: Id = Field(validation_alias=AliasChoices("env_id", "policy_id"))
    observation: _FirstObservation = _FirstObservation()
    """The first observation of an environment; `achievements_counts` has a counter of every achievement."""
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
    """One task app, as an async context manager.

    Args:
        timeout_s: deadline of one request; a long poll has this time after its own waiting time.
        name: the name that was resolved to this address (`addresses.Address.name`), or empty.
        label: name in metrics; empty: host and port.
        fault: the reason why the app takes no work yet; None: it takes work.
        most_reply_bytes: limit of a reply; pages may be as long as the app's own limit.
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
        self.retired = False  # whether its name no longer leads to it; once it fails, it is dropped
        self.instance_id = ""  # the process that answered `about` last
        self.at_most = _MANY  # concurrent rollouts
        self.weight = 1.0  # share of unfinished rollouts relative to the other apps
        self.begin_run("", asyncio.Event())

    def begin_run(self, run_id: str, change: asyncio.Event) -> None:
        """Forget all rollouts, for a new run; `change` is set whenever the app starts or stops answering."""
        self._run_id, self._change = run_id, change
        self.answers = self.fault is None
        # All rollouts of this app; those whose requests are not sent yet; and the other ones, each with the
        # instance_id of the process that accepted it ("" before the answer).
        self.requests: dict[str, RolloutRequest] = {}
        self.unsent: dict[str, RolloutRequest] = {}
        self.accepted: dict[str, str] = {}
        # The rollouts requested since the last poll began, and the processes that accepted rollouts.
        self._fresh: set[str] = set()
        self._instances: set[str] = set()
        # Rollouts that the app may still run or hold, but that other apps have now or no batch needs.
        self.stale: set[str] = set()
        self.discard: list[str] = []  # results that the app may forget at once
        self.unacked: list[str] = []  # results that count, which the app holds until they are stored
        self.wake = asyncio.Event()  # set when there is something to send
        self._sending = asyncio.Lock()
        self.cursor: str | None = None
        self._last_instance = self.instance_id  # the process that may have accepted the last request
        self.strikes = 0  # how often in a row the app had lost accepted rollouts
        self._look_s = 0.0

    @property
    def fault(self) -> str | None:
        """The last error; None: the app takes work."""
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
        """Update the weight after a rollout ended here while the other apps had work too.

        Each finished rollout adds one, so the weight follows the app's speed. Each failure halves the weight:
        an app that fails at once always has room, and would otherwise take all rollouts.
        """
        self.weight = self.weight + 1 if finished else max(self.weight / 2, _LEAST_WEIGHT)

    def take(self, request: RolloutRequest) -> None:
        self.requests[request.rollout_id] = self.unsent[request.rollout_id] = request
        self.wake.set()

    def take_back(self, rollout_id: str) -> bool:
        """Take a rollout from this app; return whether the app may have received its request."""
        del self.requests[rollout_id]
        self.unsent.pop(rollout_id, None)
        return self.accepted.pop(rollout_id, None) is not None

    def stop(self, rollout_id: str) -> None:
        """Take an unneeded rollout from this app, and cancel it there if it may be running."""
        if self.take_back(rollout_id):
            self.stale.add(rollout_id)
            self.wake.set()

    def discard_results(self) -> None:
        """Tell the app to forget valid results, which are on disk now."""
        self.discard += self.unacked
        self.unacked = []
        self.wake.set()

    async def keep_sending(self) -> None:
        while True:
            await self.wake.wait()
            await self._send()

    async def next_page(self) -> RolloutPage:
        """Wait until the app has rollouts, and return the next page of results. Raises as `poll` does."""
        await self._send()  # first, so that the app is not idle; during the poll more may be sent
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
        """Return those of `find_missing` that an earlier process of the app had accepted."""
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
        """Ask a lost app until it answers; return False if its name leads elsewhere.

        If a new process answers, forget the cursor and stale rollouts: that process has none of this run.
        """
        while True:
            await asyncio.sleep(self._look_s)
            self._look_s = min(max(2 * self._look_s, _FIRST_LOOK_S), _MOST_LOOK_S)
            if self.retired:
                return False
            try:
                await self.about(attempts=1)
                break
            except TaskAppError as error:  # also a refusal: another service may have its address now
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
        """Cancel unneeded rollouts at the app, and let it forget results."""
        names = sorted(self.stale)
        for first in range(0, len(names), _CANCELS_AT_ONCE):
            async with asyncio.TaskGroup() as group:
                for name in names[first : first + _CANCELS_AT_ONCE]:
                    group.create_task(self._cancel(name))
        results, self.discard = self.discard, []
        try:
            await self.ack(self._run_id, [*names, *results])
        except BaseException:
            self.discard += results  # it may still hold them
            raise
        self.stale.difference_update(names)

    async def _send(self) -> None:
        """Send the pending cancellations, acknowledgements and requests."""
        async with self._sending:
            self.wake.clear()
            await self.let_go()
            # Rollouts that the app may still hold are requested in the next call, once it has forgotten them.
            held = self.stale.union(self.discard)
            batch = {name: request for name, request in self.unsent.items() if name not in held}
            self.unsent = {name: request for name, request in self.unsent.items() if name in held}
            if batch:
                await self._submit(batch)

    async def _submit(self, batch: Mapping[str, RolloutRequest]) -> None:
        # Recorded first: a submission that is cut short may have been accepted.
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
        except TaskAppError as error:  # any other error: the app does not know the rollout, which is fine
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
        """Return the app's process and limits; success also proves that the app is up and accepts the key."""
        about = await self._answer(About, "GET", "/info", attempts=attempts)
        self._limits, self.instance_id = about.limits, about.service.instance_id
        self.at_most = about.limits.max_concurrent_rollouts
        return about

    def refuse_too_large(self, request: RolloutRequest) -> None:
        """Refuse a request above the limits that the task app reported in the last `about`."""
        for _ in slices([request], max_body_bytes=self._limits.max_body_bytes, url=self.url):
            pass

    async def submit(self, requests: Sequence[RolloutRequest]) -> str:
        """Request rollouts, in slices. Sending the same requests twice is harmless.

        Returns:
            The instance_id of the process that accepted the last slice.
        """
        instance_id = ""
        for part in slices(requests, max_body_bytes=self._limits.max_body_bytes, url=self.url):
            accepted = await self._answer(RolloutsAccepted, "POST", "/rollouts", body={"rollouts": part})
            instance_id = accepted.instance_id
        return instance_id

    async def poll(self, run_id: str, cursor: str | None, *, wait_s: float) -> RolloutPage:
        """Return everything that ended since `cursor`; wait up to `wait_s` for at least one rollout.

        An invalid rollout is returned as a failed one (`read_page`).

        Raises:
            CursorExpired: the process that gave the cursor has ended; poll without a cursor.
            TaskAppLost: the app does not answer in time.
            TaskAppError: any other error.
        """
        params = {"run_id": run_id, "wait_s": str(wait_s)} | ({"cursor": cursor} if cursor else {})
        content = await self._call("GET", "/rollouts", params=params, extra_s=wait_s)
        with _as_task_app_error():
            return read_page(content, f"{self.url}: GET /rollouts")

    async def ack(self, run_id: str, rollout_ids: Sequence[str]) -> None:
        """Let the task app forget these rollouts; unknown ids are ignored."""
        for first in range(0, len(rollout_ids), _ACK_AT_ONCE):
            ack = RolloutAck(run_id=run_id, rollout_ids=tuple(rollout_ids[first : first + _ACK_AT_ONCE]))
            await self._answer(RolloutAcked, "POST", "/rollouts/ack", body=ack.model_dump(mode="json"))

    async def cancel(self, rollout_id: str) -> None:
        await self._answer(_Done, "DELETE", f"/rollouts/{rollout_id}")

    async def abort(self, run_id: str) -> None:
        """End a run's unfinished rollouts and refuse further ones; an unknown run is ignored."""
        await self._answer(_Done, "POST", "/run/abort", body={"run_id": run_id})

    async def create(self, kind: Literal["env", "policy"], body: Mapping[str, Any]) -> Instance:
        """Create an environment or a policy outside any rollout, until `terminate`.

        Raises:
            Refused: the task app does not offer it, or not with this config.
            TaskAppError: any other error.
        """
        return await self._answer(Instance, "POST", f"/{kind}/create", body=body)

    async def step_idly(self, env_id: str) -> None:
        """Take a decision without a call in an environment from `create`: most environments run a no-op.

        Raises:
            PluginFailed, BackendFailed: the environment failed.
            TaskAppError: any other error, also if such a decision is impossible.
        """
        await self._answer(_Done, "POST", "/env/step", body={"env_id": env_id, "tool_calls": []})

    async def snapshot(self, env_id: str) -> None:
        """Take a snapshot of an environment from `create` and leave it at the task app.

        Raises:
            Refused: the environment has no snapshots.
            TaskAppError: any other error.
        """
        await self._answer(_Done, "POST", "/env/snapshot", body={"env_id": env_id})

    async def replay(self, record: ReplayRequest) -> list[ReplayFrame]:
        """Return the frames of an episode; each request asks for at most `max_frames` of them.

        Raises:
            NoPictures: the environment draws none, or the replay differs from the record.
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
        """Return the snapshots of an episode after the turns that `record.snapshots` names.

        Raises:
            ReplayDeparts: the replay differs from the record, as in an environment of another version.
            Refused: the environment has no snapshots.
            TaskAppError: any other error.
        """
        reply = await self._replay(record.model_dump(mode="json", exclude_defaults=True), "snapshots")
        return {item.turn: item.snapshot for item in reply.snapshots}

    async def _replay(self, body: Mapping[str, Any], name: Literal["frames", "snapshots"]) -> ReplayReply:
        """Replay an episode in a single attempt, and check that the reply has the turns of the body."""
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
        if body is not None:  # written in pieces: a large row as one string would block the event loop
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
        # The status first: while the task app starts, a proxy may answer with a page of HTML.
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
        """The host of the certificate, if it is not the host of the URL."""
        return self.name.rpartition(":")[0] if self.name and self.url.startswith("https:") else None
