"""Parsing of hosts and URLs. Pure."""

import ipaddress
from collections.abc import Iterable
from urllib.parse import SplitResult, urlsplit

PORTS = {"http": 80, "https": 443}
LOOPBACK = ("127.0.0.1", "localhost", "::1")
# A name, an IPv4 address, or an IPv6 address in brackets, with or without a port. Use it with fullmatch:
# [::1]evil.example begins like an address, but is another host.
_NAME, _IPV6, _PORT = r"[\w.-]+", r"\[[0-9A-Fa-f:.]+\]", r":[0-9]{1,5}"
HOST = rf"({_IPV6}|{_NAME})({_PORT})?"
# Also accepts an IPv6 address without brackets, as people write it.
HOST_OR_IPV6 = rf"^({HOST}|[0-9A-Fa-f]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*)$"


def is_loopback(host: str) -> bool:
    """Whether the host is a loopback address or `localhost`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_wildcard(host: str) -> bool:
    """Whether a server on this host listens on all addresses of its machine, as on `0.0.0.0`."""
    try:
        return not host or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False  # a name


def is_http(parts: SplitResult) -> bool:
    """Whether a split URL has the scheme http or https, and a host that cannot be misread.

    `urlsplit` itself accepts a host like `[::1]evil.example`. Raises ValueError if the port is invalid.
    """
    host = parts.netloc.rpartition("@")[2].lower()
    written = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    plain = host in (written, f"{written}:", f"{written}:{parts.port}")
    return parts.scheme in PORTS and bool(parts.hostname) and parts.port != 0 and plain


def split_http(url: str) -> SplitResult | None:
    """Split an http or https URL; None if the URL is invalid or has blanks around it."""
    try:
        parts = urlsplit(url)
        return parts if is_http(parts) and url == url.strip() else None
    except ValueError:
        return None


def host_and_port(parts: SplitResult) -> str:
    """Return `host:port` of an http or https URL in lower case, with an IPv6 address in brackets."""
    host = (parts.hostname or "").lower()
    return f"{f'[{host}]' if ':' in host else host}:{parts.port or PORTS[parts.scheme]}"


def is_listed(parts: SplitResult, hosts: Iterable[str]) -> bool:
    """Whether `hosts` contains the URL's host, as `host` (for any port) or as `host:port`.

    An IPv6 address without port may lack its brackets.
    """
    name = host_and_port(parts)
    forms = {(parts.hostname or "").lower(), name.rpartition(":")[0], name}
    return not forms.isdisjoint(host.lower() for host in hosts)
