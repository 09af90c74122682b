"""Run several vLLM servers, the replicas of one policy, as one engine.

All requests of a rollout go to the same replica while it serves. No replica serves with old weights. The
states of a replica are:

    starting -> stale -> serving -> lost
                  ^        |          |
                  |      asleep       |     while the learner works on the same GPU (inference.sleep)
                  |        |          |
                  +--------+----------+     back to serving only by a load that passes the canary

A stale replica lacks the current weights. A lost replica has failed a request, a load, or the canary (a test
prompt that follows each load); other replicas then sample its requests again, under the same ids. `/health`
is not used, because even a hanging server answers it.
"""

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal
from urllib.parse import urlsplit

from shared_schemas.trajectory import Sampling
from trainer_backend.errors import EngineBusy, EngineStopped, RemoteUnavailable, TrainerError, WeightsRefused
from trainer_backend.inference.actor import NO_EXTRAS, Engine, Extras, Generation
from trainer_backend.inference.versions import PolicyVersion, ScoredPrompt
from trainer_backend.inference.vllm_engine import VllmEngine
from trainer_backend.rundir.state import GONE

State = Literal["starting", "stale", "serving", "asleep", "lost"]
# The number of sessions (rollouts) whose replica is remembered. The least recently used session is forgotten
# first: its next request may go to a replica that must compute the prefix again.
_MOST_SESSIONS = 20_000
# A session leaves its replica if another replica has this many fewer running requests.
_IMBALANCE = 16
_LOOK_S = 1.0


@dataclass(slots=True, eq=False)
class Replica:
    """One server and its state, as `Servers` tracks it."""

    engine: VllmEngine
    state: State = "starting"
    running: int = 0
    """The number of requests that the server is sampling."""
    sessions: int = 0
    """The number of rollouts whose requests go to this replica."""
    fit: bool = False
    """Whether `VllmEngine.refuse_unfit` has accepted the server."""
    task: asyncio.Task[None] | None = None
    """The running load, or the last load."""
    loads: int = 0
    """The number of times that the replica began to serve."""
    last_error: str = ""
    """The message of the last failure; "" before any failure."""
    expected: bool = False
    """Whether the replica served until the current load began. Its sessions then wait for the replica."""
    away_since: float | None = None
    """The time at which the replica stopped serving or was last restarted; None while it serves."""


class Servers(Engine):
    """An engine that distributes requests over replicas, and detects hanging replicas itself.

    `generate` runs in the gateway's event loop; all other methods run in the run's event loop.

    Args:
        wait_s: how long a request waits for a replica that accepts it. If no replica serves by then, the run
            ends.
        canary_limit: the largest accepted mean difference between a replica's and the learner's log-probs of
            the canary, a prompt that comes with each version. Rounding causes smaller differences. The canary
            detects wrong loads: vLLM reports success even if a load leaves parts of the model unchanged.
        tell: receives a line of text for each replica that is lost or serves again.
        renew: restarts the server at an address; called if the server was lost for half of `wait_s`, or if it
            could not be put to sleep.
        sleeps: whether replicas sleep from each `release` to the next `load`.
    """

    def __init__(
        self,
        engines: Sequence[VllmEngine],
        *,
        wait_s: float,
        canary_limit: float,
        tell: Callable[[str], None],
        renew: Callable[[str], None] | None = None,
        sleeps: bool = False,
    ) -> None:
        self._sleeps, self._is_released, self._sleep_s = sleeps, False, 0.0
        self.replicas = tuple(map(Replica, engines))
        self._wait_s, self._limit, self._tell, self._renew = wait_s, canary_limit, tell, renew
        self._report: Callable[..., None] = lambda *name, **facts: None
        self._homes: OrderedDict[str, Replica] = OrderedDict()
        self._published: PolicyVersion | None = None
        self.breakdown: Future[str] = Future()
        self._lock = threading.Lock()
        self._totals = dict.fromkeys(
            ("requests", "prompt_tokens", "prompt_tokens_reused", "sampled_tokens"), 0
        )
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    @property
    def version(self) -> int:
        return 0 if self._published is None else self._published.number

    @property
    def max_model_len(self) -> int:
        return min(replica.engine.max_model_len for replica in self.replicas)

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, request_id: str, extras: Extras = NO_EXTRAS
    ) -> Generation:
        """Sample a continuation. If the replica is lost, sample again at another one.

        With `extras.on_token`, the loss of the replica is raised instead, because tokens may have
        been streamed.

        Raises:
            EngineStopped: no replica has served for `wait_s`.
            EngineBusy: no replica has accepted the request within `wait_s`.
            RemoteUnavailable: the replica was lost while streaming, or the request failed at every replica.
        """
        failed: set[Replica] = set()
        attempts, deadline = 0, time.monotonic() + self._wait_s
        while True:
            attempts += 1
            replica = await self._serving(extras.session or request_id, failed)
            own = extras if extras.stop is None else replace(extras, stop=extras.stop.fresh())
            replica.running += 1
            loads = replica.loads
            try:
                generation = await replica.engine.generate(ids, sampling, request_id=request_id, extras=own)
                self._totals["requests"] += 1
                self._totals["prompt_tokens"] += len(ids)
                self._totals["prompt_tokens_reused"] += generation.prompt_tokens_reused
                self._totals["sampled_tokens"] += len(generation.token_ids)
                return generation
            except EngineBusy:
                attempts -= 1
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_LOOK_S)
            except RemoteUnavailable as error:
                if loads == replica.loads:  # else the replica has passed a canary since then
                    self._lose(replica, error)
                failed.add(replica)
                # Give up if the caller may have tokens already, because another replica would sample
                # different ones. Give up, too, if every replica has failed on this request.
                if extras.on_token is not None or attempts > len(self.replicas):
                    raise
            finally:
                replica.running -= 1

    def watch(self, report: Callable[..., None]) -> None:
        """Call `report` for each replica now and at each change of its state, in the thread of the change."""
        self._report = report
        for replica in self.replicas:
            self._report_replica(replica, None)

    def move(self, url: str, new_url: str) -> None:
        """Use the new address of a restarted server. The requests of the old process are sampled again."""
        for replica in self.replicas:
            if replica.engine.url == url:
                self._report(_place(url), role="replica", state=GONE)
                replica.engine.move(new_url)
                replica.fit = False
                self._set_state(replica, "lost")

    async def load(self, version: PolicyVersion) -> None:
        """Load this version into all replicas. Replicas that fail are lost; they try again until they serve.

        If the first replica serves after t seconds, the call waits t more seconds at most for the others.
        During the call, the sessions of a hanging replica wait for it, because the others could not serve all
        of them.

        Raises:
            WeightsRefused: no replica serves the version within `wait_s`.
        """
        self._published, self._is_released = version, False
        for replica in self.replicas:
            if replica.state in ("serving", "asleep"):
                self._set_state(replica, "stale")
                replica.expected = True
        try:
            await self._load_in_time(version)
        finally:
            for replica in self.replicas:
                replica.expected = False
            self._wake()

    async def release(self) -> None:
        """Put all replicas to sleep until the next load, if they share the learner's GPU.

        A replica that does not fall asleep is lost. If the run started its server, the server is restarted,
        because it may have kept its GPU memory.
        """
        if not self._sleeps or self._is_released:
            return
        self._is_released = True  # no replica loads weights from now on
        loads = [replica.task for replica in self.replicas if replica.task is not None]
        await asyncio.gather(*loads, return_exceptions=True)
        began = time.monotonic()
        await asyncio.gather(*map(self._put_to_sleep, self.replicas))
        self._sleep_s += time.monotonic() - began

    async def _put_to_sleep(self, replica: Replica) -> None:
        was_lost = replica.state == "lost"
        if not was_lost:
            self._set_state(replica, "asleep")
        try:
            await replica.engine.sleep()
        except (TrainerError, OSError) as error:
            replica.last_error = str(error)
            if not was_lost:
                self._set_state(replica, "lost")
                self._tell(f"replica {replica.engine.url} is lost, because it did not fall asleep: {error}")
            if self._renew is not None:
                self._renew(replica.engine.url)

    async def _load_in_time(self, version: PolicyVersion) -> None:
        clock = asyncio.get_running_loop().time
        start = clock()
        while True:
            tasks = self._load_all()
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            duration = clock() - start
            if self._any_serves:
                break
            if duration > self._wait_s:
                raise WeightsRefused(f"no replica serves version {version.number}: {self._answers()}")
            await asyncio.sleep(_LOOK_S)
        await asyncio.wait(tasks, timeout=max(_LOOK_S, duration))

    async def look_after(self) -> None:
        """Bring lost replicas back until cancelled. End the run if requests wait and none serves for long."""
        try:
            await self._look_after()
        finally:
            tasks = [replica.task for replica in self.replicas if replica.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _look_after(self) -> None:
        none_since: float | None = None
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._published is None or self._is_released:
                continue
            self._renew_missing()
            self._load_all()
            if self._any_serves:
                none_since = None
            else:
                none_since = none_since or time.monotonic()
                if self._waiting and time.monotonic() - none_since > self._wait_s:
                    self._break_down()

    def _renew_missing(self) -> None:
        now = time.monotonic()
        for replica in self.replicas:
            away_s = 0.0 if replica.away_since is None else now - replica.away_since
            # A lost replica that tries a load is "stale" at that time, and is not restarted.
            if self._renew is not None and replica.state == "lost" and away_s > self._wait_s / 2:
                replica.away_since = now
                self._renew(replica.engine.url)

    def _answers(self) -> str:
        return "; ".join(
            f"{replica.engine.url}: {replica.last_error or replica.state}" for replica in self.replicas
        )

    def totals(self) -> dict[str, float]:
        """Return counts since the start, named as in `EngineCounters`; unknown counts are 0."""
        counts = {**self._totals, "steps": 0.0, "truncated_tokens": 0.0, "lost_mass": 0.0}
        if not self._sleeps:
            return counts
        wake_s = sum(replica.engine.wake_s for replica in self.replicas)
        return {**counts, "sleep_s": self._sleep_s, "wake_s": wake_s / len(self.replicas)}

    async def close(self) -> None:
        for replica in self.replicas:
            await replica.engine.close()

    @property
    def _any_serves(self) -> bool:
        return any(replica.state == "serving" for replica in self.replicas)

    def _load_all(self) -> list[asyncio.Task[None]]:
        """Start a load of the current version at each replica that is not loading; return all load tasks."""
        for replica in self.replicas:
            if replica.task is None or replica.task.done():
                if replica.task is not None:
                    replica.task.result()
                replica.task = asyncio.ensure_future(self._keep_current(replica))
        return [replica.task for replica in self.replicas if replica.task is not None]

    async def _keep_current(self, replica: Replica) -> None:
        version = None
        # A new version may be published while the replica loads the previous one.
        while replica.state != "serving" and version is not self._published:
            version = self._published
            assert version is not None, "no weights were published yet"
            await self._load(replica, version)

    async def _load(self, replica: Replica, version: PolicyVersion) -> None:
        """Load a version into a replica, test the weights by the canary, and let the replica serve."""
        lost = replica.state == "lost"
        replica.state = "stale"  # not reported, because a lost replica may only be trying a load
        try:
            if lost or not replica.fit:
                await replica.engine.refuse_unfit()
                replica.fit = True
            await replica.engine.load_weights(version.number, version.address or version.folder, version.base)
            await self._test(replica, version.prompt)
            replica.engine.accept()
        # An invalid reply or an unreadable folder makes only this replica lost; the others are still looked
        # after.
        except (TrainerError, OSError, LookupError, TypeError, ValueError, AttributeError) as error:
            replica.last_error = str(error)
            self._set_state(replica, "lost")
            self._wake()
            if not lost:
                self._tell(f"replica {replica.engine.url} is lost: {error}")
            return
        if version is not self._published:
            return  # still stale: a newer version was published during the load
        replica.loads += 1
        self._set_state(replica, "serving", version.number)
        self._wake()
        if lost:
            self._tell(f"replica {replica.engine.url} serves version {version.number} again")

    async def _test(self, replica: Replica, canary: ScoredPrompt | None) -> None:
        assert canary is not None, "the learner scores a canary for every vLLM server"
        logprobs = await replica.engine.score(canary.ids)
        differences = [abs(own - learners) for own, learners in zip(logprobs, canary.logprobs, strict=True)]
        difference = fmean(differences)
        if not difference <= self._limit:
            raise WeightsRefused(
                f"it loaded weights that are not the learner's: log-probs of the canary differ by "
                f"{difference:.2g} nats on average, and {self._limit:g} is the limit",
                where=replica.engine.url,
                hint="Does its --dtype give the learner's precision: float32 on a CPU, bfloat16 on a GPU?",
            )

    async def _serving(self, session: str, failed: set[Replica]) -> Replica:
        """Return the replica of a session (rollout). If it cannot serve, return another. Wait if none can."""
        deadline = time.monotonic() + self._wait_s
        while True:
            with self._lock:
                replica = self._choose(session, failed)
                if replica is not None:
                    return replica
                if failed:  # these replicas were lost; one that serves now was brought back
                    failed.clear()
                    continue
                woken = asyncio.Event()
                self._waiting.append((asyncio.get_running_loop(), woken))
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await woken.wait()
            except TimeoutError as error:
                if self._is_released:
                    raise EngineBusy("the policy's servers sleep while the learner works") from error
                # `_look_after` may come too late: it ends the run only while a request waits.
                if not self._any_serves:
                    self._break_down()
                raise EngineStopped(self._describe_absence()) from error

    def _choose(self, session: str, failed: set[Replica]) -> Replica | None:
        able = [replica for replica in self.replicas if replica.state == "serving" and replica not in failed]
        if not able:
            return None
        home = self._homes.get(session)
        if home is not None and home.expected:
            return None
        self._homes.pop(session, None)

        def load(replica: Replica) -> tuple[int, int]:
            """Return (sessions, requests) to place a new session, (requests, sessions) to move a session."""
            counts = replica.sessions, replica.running
            return counts if home is None else counts[::-1]

        place = min(able, key=load)
        if home is not None:
            if home in able and home.running - place.running < _IMBALANCE:
                place = home
            home.sessions -= 1
        place.sessions += 1
        self._homes[session] = place
        if len(self._homes) > _MOST_SESSIONS:
            self._homes.popitem(last=False)[1].sessions -= 1
        return place

    def _lose(self, replica: Replica, error: TrainerError) -> None:
        replica.last_error = error.detail
        if replica.state == "serving":
            self._set_state(replica, "lost")
            self._tell(f"replica {replica.engine.url} is lost: {error.detail}")

    def _set_state(self, replica: Replica, state: State, version: int | None = None) -> None:
        replica.state = state
        replica.expected &= state == "stale"
        if state == "serving":
            replica.away_since = None
        elif replica.away_since is None:
            replica.away_since = time.monotonic()
        self._report_replica(replica, version)

    def _report_replica(self, replica: Replica, version: int | None) -> None:
        word = replica.last_error if replica.state == "lost" else ""
        self._report(
            _place(replica.engine.url), role="replica", state=replica.state, version=version, word=word
        )

    def _wake(self) -> None:
        """Wake the waiting requests, so that they look for a replica again."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for loop, woken in waiting:
            loop.call_soon_threadsafe(woken.set)

    def _break_down(self) -> None:
        """End the run, because no request can be sampled. The threads of both event loops may call this."""
        with self._lock:
            if not self.breakdown.done():
                self.breakdown.set_result(self._describe_absence())

    def _describe_absence(self) -> str:
        key = "inference.replica_wait_s" if self._renew is None else "twice inference.replica_wait_s"
        return f"no replica has served for {self._wait_s:g} s ({key}): {self._answers()}"


def _place(url: str) -> str:
    return urlsplit(url).netloc
