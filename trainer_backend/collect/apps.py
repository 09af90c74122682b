"""The task apps of a job, over all its collections: which there are, which answer, what each can take."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self, overload
from urllib.parse import urlsplit

import structlog
from pydantic import SecretStr

from trainer_backend.collect.client import TaskAppClient
from trainer_backend.collect.wire import TaskAppLost
from trainer_backend.errors import TaskAppError
from trainer_backend.job.addresses import DNS, Address, Resolve, addresses_of, looked_up

log = structlog.get_logger("trainer")

_MANY = 1_000_000
_LEAST_WEIGHT = 1 / 64
# How often one is asked at the start, where it may just be starting too.
_AT_THE_START = 6

Tell = Callable[[str], None]


def logged(sentence: str) -> None:
    """Tells of task apps in the log, where nobody is there to be told."""
    log.warning("task_apps", told=sentence)


class App:
    """A task app as the trainer knows it.

    Attributes:
        lost: its last answer, if it does not answer as it should; None: it takes work.
        retired: its name does not lead to it any more; when it is lost, it is forgotten.
        instance_id: the process that answered last.
        at_most: rollouts that it runs at a time.
        weight: how many unfinished rollouts it has beside those of the other apps.
    """

    def __init__(self, client: TaskAppClient, label: str = "") -> None:
        self.client = client
        self.label = label or urlsplit(client.url).netloc
        self.lost: str | None = None
        self.retired = False
        self.instance_id = ""
        self.at_most = _MANY
        self.weight = 1.0

    def judge(self, *, finished: bool) -> None:
        """Note that a rollout has ended here while the other apps had work too.

        The weight grows with each that finished, and so as fast as the app is. Each that failed halves it: an
        app that fails whatever it gets has room all the time, and would take everything.
        """
        self.weight = self.weight + 1 if finished else max(self.weight / 2, _LEAST_WEIGHT)

    def judge_anew(self) -> None:
        """Give new answers more weight than old ones, at the start of a collection."""
        self.weight = (self.weight + 1) / 2

    async def look(self, *, attempts: int = 1) -> None:
        """Ask who it is."""
        about = await self.client.about(attempts=attempts)
        self.instance_id, self.at_most = about.service.instance_id, about.limits.max_concurrent_rollouts


class TaskApps(Sequence[TaskAppClient]):
    """Use as an async context manager. As a sequence: clients of the task apps that answer.

    Args:
        urls: entries of services.task_url.
        api_key: of all of them.
        timeout_s: deadline of one request.
        lost_wait_s: how long a collection waits when no task app answers.
        label: of the only one in metrics, if not its host and port.
        tell: is given a sentence when one is lost, and when it is back.
        resolve: looks a name up.
        look_up_every_s: how old an answer of `resolve` may be while rollouts are collected.
    """

    def __init__(
        self, urls: Sequence[str], api_key: SecretStr, *, timeout_s: float, lost_wait_s: float = 0.0,
        label: str = "", tell: Tell = logged, resolve: Resolve = addresses_of, look_up_every_s: float = 15.0,
    ) -> None:  # fmt: skip
        self._urls, self._key, self._timeout_s, self._label = tuple(urls), api_key, timeout_s, label
        self.lost_wait_s, self.tell, self._resolve = lost_wait_s, tell, resolve
        self.members: tuple[App, ...] = ()
        self._look_up_every_s, self._looked_up_s = look_up_every_s, 0.0
        self._found: dict[str, list[Address]] = {}
        self._stack = AsyncExitStack()

    @classmethod
    def of(cls, clients: Iterable[TaskAppClient], *, lost_wait_s: float = 0.0, tell: Tell = logged) -> Self:
        """Task apps whose clients are there already, and are closed by somebody else."""
        apps = cls((), SecretStr(""), timeout_s=0.0, lost_wait_s=lost_wait_s, tell=tell)
        apps.members = tuple(App(client) for client in clients)
        return apps

    async def __aenter__(self) -> Self:
        """Look all of them up, and ask each who it is."""
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
        return len(self._answering)

    @overload
    def __getitem__(self, index: int) -> TaskAppClient: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TaskAppClient]: ...
    def __getitem__(self, index: int | slice) -> TaskAppClient | Sequence[TaskAppClient]:
        return self._answering[index]

    @property
    def _answering(self) -> tuple[TaskAppClient, ...]:
        return tuple(app.client for app in self.members if app.lost is None)

    async def look_up(self) -> None:
        """Bring `members` up to date: new addresses come in as lost, for they have not answered yet.

        A name that cannot be looked up keeps the addresses that it had.
        """
        self._looked_up_s = asyncio.get_running_loop().time()
        for url in self._urls:
            try:
                self._found[url] = await looked_up(url, self._resolve)
            except TaskAppError as error:
                self._found.setdefault(url, [])
                self.tell(str(error))
        found = {address.url: address for addresses in self._found.values() for address in addresses}
        for app in self.members:
            app.retired = app.client.url not in found
        known = {app.client.url for app in self.members}
        new = [await self._new(address) for url, address in found.items() if url not in known]
        self.members = (*self.members, *new)

    async def keep_looking_up(self, found: Callable[[App], None]) -> None:
        """Look names up at intervals, until cancelled; `found` is called for each new app."""
        while any(url.startswith(DNS) for url in self._urls):
            await asyncio.sleep(self._looked_up_s + self._look_up_every_s - asyncio.get_running_loop().time())
            known = self.members
            await self.look_up()
            for app in self.members:
                if app not in known:
                    found(app)

    def forget(self, app: App) -> None:
        """Leave out one whose name leads elsewhere now."""
        self.members = tuple(member for member in self.members if member is not app)

    def is_twin(self, app: App) -> bool:
        """Whether another address has led to the same process already."""
        return any(
            other is not app and other.lost is None and other.instance_id == app.instance_id != ""
            for other in self.members
        )

    def answers(self) -> str:
        """What each of the lost ones said last."""
        return "; ".join(app.lost for app in self.members if app.lost is not None)

    def refuse_if_none_answers(self) -> None:
        """"""
        if not self._answering:
            raise TaskAppLost(f"no task app answers: {self.answers() or ', '.join(self._urls)}")

    async def _new(self, address: Address) -> App:
        client = TaskAppClient(address.url, self._key, timeout_s=self._timeout_s, name=address.name)
        app = App(await self._stack.enter_async_context(client), self._label)
        app.lost = f"{app.client.url} has not answered yet"
        return app

    async def _meet(self, app: App) -> None:
        try:
            await app.look(attempts=_AT_THE_START)
            app.lost = None
        except TaskAppLost as error:
            app.lost = str(error)

    def _drop_twins(self) -> None:
        seen: list[App] = []
        for app in self.members:
            same = next((item for item in seen if item.instance_id == app.instance_id != ""), None)
            if same is None:
                seen.append(app)
            else:
                self.tell(f"{app.client.url} is the task app at {same.client.url}; it is asked once")
        self.members = tuple(seen)
