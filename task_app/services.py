"""The objects that all routes of a task app share: sessions, the rollout runner, the database and others."""

import asyncio
import secrets
import threading
import time
from typing import TYPE_CHECKING

import structlog
from pydantic import SecretStr
from starlette.requests import Request

from service_kit.http_client import HttpClient
from service_kit.keys import Keys
from service_kit.replies import plain_session
from shared_schemas.chat import StructuredOutput
from shared_schemas.messages import ToolSpec
from shared_schemas.rollouts import RolloutRequest
from task_app.captures.door import Captures
from task_app.environment_calls import list_tools
from task_app.environments.foreign.child import end_all
from task_app.environments.foreign.wire import CLOSE_S
from task_app.held import Held
from task_app.interactions.service import Interactions, InteractionSession
from task_app.observing.metrics import Metrics
from task_app.observing.spans import Spans
from task_app.plugins import PlugBoards, PolicyContext
from task_app.protocols import Environment, steps_quickly
from task_app.rollouts.runner import RolloutRunner
from task_app.sessions.journal import Database, SessionStore
from task_app.sessions.registry import Sessions
from task_app.sessions.sessions import EnvironmentSession, PolicySession
from task_app.settings import Settings
from task_app.snapshots.envelope import ByteCache
from task_app.threads import Threads, begin

if TYPE_CHECKING:  # the import takes a tenth of the start, and only plug-ins need it
    import aiohttp

log = structlog.get_logger("task_app")

# How often a draining service checks whether the last results were acknowledged.
_FETCH_LOOK_S = 0.05
# How long a stopping service waits for environments of other libraries to close properly.
_CLOSE_S = 2.0


class Services:
    """Contains the parts of a running task app. The lifespan calls `start` and, at the end, `close`."""

    def __init__(
        self, settings: Settings, boards: PlugBoards, keys: Keys, spans: Spans | None = None
    ) -> None:
        self.settings, self.boards, self.keys, self.spans = settings, boards, keys, spans or Spans()
        self.instance_id = secrets.token_hex(8)
        self.metrics = Metrics()
        self.draining = False
        # `client` sends requests of policies to model servers. `_session` is for requests of plug-ins.
        self.client = HttpClient(at_most=2 * settings.max_concurrent_rollouts)
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening = threading.Lock()
        self.interactions = Interactions(
            boards.interactions,
            settings,
            lambda rollout_id: self.policy_context(inference_key=None, rollout_id=rollout_id),
        )
        capacity, idle_s = settings.max_sessions, settings.session_idle_s
        self.captures = Captures(
            capacity=capacity,
            idle_s=idle_s,
            held=Held(settings.max_held_bytes),
            rejects_form=settings.structured_output is StructuredOutput.REJECT,
        )
        self.runner = RolloutRunner(
            settings, boards, self._make_rollout_context, self.interactions, self.captures,
            instance_id=self.instance_id, spans=self.spans, on_end=self.metrics.count_rollout,
        )  # fmt: skip
        self.threads = Threads(most=settings.max_plugin_threads, stuck_after_s=settings.plugin_stuck_after_s)
        self.database = Database(
            settings.state_dir,
            most=settings.max_idempotency_keys,
            most_bytes=settings.max_idempotency_bytes,
            most_s=settings.idempotency_s,
        )
        if settings.state_dir is not None:
            # Open the database now, so that an unusable folder is reported before the app starts.
            self.database.open()
        self.store = SessionStore(
            self.database, boards,
            snapshot_every=settings.journal_snapshot_every, max_snapshot_bytes=settings.max_snapshot_bytes,
        )  # fmt: skip
        self.environments: Sessions[EnvironmentSession] = Sessions(
            "env", capacity=capacity, idle_s=idle_s,
            on_add=self._watch_session, on_new=self.store.add, on_remove=self._end_session,
        )  # fmt: skip
        self.policies: Sessions[PolicySession] = Sessions(
            "policy", capacity=capacity, idle_s=idle_s, on_new=self.store.add, on_remove=self.store.remove
        )
        self.interaction_sessions: Sessions[InteractionSession] = Sessions(
            "interaction",
            capacity=capacity,
            idle_s=idle_s,
            end_path="/interaction/finalize",
            # `begin_close` only begins the end of an interaction; `Services.close` waits for it.
            on_remove=lambda _, session: session.live.begin_close(),
        )
        self.snapshots = ByteCache(
            at_most=settings.max_snapshots_held, at_most_bytes=settings.max_snapshots_bytes
        )

    def policy_context(
        self, *, inference_key: SecretStr | None, rollout_id: str | None = None, seed: int | None = None
    ) -> PolicyContext:
        """Return the context for building a policy.

        Without `rollout_id`, the context gets a new unique id, so that the gateway stores the policy's calls
        as a separate conversation.
        """
        return PolicyContext(
            settings=self.settings,
            open_session=self.open_session,
            client=self.client,
            rollout_id=rollout_id or f"policy/{secrets.token_hex(8)}",
            inference_key=inference_key,
            on_retry=self.metrics.inference_retries.inc,
            threads=self.threads,
            seed=seed,
        )

    def _make_rollout_context(self, request: RolloutRequest) -> PolicyContext:
        spec = request.policy
        return self.policy_context(
            inference_key=spec.inference_key, rollout_id=request.rollout_id, seed=spec.seed
        )

    def _watch_session(self, session: EnvironmentSession) -> None:
        session.on_decision = self.metrics.count_decision
        session.threads = self.threads
        session.lock.at_most_s = self.settings.session_wait_s

    def _end_session(self, env_id: str, session: EnvironmentSession) -> None:
        self.store.remove(env_id, session)
        session.begin_close()

    def expire(self) -> None:
        """Remove idle sessions, and old results that were never acknowledged."""
        self.runner.expire()
        environments, policies = self.environments.expire(), self.policies.expire()
        for policy_id, session in policies.items():
            self.unbind(policy_id, session)
        interactions, captures = self.interaction_sessions.expire(), self.captures.sessions.expire()
        if environments or policies or interactions or captures:
            log.info(
                "sessions_expired",
                environments=len(environments), policies=len(policies), interactions=len(interactions),
                captures=len(captures),
            )  # fmt: skip

    async def fetch_tools(self, environment: Environment) -> tuple[ToolSpec, ...]:
        """Return the environment's tools.

        Environments without quick steps are asked in a thread, because they may ask a server for their tools.
        """
        if steps_quickly(environment):
            return list_tools(environment)
        return await self.threads.run("environment.tools", list_tools, environment)

    def unbind(self, policy_id: str, session: PolicySession) -> None:
        """Remove a policy's step-reward settings from the environment session to which it was bound."""
        environment = self.environments.find(session.bound_env_id) if session.bound_env_id else None
        if environment is not None:
            environment.switches.pop(policy_id, None)

    def open_session(self) -> "aiohttp.ClientSession":
        """Return the HTTP session for plug-ins; the first call creates it."""
        with self._opening:  # a plug-in may call this method in a thread
            if self._session is None:
                import aiohttp

                limit = 2 * self.settings.max_concurrent_rollouts
                self._session = plain_session(
                    connector=aiohttp.TCPConnector(limit=limit, loop=self._loop),
                    cookie_jar=aiohttp.DummyCookieJar(loop=self._loop),
                )
            return self._session

    def start(self) -> None:
        """Open the database of sessions. Must be called on the event loop."""
        self._loop = asyncio.get_running_loop()
        self.database.open()

    async def recover(self) -> None:
        """Restore the sessions that are stored in --state-dir. Call this before requests are answered."""
        if self.settings.state_dir is None:
            return
        environments, policies = await self.store.recover(
            self.threads, lambda: self.policy_context(inference_key=None)
        )
        for env_id, environment in environments.items():
            self.environments.adopt(env_id, environment)
        for policy_id, policy in policies.items():
            self.policies.adopt(policy_id, policy)
        log.info(
            "sessions_recovered",
            environments=len(environments), policies=len(policies), answers=self.database.totals[0],
        )  # fmt: skip

    async def drain(self, *, within_s: float) -> None:
        """Prepare the stop of the service.

        Accept no new rollouts or sessions, and cancel queued rollouts. Wait up to `within_s` seconds until
        the running rollouts have ended and all results are acknowledged. Then cancel the rest.
        """
        until_s = time.monotonic() + within_s
        self.draining = self.environments.draining = self.policies.draining = True
        self.interaction_sessions.draining = self.captures.sessions.draining = True
        log.info("draining", within_s=within_s)
        self.runner.begin_drain()
        count = await self.runner.wait_until_idle(within_s)
        while count and len(self.runner.results) and time.monotonic() < until_s:
            await asyncio.sleep(_FETCH_LOOK_S)
        await self.runner.drain()

    async def close(self) -> None:
        await self.runner.drain()
        await self.runner.rewards.close()
        for session in self.environments:
            session.begin_close()
        await asyncio.gather(*[session.wait_closed(_CLOSE_S) for session in self.environments])
        # Not asyncio.to_thread, because the thread pool of the loop may be shut down already.
        await begin("end of processes", end_all, CLOSE_S)
        await self.interactions.close()
        if self._session is not None:
            await self._session.close()
        await self.client.close()
        self.database.close()


def get_services(request: Request) -> Services:
    services = request.app.state.services
    assert isinstance(services, Services)
    return services
