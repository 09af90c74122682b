"""URLs of inference servers, as a person writes them. Pure."""

from urllib.parse import SplitResult, urlsplit

from shared_schemas.urls import is_http


def http_parts(url: str) -> SplitResult:
    """The parts of an http or https URL.

    Raises:
        ValueError: it is none, or has a user name or password in it; a clause that begins after its key. What
            may hold a secret is not repeated.
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


def shown(url: str) -> str:
    """The URL without its query, which may hold a key."""
    return url.partition("?")[0]
