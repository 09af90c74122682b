"""The task apps of a job during all its collections: their addresses, whether they answer, their capacity."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Literal, Self, overload
from urllib.parse import urlsplit

import structlog
from pydantic import SecretStr

from trainer_backend.collect.client import TaskAppClient
from trainer_backend.collect.wire import TaskAppLost
from trainer_backend.errors import TaskAppError
from trainer_backend.job.addresses import DNS, Address, Resolve, addresses_of, resolve_addresses

log = structlog.get_logger("trainer")

_MANY = 1_000_000
_LEAST_WEIGHT = 1 / 64
# Attempts at the start, when a task app may be starting too.
_AT_THE_START = 6

Tell = Callable[[str], None]
State = Literal["starting", "serving", "lost", "gone"]
# Is given an app whose state has changed, or the word about it.
Show = Callable[["App", State], None]


def log_sentence(sentence: str) -> None:
    """Write a sentence about task apps to the log, where no user is present."""
    log.warning("task_apps", told=sentence)


def _show_nobody(app: "App", state: State) -> None:
    pass


class App:
    """A task app as the trainer knows it."""

    def __init__(self, client: TaskAppClient, label: str = "", *, fault: str | None = None) -> None:
        self.client = client
        self.label = label or urlsplit(client.url).netloc
        self._fault, self._has_answered = fault, fault is None
        self.show: Show = _show_nobody  # called when `fault` has changed
        self.retired = False  # whether its name no longer leads to it; once it fails, it is dropped
        self.instance_id = ""  # the process that answered last
        self.at_most = _MANY  # rollouts that it runs at a time
        self.weight = 1.0  # its number of unfinished rollouts relative to the other apps

    @property
    def fault(self) -> str | None:
        """Its last wrong answer; None: it takes work."""
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

    def judge(self, *, finished: bool) -> None:
        """Update the weight after a rollout ended here while the other apps had work too.

        The weight grows by one with each finished rollout, so in proportion to the app's speed. Each failure
        halves it: an app that fails at once always has room, and would otherwise take everything.
        """
        self.weight = self.weight + 1 if finished else max(self.weight / 2, _LEAST_WEIGHT)

    async def look(self, *, attempts: int = 1) -> None:
        """Ask the task app for its process and capacity."""
        about = await self.client.about(attempts=attempts)
        self.instance_id, self.at_most = about.service.instance_id, about.limits.max_concurrent_rollouts


class TaskApps(Sequence[TaskAppClient]):
    """The task apps of a job, as an async context manager and a sequence of the clients that answer.

    Args:
        urls: entries of services.task_url.
        timeout_s: deadline of one request.
        lost_wait_s: how long a collection waits when no task app answers.
        label: name of a single app in metrics, and with numbers of several; absent: host and port.
        tell: receives a sentence when an app is lost, and when it is back.
        look_up_every_s: maximum age of a resolved name during a collection.
    """

    def __init__(
        self, urls: Sequence[str], api_key: SecretStr, *, timeout_s: float, lost_wait_s: float = 0.0,
        label: str = "", tell: Tell = log_sentence, resolve: Resolve = addresses_of,
        look_up_every_s: float = 15.0,
    ) -> None:  # fmt: skip
        self._urls, self._key, self._timeout_s, self._label = tuple(urls), api_key, timeout_s, label
        self.lost_wait_s, self.tell, self._resolve = lost_wait_s, tell, resolve
        self.members: tuple[App, ...] = ()
        self._show: Show = _show_nobody
        self._look_up_every_s, self._last_lookup_s = look_up_every_s, 0.0
        self._addresses: dict[str, list[Address]] = {}
        self._stack = AsyncExitStack()

    @classmethod
    def of(
        cls, clients: Iterable[TaskAppClient], *, lost_wait_s: float = 0.0, tell: Tell = log_sentence
    ) -> Self:
        """Wrap clients that the caller opened and will close."""
        apps = cls((), SecretStr(""), timeout_s=0.0, lost_wait_s=lost_wait_s, tell=tell)
        apps.members = tuple(App(client) for client in clients)
        return apps

    async def __aenter__(self) -> Self:
        """Resolve all names, and ask each task app for its process."""
        try:
            await self.look_up()
            await asyncio.gather(*(self._meet(app) for app in self.members))
            self._drop_twins()
            self.refuse_if_none_answers()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def __len__(self) -> int:
        return len(self._clients)

    @overload
    def __getitem__(self, index: int) -> TaskAppClient: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TaskAppClient]: ...
    def __getitem__(self, index: int | slice) -> TaskAppClient | Sequence[TaskAppClient]:
        return self._clients[index]

    @property
    def _clients(self) -> tuple[TaskAppClient, ...]:
        return tuple(app.client for app in self.members if app.fault is None)

    def watch(self, show: Show) -> None:
        """Call `show` with each app now, and with one whose state changes from now on."""
        self._show = show
        for app in self.members:
            app.show = show
            show(app, app.state)

    async def look_up(self) -> None:
        """Update `members`. New addresses start with a fault, since they have not answered yet.

        A name that cannot be resolved keeps its addresses.
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
            app.retired = app.client.url not in addresses
        urls = {app.client.url for app in self.members}
        new = [await self._new(address) for url, address in addresses.items() if url not in urls]
        self.members = (*self.members, *new)

    async def refresh_names(self, join: Callable[[App], None]) -> None:
        """Resolve names at intervals, until cancelled, and call `join` for each new app."""
        while any(url.startswith(DNS) for url in self._urls):
            await asyncio.sleep(
                self._last_lookup_s + self._look_up_every_s - asyncio.get_running_loop().time()
            )
            members = self.members
            await self.look_up()
            for app in self.members:
                if app not in members:
                    join(app)

    def forget(self, app: App) -> None:
        """Drop an app whose name no longer leads to it."""
        self.members = tuple(member for member in self.members if member is not app)
        self._show(app, "gone")

    def is_twin(self, app: App) -> bool:
        """Return whether another address leads to the same process."""
        others = [other for other in self.members if other is not app and other.fault is None]
        return any(other.instance_id == app.instance_id != "" for other in others)

    def answers(self) -> str:
        """Join the last answers of all apps with a fault."""
        return "; ".join(app.fault for app in self.members if app.fault is not None)

    def refuse_if_none_answers(self) -> None:
        """Raise TaskAppLost with the last answers if no task app answers."""
        if not self._clients:
            raise TaskAppLost(f"no task app answers: {self.answers() or ', '.join(self._urls)}")

    async def _new(self, address: Address) -> App:
        client = TaskAppClient(address.url, self._key, timeout_s=self._timeout_s, name=address.name)
        fault = f"{address.url} has not answered yet"
        label = self._label
        if label and len(self._urls) > 1:
            label = f"{label}-{self._urls.index(address.url)}"
        app = App(await self._stack.enter_async_context(client), label, fault=fault)
        app.show = self._show
        app.show(app, app.state)
        return app

    async def _meet(self, app: App) -> None:
        try:
            await app.look(attempts=_AT_THE_START)
            app.fault = None
        except TaskAppLost as error:
            app.fault = str(error)

    def _drop_twins(self) -> None:
        distinct: list[App] = []
        for app in self.members:
            same = next((item for item in distinct if item.instance_id == app.instance_id != ""), None)
            if same is None:
                distinct.append(app)
            else:
                self.tell(f"{app.client.url} is the task app at {same.client.url}; it is asked once")
        self.members = tuple(distinct)
