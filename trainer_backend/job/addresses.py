"""Checks the URLs in a job, and resolves the entries of services.task_url to addresses of task apps.

`dns+http://name:port` stands for all addresses to which DNS resolves the name, such as those of a headless
service of Kubernetes or of a scaled service of Compose. Each of these addresses is a task app. A plain
`http://name:port` is a single task app.
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
    """The address of one task app."""

    url: str
    """The URL to connect to."""
    name: str = ""
    """The `host:port` whose DNS look-up gave this address; empty for a plain URL. It is sent as the Host
    header, and the TLS certificate must be valid for this host."""


async def look_up_host(host: str, port: int) -> Sequence[str]:
    """Return the IP addresses of a host from the system's resolver, sorted because their order varies."""
    answers = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for *_, address in answers})


async def resolve_addresses(url: str, resolve: Resolve = look_up_host) -> list[Address]:
    """Return the addresses of the task apps that one entry of services.task_url stands for.

    Raises TaskAppError if the name cannot be resolved in time.
    """
    if not url.startswith(DNS):
        return [Address(url.rstrip("/"))]
    parts = urlsplit(url.removeprefix(DNS))
    host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
    try:
        async with asyncio.timeout(_LOOK_UP_S):
            ips = await resolve(host, port)
    except (OSError, TimeoutError) as error:
        reason = getattr(error, "strerror", None) or f"no answer within {_LOOK_UP_S:g} s"
        raise TaskAppError(f"{url}: the name {host!r} was not found: {reason}") from error
    return [
        Address(f"{parts.scheme}://{f'[{ip}]' if ':' in ip else ip}:{port}", f"{host}:{port}") for ip in ips
    ]


def fault_in(url: str) -> str | None:
    """Return what is wrong with an entry of services.task_url, or None if the entry is valid.

    The text is the end of a sentence that begins with the name of the key.
    """
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
    """Split an http or https URL.

    Raises ValueError if the URL is not valid. The message is the end of a sentence that begins with the name
    of the key. It omits the parts of the URL that may contain a secret.
    """
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


def checked_url(url: str, key: str) -> str:
    """Return an http or https URL without a final slash.

    Raises ValueError, whose message begins with `key`, if the URL is not valid.
    """
    try:
        return http_parts(url).geturl().rstrip("/")
    except ValueError as error:
        raise ValueError(f"{key} {error}") from error


def shown(url: str) -> str:
    """Return the URL without its query, which may contain a secret key."""
    return url.partition("?")[0]
