"""Pure: the inference_url of a request -> the address to POST to, if the operator allows its host."""

from collections.abc import Collection
from urllib.parse import SplitResult, urlsplit, urlunsplit

from shared_schemas.urls import PORTS, is_http
from task_app.errors import HostNotAllowed, InvalidRequest

CHAT_PATH = "/v1/chat/completions"
# In the policy's config.
_WHERE = "inference_url"


def chat_completions_url(inference_url: str, *, allowed_hosts: Collection[str] | None) -> str:
    """Complete an OpenAI-compatible base URL; a query (routing keys live there) is kept.

        http://h:1            -> http://h:1/v1/chat/completions
        http://h:1/v1         -> http://h:1/v1/chat/completions
        http://h:1/v1/chat    -> http://h:1/v1/chat/completions
        http://h:1/x?cid=7    -> http://h:1/x/v1/chat/completions?cid=7

    Args:
        inference_url: as the caller wrote it.
        allowed_hosts: `host` (any port) or `host:port`; None allows any.

    Raises:
        InvalidRequest: not an http(s) URL with a host, or one with a user name or password in it.
        HostNotAllowed: the host is not on the list.
    """
    parts = _split(inference_url)
    if allowed_hosts is not None:
        _check_host(parts, allowed_hosts)
    return urlunsplit((parts.scheme, parts.netloc, _full_path(parts.path), parts.query, ""))


def _split(inference_url: str) -> SplitResult:
    try:
        parts = urlsplit(inference_url)
        usable = is_http(parts)
    except ValueError:
        usable = False
    if not usable or inference_url != inference_url.strip():
        raise InvalidRequest(
            "inference_url is no http or https URL with a host",
            where=_WHERE,
            hint="for example http://127.0.0.1:8100/v1",
        )
    if "@" in parts.netloc:
        raise InvalidRequest(
            "inference_url may not hold a user name or password", where=_WHERE, hint="use inference_key"
        )
    return parts


def _check_host(parts: SplitResult, allowed_hosts: Collection[str]) -> None:
    host = (parts.hostname or "").lower()
    port = parts.port or PORTS[parts.scheme]
    spelled = f"[{host}]" if ":" in host else host
    allowed = {name.lower() for name in allowed_hosts}
    if allowed.isdisjoint({host, spelled, f"{spelled}:{port}"}):
        raise HostNotAllowed(
            f"inference host {spelled}:{port} is not on this task app's list; "
            f"allowed: {', '.join(sorted(allowed)) or 'none'}",
            where=_WHERE,
            hint="the operator extends it with TURNWISE_ALLOWED_INFERENCE_HOSTS=host[:port],...",
        )


def _full_path(path: str) -> str:
    base = path.rstrip("/")
    for ending, rest in (("/chat/completions", ""), ("/chat", "/completions"), ("/v1", "/chat/completions")):
        if base.endswith(ending):
            return base + rest
    return base + CHAT_PATH
