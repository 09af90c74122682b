"""What the routes work with: one object of the application, made once at its start."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from fastapi import Request

from service_kit.keys import Guesses, Keys, LoginSessions
from service_kit.observed import Requests
from trainer_backend.api.check_process import CheckProcess
from trainer_backend.api.settings import Settings
from trainer_backend.store.database import Store
from trainer_backend.supervising.data_dir import DataDir
from trainer_backend.supervising.deleting import Sweeper
from trainer_backend.supervising.line import late
from trainer_backend.supervising.news import News
from trainer_backend.supervising.supervisor import Supervisor
from trainer_backend.supervising.watcher import Watcher

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(slots=True)
class Service:
    """
    Attributes:
        checks: where what strangers sent is read.
        supervisor: None where no jobs are run (--no-jobs).
        requests: what was answered so far.
        streams: event streams that are open.
    """

    settings: Settings
    store: Store
    data: DataDir
    news: News
    watcher: Watcher
    sweeper: Sweeper
    checks: CheckProcess
    supervisor: Supervisor | None
    keys: Keys
    sessions: LoginSessions
    guesses: Guesses = field(default_factory=Guesses)
    requests: Requests = field(default_factory=Requests)
    streams: int = 0

    async def ask(
        self, call: Callable[Arguments, Result], *arguments: Arguments.args, **named: Arguments.kwargs
    ) -> Result:
        """What a call to the store or the disk returns; made on a thread, and waited for so long at most.

        Raises:
            StoreUnavailable: it took too long.
        """
        try:
            async with asyncio.timeout(self.settings.store_s):
                return await asyncio.to_thread(call, *arguments, **named)
        except TimeoutError as error:
            raise late(self.store.shown, self.settings.store_s) from error

    def changed(self, job_id: str) -> None:
        """Somebody asked for a change of a job: the supervisor looks now, and so do open pages."""
        self.news.tell(job_id)
        if self.supervisor is not None:
            self.supervisor.wake()


def service_of(request: Request) -> Service:
    """The application's."""
    found = request.app.state.service
    assert isinstance(found, Service)
    return found
