"""A client for the task app's rollout routes. Every call has a deadline, every retry a budget."""

import json
from collections.abc import Mapping, Sequence
from io import BytesIO
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import aiohttp
import stamina
from aiohttp.payload import BytesIOPayload
from pydantic import AliasChoices, BaseModel, Field, SecretStr, ValidationError
from stamina.instrumentation import set_on_retry_hooks

from service_kit.replies import ReplyTooLarge, read_bounded, redirect_target
from shared_schemas.base import OpenBody
from shared_schemas.replay import ReplayFrame, ReplayReply, ReplayRequest
from shared_schemas.rollouts import RolloutAck, RolloutAcked, RolloutPage, RolloutRequest, RolloutsAccepted
from trainer_backend.collect.wire import (
    DEFAULT_BODY_BYTES,
    TaskAppLost,
    first_finding,
    is_final,
    json_in,
    message_of,
    refusal,
    refuse_too_large,
    slices,
)
from trainer_backend.errors import TaskAppError

# A hook would print a line for each try; `TaskApps` tells once that a task app is lost.
set_on_retry_hooks(())

# Few, because another task app can play the rollout, and lost apps are tried again later.
_ATTEMPTS = 4
_ACK_AT_ONCE = 1024
_LATER = (429, 502, 503, 504)
# The default of TURNWISE_MAX_HELD_BYTES: all results that a task app holds fit in one reply, and so does each
# of its pages, which TURNWISE_MAX_PAGE_BYTES limits to 32 MiB by default.
_MOST_REPLY_BYTES = 1 << 30

Answer = TypeVar("Answer", bound=BaseModel)


class _Unreachable(Exception):
    """The request may be repeated: there was no answer, or one that asks to try later."""


class _Limits(OpenBody):
    max_concurrent_rollouts: int = Field(ge=1)
    max_body_bytes: int = Field(default=DEFAULT_BODY_BYTES, ge=1)
    max_frames: int = Field(default=2, ge=2)


class _Service(OpenBody):
    instance_id: str


class _Capabilities(OpenBody):
    reward_functions: dict[str, str] = Field(default_factory=dict)
    interactions: tuple[str, ...] = ()
    number_interactions: tuple[str, ...] = ()


class About(OpenBody):
    """The part of GET /info that a trainer uses."""

    service: _Service
    """`instance_id` names the process: after a restart it is another."""
    limits: _Limits
    """`max_concurrent_rollouts` is how many it runs at a time, `max_body_bytes` what one request may hold,
    `max_frames` how many pictures it draws in one replay."""
    capabilities: _Capabilities = _Capabilities()
    """`reward_functions` are those that a rollout can name, with their modes; so are `interactions`;
    `number_interactions` are those whose ground truth must be a number."""


class InstanceInfo(OpenBody):
    """What the task app says of an environment."""

    conversation: bool = False
    """The task app keeps its history."""
    takes_answers: bool = True
    """Words without a call are accepted."""
    restorable: bool | None = None
    """It has snapshots; None: the task app is too old to say."""
    reseedable: bool = False
    """It can be given other draws after one."""
    rewards_calls: bool = False
    """It is an agent, whose calls may be rewarded one by one."""
    state_keys: tuple[str, ...] = ()


class _FirstObservation(OpenBody):
    achievements_counts: dict[str, int] = Field(default_factory=dict)


class Instance(OpenBody):
    """An environment or policy that `create` made."""

    id: str = Field(validation_alias=AliasChoices("env_id", "policy_id"))
    observation: _FirstObservation = _FirstObservation()
    """What an environment shows first; `achievements_counts` has a counter of every achievement."""
    info: InstanceInfo = InstanceInfo()


class TaskAppClient:
    """A client for one task app. Use it as an async context manager.

    Args:
        timeout_s: deadline of one request, in addition to the waiting time of a long poll.
        name: `host:port` behind a resolved address (`addresses.Address.name`), or empty.
        most_reply_bytes: a longer reply is an error.
    """

    def __init__(
        self,
        url: str,
        api_key: SecretStr,
        *,
        timeout_s: float,
        name: str = "",
        most_reply_bytes: int = _MOST_REPLY_BYTES,
    ) -> None:
        self.url = url.rstrip("/")
        self.api_key = api_key
        self.name = name
        self._timeout_s, self._most_reply_bytes = timeout_s, most_reply_bytes
        self._limits = _Limits(max_concurrent_rollouts=1)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers={"X-API-Key": self.api_key.get_secret_value()}
            | ({"Host": self.name} if self.name else {}),
            connector=aiohttp.TCPConnector(limit=16),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def about(self, *, attempts: int = _ATTEMPTS) -> About:
        """Return its process and limits; success also proves that it is up and accepts the key."""
        about = await self._answer(About, "GET", "/info", attempts=attempts)
        self._limits = about.limits
        return about

    def refuse_too_large(self, request: RolloutRequest) -> None:
        """Refuse a request that this task app would not take, by the limits of its last `about`."""
        refuse_too_large(request, max_body_bytes=self._limits.max_body_bytes, url=self.url)

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

        Raises:
            CursorExpired: the cursor is of a process that has ended; poll without one.
            TaskAppLost: it does not answer within the budget.
            TaskAppError: any other error.
        """
        params = {"run_id": run_id, "wait_s": str(wait_s)} | ({"cursor": cursor} if cursor else {})
        return await self._answer(RolloutPage, "GET", "/rollouts", params=params, extra_s=wait_s)

    async def ack(self, run_id: str, rollout_ids: Sequence[str]) -> None:
        """Let the task app forget these rollouts; unknown ids are ignored."""
        for first in range(0, len(rollout_ids), _ACK_AT_ONCE):
            ack = RolloutAck(run_id=run_id, rollout_ids=tuple(rollout_ids[first : first + _ACK_AT_ONCE]))
            await self._answer(RolloutAcked, "POST", "/rollouts/ack", body=ack.model_dump(mode="json"))

    async def cancel(self, rollout_id: str) -> None:
        await self._answer(OpenBody, "DELETE", f"/rollouts/{rollout_id}")

    async def abort(self, run_id: str) -> None:
        """End a run's unfinished rollouts and refuse further ones; an unknown run is ignored."""
        await self._answer(OpenBody, "POST", "/run/abort", body={"run_id": run_id})

    async def create(self, kind: Literal["env", "policy"], body: Mapping[str, Any]) -> Instance:
        """Create an environment or a policy outside any rollout, until `terminate`.

        Raises:
            Refused: the task app does not offer it, or not with this config.
            TaskAppError: any other error.
        """
        return await self._answer(Instance, "POST", f"/{kind}/create", body=body)

    async def step_idly(self, env_id: str) -> None:
        """Take a decision without a call in an environment from `create`: most run one no-op.

        Raises:
            PluginFailed, BackendFailed: the environment failed.
            TaskAppError: any other error, also where no such decision is possible.
        """
        await self._answer(OpenBody, "POST", "/env/step", body={"env_id": env_id, "tool_calls": []})

    async def snapshot(self, env_id: str) -> None:
        """Take a snapshot of an environment from `create` and leave it at the task app.

        Raises:
            Refused: the environment has no snapshots.
            TaskAppError: any other error.
        """
        await self._answer(OpenBody, "POST", "/env/snapshot", body={"env_id": env_id})

    async def replay(self, record: ReplayRequest) -> list[ReplayFrame]:
        """Return the frames of an episode, in as many requests as this task app's `max_frames` needs.

        Raises:
            NoPictures: the environment draws none, or its replay departs from the record.
            TaskAppError: anything else that went wrong.
        """
        body, turns = record.model_dump(mode="json", exclude_defaults=True), sorted({*record.frames})
        frames: list[ReplayFrame] = []
        for first in range(0, len(turns), self._limits.max_frames):
            body["frames"] = turns[first : first + self._limits.max_frames]
            # Once: a replay that took too long would do so again.
            reply = await self._answer(ReplayReply, "POST", "/replay", body=body, attempts=1)
            frames += reply.frames
        return frames

    async def snapshots(self, record: ReplayRequest) -> dict[int, str]:
        """Return the snapshots of an episode after the turns that `record.snapshots` names.

        Raises:
            ReplayDeparts: its replay departs from the record, as in an environment of another version.
            Refused: the environment has no snapshots.
            TaskAppError: anything else that went wrong.
        """
        body = record.model_dump(mode="json", exclude_defaults=True)
        reply = await self._answer(ReplayReply, "POST", "/replay", body=body, attempts=1)
        return {item.turn: item.snapshot for item in reply.snapshots}

    async def terminate(self, kind: Literal["env", "policy"], created_id: str) -> None:
        await self._answer(OpenBody, "POST", f"/{kind}/terminate", body={f"{kind}_id": created_id})

    async def _answer(self, model: type[Answer], method: str, path: str, **options: Any) -> Answer:
        """Parse the answer of a route as a model, without a step between: pages of rollouts are large."""
        answer = await self._call(method, path, **options)
        try:
            return model.model_validate_json(answer)
        except ValidationError as error:
            text = answer.decode(errors="replace")
            if json_in(text) is None:
                raise TaskAppError(
                    f"{self.url}: {method} {path} did not answer with JSON: {text[:200]}"
                ) from error
            raise TaskAppError(
                f"{self.url}: {method} {path} did not answer as a task app does: {first_finding(error)}",
                hint="Another service may listen at this address, or a task app of another version.",
            ) from error

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
        try:
            async with self._session.request(
                method, self.url + path, data=_payload(body), params=params, timeout=timeout,
                server_hostname=self._certificate_host, allow_redirects=False,
            ) as reply:  # fmt: skip
                status, location = reply.status, reply.headers.get("Location")
                content = await read_bounded(reply.content.iter_any(), self._most_reply_bytes)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
            raise _Unreachable(str(error) or type(error).__name__) from error
        except aiohttp.ClientError as error:
            raise TaskAppError(f"{self.url}: {method} {path}: {error}") from error
        except ReplyTooLarge as error:
            raise TaskAppError(
                f"{self.url}: {method} {path}: {error}",
                hint="A smaller TURNWISE_MAX_PAGE_BYTES makes the pages of a task app smaller.",
            ) from error
        if target := redirect_target(status, location, self.url + path):
            raise TaskAppError(
                f"{self.url}: {method} {path}: status {status} redirects to {target}, "
                "and the key is sent to no other address",
                hint="services.task_url must name the final address.",
            )
        if status < 400:
            return content
        # The status first: while the task app starts, a proxy may answer with a page of HTML.
        text = content.decode(errors="replace")
        answer = json_in(text)
        if status in _LATER and not is_final(status, answer):
            raise _Unreachable(f"status {status}: {message_of(answer, text)}")
        sentence = f"{self.url}: {method} {path}: status {status}: {message_of(answer, text)}"
        raise refusal(status, answer, sentence)

    @property
    def _certificate_host(self) -> str | None:
        """The host of the certificate, if it is not the host of the URL."""
        return self.name.rpartition(":")[0] if self.name and self.url.startswith("https:") else None


def _payload(body: Any) -> BytesIOPayload | None:
    """Return a JSON body written in pieces: a large row as one string would block the event loop."""
    if body is None:
        return None
    return BytesIOPayload(BytesIO(json.dumps(body).encode("ascii")), content_type="application/json")
