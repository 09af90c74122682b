"""What the routes share: one object, built by `create_app`, completed while the app runs."""

import secrets
from dataclasses import dataclass, field

import aiohttp
import structlog
from pydantic import SecretStr
from starlette.requests import Request

from shared_schemas.rollouts import RolloutRequest
from task_app.auth import Keys
from task_app.plugins import PlugBoards, PolicyContext
from task_app.rollouts import RolloutRunner
from task_app.sessions import EnvironmentSession, PolicySession, Sessions
from task_app.settings import Settings

log = structlog.get_logger("task_app")


@dataclass(slots=True)
class Services:
    """`start` needs a running event loop; the lifespan calls it and `close`."""

    settings: Settings
    boards: PlugBoards
    keys: Keys
    instance_id: str = field(default_factory=lambda: secrets.token_hex(8))
    runner: RolloutRunner = field(init=False)
    environments: Sessions[EnvironmentSession] = field(init=False)
    policies: Sessions[PolicySession] = field(init=False)
    _session: aiohttp.ClientSession | None = None

    def __post_init__(self) -> None:
        self.runner = RolloutRunner(
            self.settings, self.boards, self._context_of, instance_id=self.instance_id
        )
        capacity, idle_s = self.settings.max_sessions, self.settings.session_idle_s
        self.environments = Sessions("env", capacity=capacity, idle_s=idle_s)
        self.policies = Sessions("policy", capacity=capacity, idle_s=idle_s)

    def policy_context(
        self, *, inference_key: SecretStr | None, rollout_id: str | None = None
    ) -> PolicyContext:
        """What a policy gets; one without a rollout's id is a conversation of its own."""
        return PolicyContext(
            settings=self.settings,
            session=self.session,
            rollout_id=rollout_id or f"policy/{secrets.token_hex(8)}",
            inference_key=inference_key,
        )

    def _context_of(self, request: RolloutRequest) -> PolicyContext:
        key = request.policy.inference_key
        return self.policy_context(inference_key=key, rollout_id=request.rollout_id)

    def expire(self) -> None:
        """Forget idle sessions and results that nobody fetched."""
        self.runner.expire()
        environments, policies = self.environments.expire(), self.policies.expire()
        for policy_id, session in policies.items():
            self.unbind(policy_id, session)
        if environments or policies:
            log.info("sessions_expired", environments=len(environments), policies=len(policies))

    def unbind(self, policy_id: str, session: PolicySession) -> None:
        """Take the training switches of a forgotten policy from its environment, if that is still there."""
        environment = self.environments.find(session.bound_env_id) if session.bound_env_id else None
        if environment is not None:
            environment.switches.pop(policy_id, None)

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session is not None, "the app has not started"
        return self._session

    def start(self) -> None:
        """Open the one client session of the service; each running rollout has at most one call open."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=2 * self.settings.max_concurrent_rollouts),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        await self.runner.drain()
        await self.session.close()


def services_of(request: Request) -> Services:
    services = request.app.state.services
    assert isinstance(services, Services)
    return services
