"""Addresses of a job: the task apps behind services.task_url, and the parts of other http URLs.

`dns+http://name:port` stands for all addresses that the name has when it is looked up, as a headless service
of Kubernetes or a scaled service of Compose has them. A plain `http://name:port` is one task app, wherever
its name leads.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from shared_schemas.urls import is_http
from trainer_backend.errors import TaskAppError

DNS = "dns+"
_PORTS = {"http": 80, "https": 443}
_LOOK_UP_S = 5.0

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


@dataclass(frozen=True, slots=True)
class Address:
    """One task app.

    Attributes:
        url: what is connected to.
        name: `host` or `host:port` that it was looked up by; it is sent as Host, and a certificate must be
            for it. Empty for a URL that stands as it is.
    """

    url: str
    name: str = ""


async def addresses_of(host: str, port: int) -> Sequence[str]:
    """What the system's resolver knows, sorted: the order in which it answers changes."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for *_, address in found})


async def looked_up(url: str, resolve: Resolve = addresses_of) -> list[Address]:
    """The task apps that one entry of services.task_url stands for."""
    if not url.startswith(DNS):
        return [Address(url.rstrip("/"))]
    parts = urlsplit(url.removeprefix(DNS))
    host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
    try:
        async with asyncio.timeout(_LOOK_UP_S):
            found = await resolve(host, port)
    except (OSError, TimeoutError) as error:
        told = getattr(error, "strerror", None) or f"no answer within {_LOOK_UP_S:g} s"
        raise TaskAppError(f"{url}: the name {host!r} was not found: {told}") from error
    return [
        Address(f"{parts.scheme}://{f'[{ip}]' if ':' in ip else ip}:{port}", f"{host}:{port}") for ip in found
    ]


def fault_in(url: str) -> str | None:
    """Return the fault of an entry of services.task_url, as the end of a sentence; None: it is valid."""
    if "@" in url:
        return "holds a user name or password; the key belongs in the environment"
    try:
        parts = urlsplit(url.removeprefix(DNS))
        usable = parts.scheme in _PORTS and bool(parts.hostname) and parts.port != 0 and url == url.strip()
    except ValueError:
        usable = False
    if not usable:
        return (
            f"is {url!r}, which is no address of a task app: write http://host:port, or dns+http://name:port "
            "for all addresses of a name"
        )
    if url.startswith(DNS) and parts.path.strip("/"):
        return f"is {url!r}: the addresses of a name have no path"
    return None


def http_parts(url: str) -> SplitResult:
    """The parts of an http or https URL."""
    try:
        parts = urlsplit(url)
        usable = is_http(parts)
    except ValueError:
        usable = False
    if "@" in (parts.netloc if usable else url):
        raise ValueError("may not hold a user name or password; a key belongs in the environment")
    if not usable or url != url.strip():
        raise ValueError(
            f"is {shown(url)!r}, which is no http or https URL with a host, such as http://127.0.0.1:8000/v1"
        )
    return parts


def shown(url: str) -> str:
    """The URL without its query, which may hold a key."""
    return url.partition("?")[0]
