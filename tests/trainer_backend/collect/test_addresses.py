"""What an entry of services.task_url stands for, and who of them is asked."""

import asyncio
import socket
from collections.abc import Sequence

import pytest
from pydantic import SecretStr

from tests.trainer_backend.collect.scripted_task_app import Gated, ScriptedTaskApp, plan, served
from trainer_backend.collect.apps import TaskApps
from trainer_backend.collect.dispatcher import Dispatcher
from trainer_backend.collect.wire import TaskAppLost
from trainer_backend.errors import TaskAppError
from trainer_backend.job.addresses import Address, resolve_addresses

KEY = SecretStr("k")


class Names:
    """A resolver: what it answers can be changed."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: Sequence[str] | OSError = addresses
        self.asked: list[tuple[str, int]] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append((host, port))
        if isinstance(self.addresses, OSError):
            raise self.addresses
        return self.addresses


async def test_a_name_is_all_of_its_addresses_and_a_url_is_itself():
    names = Names("10.0.0.1", "fd00::2")
    assert await resolve_addresses("dns+http://apps:8001", names) == [
        Address("http://10.0.0.1:8001", "apps:8001"),
        Address("http://[fd00::2]:8001", "apps:8001"),
    ]
    assert await resolve_addresses("dns+https://apps", names) == [
        Address("https://10.0.0.1:443", "apps:443"),
        Address("https://[fd00::2]:443", "apps:443"),
    ]
    assert await resolve_addresses("http://apps:8001/", names) == [Address("http://apps:8001")]
    assert names.asked == [("apps", 8001), ("apps", 443)]


async def test_an_unknown_name_is_a_sentence():
    names = Names()
    names.addresses = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    with pytest.raises(TaskAppError, match=r"dns\+http://apps:8001: the name 'apps' was not found: Name or"):
        await resolve_addresses("dns+http://apps:8001", names)
    with pytest.raises(TaskAppLost, match=r"no task app answers: dns\+http://apps:8001"):
        async with TaskApps(["dns+http://apps:8001"], KEY, timeout_s=1, resolve=names, tell=str):
            raise AssertionError


async def test_a_task_app_that_has_two_addresses_is_asked_once():
    told: list[str] = []
    async with served(ScriptedTaskApp(instance="same")) as client:
        other = client.url.replace("127.0.0.1", "localhost")
        async with TaskApps([client.url, other], KEY, timeout_s=5, tell=told.append) as apps:
            assert [app.url for app in apps.members] == [client.url]
    assert told == [f"{other} is the task app at {client.url}; it is asked once"]


async def test_a_name_is_several_task_apps_and_those_that_it_loses_take_no_more_work():
    first, second, later = (
        Gated(instance="first"),
        Gated(instance="second"),
        ScriptedTaskApp(instance="later"),
    )
    names, joined = Names("127.0.0.1", "127.0.0.2"), asyncio.Event()

    def tell(sentence: str) -> None:
        if sentence.startswith("task app answers: http://127.0.0.3:"):
            joined.set()

    async with served(first) as client:
        port = int(client.url.rpartition(":")[2])
        async with (
            served(second, host="127.0.0.2", port=port),
            served(later, host="127.0.0.3", port=port),
            TaskApps(
                [f"dns+http://apps:{port}"], KEY,
                timeout_s=5, resolve=names, look_up_every_s=0.01, tell=tell,
            ) as apps,
        ):  # fmt: skip
            dispatcher = Dispatcher(apps, timeout_s=30, max_running=2)
            collecting = asyncio.ensure_future(dispatcher.collect(plan(0, 6)))
            names.addresses = ["127.0.0.3"]
            await joined.wait()
            first.gate.set()
            second.gate.set()
            found = await collecting
    assert [item.instance_id for item in found.rollouts] == ["first", "second", *["later"] * 4]
