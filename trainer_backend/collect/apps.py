"""Finds the task apps of a job, whose addresses may change during a run, and records which of them answer."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Self

import structlog
from pydantic import SecretStr

from trainer_backend.collect.client import Show, TaskAppClient, show_nothing
from trainer_backend.collect.wire import TaskAppLost
from trainer_backend.errors import TaskAppError
from trainer_backend.job.addresses import DNS, Address, Resolve, look_up_host, resolve_addresses

log = structlog.get_logger("trainer")

# Attempts to reach a task app at the start of a run, because the task app may still be starting then.
_AT_THE_START = 6

Tell = Callable[[str], None]


def log_sentence(sentence: str) -> None:
    """Write a sentence about task apps to the log. This is the default of `TaskApps(tell=...)`."""
    log.warning("task_apps", told=sentence)


class TaskApps:
    """Holds one client per task app of a job. Used as an async context manager.

    Args:
        urls: entries of `services.task_url`; an entry can be a DNS name that stands for several task apps.
        timeout_s: deadline of one request.
        lost_wait_s: how long a batch of rollouts waits while no task app answers.
        label: name of the apps in metrics; with several URLs, the URL's index is appended. If empty, each
            app is named by its host and port.
        tell: called with a sentence for the user, for example when an app stops answering or answers again.
        look_up_every_s: interval at which DNS names are resolved again while a batch is collected.
    """

    def __init__(
        self, urls: Sequence[str], api_key: SecretStr, *, timeout_s: float, lost_wait_s: float = 0.0,
        label: str = "", tell: Tell = log_sentence, resolve: Resolve = look_up_host,
        look_up_every_s: float = 15.0,
    ) -> None:  # fmt: skip
        self._urls, self._key, self._timeout_s, self._label = tuple(urls), api_key, timeout_s, label
        self.lost_wait_s, self.tell, self._resolve = lost_wait_s, tell, resolve
        self.members: tuple[TaskAppClient, ...] = ()
        self._show: Show = show_nothing
        self._look_up_every_s, self._last_lookup_s = look_up_every_s, 0.0
        self._addresses: dict[str, list[Address]] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Resolve all DNS names, and send GET /info to each task app.

        Raises:
            TaskAppLost: no task app answers.
        """
        try:
            await self._look_up()
            await asyncio.gather(*(self._meet(app) for app in self.members))
            self._drop_twins()
            self.refuse_if_none_answers()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def serving(self) -> tuple[TaskAppClient, ...]:
        """The task apps that currently answer requests."""
        return tuple(app for app in self.members if app.fault is None)

    def watch(self, show: Show) -> None:
        """Call `show` with each app and its state now, and again whenever an app's state or fault changes."""
        self._show = show
        for app in self.members:
            app.show = show
            show(app, app.state)

    async def refresh_names(self, join: Callable[[TaskAppClient], None]) -> None:
        """Resolve the DNS names repeatedly, and call `join` with each task app at a new address.

        Runs until the task is cancelled. Returns at once if no entry of `urls` is a DNS name.
        """
        while any(url.startswith(DNS) for url in self._urls):
            await asyncio.sleep(
                self._last_lookup_s + self._look_up_every_s - asyncio.get_running_loop().time()
            )
            for app in await self._look_up():
                join(app)

    def lose(self, app: TaskAppClient, error: BaseException, note: str = "") -> None:
        """Record that an app does not answer, and report the error, followed by `note`, through `tell`."""
        app.fault = str(error)
        self.tell(f"task app lost: {error}{note}")

    def drop(self, app: TaskAppClient) -> None:
        """Remove an app from `members`, and show its state as "gone"."""
        self.members = tuple(member for member in self.members if member is not app)
        self._show(app, "gone")

    def answers(self) -> str:
        """Return the last errors of all apps that do not answer, joined into one text."""
        return "; ".join(app.fault for app in self.members if app.fault is not None)

    def refuse_if_none_answers(self) -> None:
        """Raise TaskAppLost if no task app answers; the message contains the last error of each app."""
        if not self.serving:
            raise TaskAppLost(f"no task app answers: {self.answers() or ', '.join(self._urls)}")

    async def _look_up(self) -> list[TaskAppClient]:
        """Resolve all DNS names, add a client for each new address, and return these new clients.

        No request is sent to a new app yet. An app whose address is no longer found is marked as `retired`.
        If a name cannot be resolved, its previous addresses stay in use.
        """
        self._last_lookup_s = asyncio.get_running_loop().time()
        for url in self._urls:
            try:
                self._addresses[url] = await resolve_addresses(url, self._resolve)
            except TaskAppError as error:
                self._addresses.setdefault(url, [])
                self.tell(str(error))
        addresses = {address.url: address for addresses in self._addresses.values() for address in addresses}
        for app in self.members:
            app.retired = app.url not in addresses
        urls = {app.url for app in self.members}
        new = [await self._new(address) for url, address in addresses.items() if url not in urls]
        self.members = (*self.members, *new)
        return new

    async def _new(self, address: Address) -> TaskAppClient:
        label = self._label
        if label and len(self._urls) > 1:
            label = f"{label}-{self._urls.index(address.url)}"
        app = TaskAppClient(
            address.url, self._key, timeout_s=self._timeout_s, name=address.name, label=label,
            fault=f"{address.url} has not answered yet",
        )  # fmt: skip
        await self._stack.enter_async_context(app)
        app.show = self._show
        app.show(app, app.state)
        return app

    async def _meet(self, app: TaskAppClient) -> None:
        try:
            await app.about(attempts=_AT_THE_START)
            app.fault = None
        except TaskAppLost as error:
            app.fault = str(error)

    def _drop_twins(self) -> None:
        distinct: list[TaskAppClient] = []
        for app in self.members:
            same = next((item for item in distinct if item.instance_id == app.instance_id != ""), None)
            if same is None:
                distinct.append(app)
            else:
                self.tell(f"{app.url} is the task app at {same.url}; it is asked once")
        self.members = tuple(distinct)
