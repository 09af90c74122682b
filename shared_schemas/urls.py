"""Hosts and addresses as people and browsers write them. Pure."""

import ipaddress
import re
from urllib.parse import SplitResult

PORTS = {"http": 80, "https": 443}
# A name, or an IPv4 address, or an IPv6 one in brackets; with or without a port. All of it: what only begins
# like one ([::1]evil.example) would match another host than it seems to name.
_NAME, _BRACKETED, _PORT = r"[\w.-]+", r"\[[0-9A-Fa-f:.]+\]", r":[0-9]{1,5}"
HOST = rf"({_BRACKETED}|{_NAME})({_PORT})?"
# Where a person writes it, an IPv6 address may also stand without brackets.
HOST_OR_IPV6 = rf"^({HOST}|[0-9A-Fa-f]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*)$"


def host_name(host: str) -> str | None:
    """The name or address in a Host header, without the port; None: it holds something else."""
    match = re.fullmatch(HOST, host)
    return None if match is None else match[1]


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the host."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_http(parts: SplitResult) -> bool:
    """Whether these are the parts of an http or https URL whose host every parser reads alike.

    Of `[::1]evil.example`, urlsplit says that the host is ::1.

    Raises:
        ValueError: the port is none.
    """
    host = parts.netloc.rpartition("@")[2].lower()
    spelled = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    plain = host in (spelled, f"{spelled}:", f"{spelled}:{parts.port}")
    return parts.scheme in PORTS and bool(parts.hostname) and parts.port != 0 and plain
