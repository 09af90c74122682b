"""`[cluster] launcher = "external"`: somebody else starts the learner, as Slurm, Kubernetes or Compose do."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping

from service_kit.errors import SettingsError
from service_kit.keys import key_from_environ
from service_kit.process import Process
from trainer_backend.errors import JobError
from trainer_backend.processes.launching import LOCAL, Role


class Elsewhere:
    """A process that somebody else starts, ends, and starts again; only its address is known."""

    pid = 0

    def __init__(self, url: str) -> None:
        self._url = url

    async def address(self) -> str:
        return self._url

    async def lines(self) -> AsyncIterator[str]:
        no_lines: tuple[str, ...] = ()
        for line in no_lines:
            yield line

    async def ended(self) -> int:
        await asyncio.Event().wait()  # whoever calls it hears of its end first
        raise AssertionError("nobody sets it")

    def signal(self, number: int) -> None:
        """Do nothing: it is not this run's to end."""

    async def end(self, grace_s: float) -> bool:
        return False

    def kill_rest(self) -> None:
        """Do nothing, either."""


class ExternalLauncher:
    """Addresses, by role, of processes that others start; the other roles are children of this process."""

    def __init__(self, urls: Mapping[str, str]) -> None:
        self._urls = urls

    async def start(self, role: Role) -> Process:
        url = self._urls.get(role.name)
        return await LOCAL.start(role) if url is None else Elsewhere(url)

    def key(self, variable: str) -> str:
        """Return the key that both sides were given. A JobError says that there is none."""
        try:
            key = key_from_environ(os.environ, variable)
        except SettingsError as error:
            raise JobError(error.detail) from error
        if key is None:
            raise JobError(
                f"cluster.launcher is 'external', and the environment has no key: set {variable}, or "
                f"{variable}_FILE, here and where the process is started"
            )
        return key.get_secret_value()
