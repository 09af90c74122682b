"""Where a request comes from: the service's own pages, a program, or another site's page. Pure.

A browser sends requests for any page that it shows, to any address that it reaches, also to services that
listen on this machine alone; and a name that its owner points at 127.0.0.1 makes such a page ours by origin.
"""

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from trainer_backend.jobfile.urls import is_loopback

# All of it: what a lenient reader passes over, such as the end of [::1]evil, is a part of a name to others.
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(?::[0-9]{1,5})?")
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


def names_this_machine(host: str) -> bool:
    """Whether a Host header names the loopback: any other name was pointed at this machine by somebody."""
    match = _HOST.fullmatch(host)
    return match is not None and is_loopback(match[1])


def is_cross_site(method: str, headers: Mapping[bytes, bytes]) -> bool:
    """Whether the page of another site has a browser send this; a link that a person follows counts as hers.

    Browsers say so themselves (Sec-Fetch-Site); of those that do not, Origin tells. Programs send neither.
    """
    site = headers.get(b"sec-fetch-site", b"").decode("latin-1")
    if site:
        followed = method in _SAFE and headers.get(b"sec-fetch-mode") == b"navigate"
        return site not in ("same-origin", "none") and not followed
    origin = headers.get(b"origin")
    if origin is None:
        return False
    return _place_of(origin.decode("latin-1")) != headers.get(b"host", b"").decode("latin-1").lower()


def _place_of(origin: str) -> str:
    """`host:port` as a Host header would say it; `null` and the like are nobody's."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
