"""What the routes share: one object, built by `create_app`, completed while the app runs."""

import secrets
from dataclasses import dataclass, field

import aiohttp
from starlette.requests import Request

from shared_schemas.rollouts import RolloutRequest
from task_app.auth import Keys
from task_app.plugins import PlugBoards, PolicyContext
from task_app.rollouts import RolloutRunner
from task_app.settings import Settings


@dataclass(slots=True)
class Services:
    """`start` needs a running event loop; the lifespan calls it and `close`."""

    settings: Settings
    boards: PlugBoards
    keys: Keys
    instance_id: str = field(default_factory=lambda: secrets.token_hex(8))
    runner: RolloutRunner = field(init=False)
    _session: aiohttp.ClientSession | None = None

    def __post_init__(self) -> None:
        self.runner = RolloutRunner(
            self.settings, self.boards, self.policy_context, instance_id=self.instance_id
        )

    def policy_context(self, request: RolloutRequest) -> PolicyContext:
        return PolicyContext(
            settings=self.settings,
            session=self.session,
            rollout_id=request.rollout_id,
            inference_key=request.policy.inference_key,
        )

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
