"""URLs of inference servers, as a person writes them. Pure."""

import ipaddress
from urllib.parse import SplitResult, urlsplit

PORTS = {"http": 80, "https": 443}


def http_parts(url: str) -> SplitResult:
    """The parts of an http or https URL.

    Raises:
        ValueError: it is none, or has a user name or password in it; a clause that begins after its key. What
            may hold a secret is not repeated.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in PORTS and bool(parts.hostname) and parts.port != 0 and _is_plain(parts)
    except ValueError:
        usable = False
    if "@" in (parts.netloc if usable else url):
        raise ValueError("may not hold a user name or password; a key belongs in the environment")
    if not usable or url != url.strip():
        raise ValueError(
            f"is {shown(url)!r}, which is no http or https URL with a host, such as http://127.0.0.1:8000/v1"
        )
    return parts


def _is_plain(parts: SplitResult) -> bool:
    """Whether the address is what `hostname` and `port` say, and nothing that another parser reads otherwise:
    of `[::1]evil.example` urlsplit says the host is ::1."""
    host = parts.netloc.rpartition("@")[2].lower()
    spelled = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return host in (spelled, f"{spelled}:", f"{spelled}:{parts.port}")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def shown(url: str) -> str:
    """The URL without its query, which may hold a key."""
    return url.partition("?")[0]
