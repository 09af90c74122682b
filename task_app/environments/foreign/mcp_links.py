"""Transports to an MCP server: streamable HTTP, or the stdin and stdout of a child process.

Source: modelcontextprotocol.io/specification/2025-06-18, basic/transports.
"""

from collections.abc import Mapping
from typing import Any

from service_kit.replies import show_found
from task_app.environments.foreign.child import START_S, Child
from task_app.environments.foreign.mcp_servers import McpServer
from task_app.environments.foreign.peer import ForeignFailed
from task_app.environments.foreign.wire import CLOSE_S, Http, parse_json
from task_app.settings import Reach

INITIALIZE = "initialize"
_SESSION = "mcp-session-id"
_MOST_HEADER = 1_000
_METHOD_NOT_FOUND = -32601
_EVENTS = (b"event:", b"data:", b"id:", b"retry:", b":")


class HttpLink:
    """One session of an MCP server over streamable HTTP. Every request is sent with `headers`."""

    def __init__(
        self, name: str, url: str, reach: Reach, *, headers: Mapping[str, str] | None = None
    ) -> None:
        self._name = name
        self._url = url
        self._http = Http(name, reach)
        self._http.client.headers.update(headers or {})
        self._http.client.headers["accept"] = "application/json, text/event-stream"

    def ask(self, request: Mapping[str, Any]) -> Any:
        """Send a JSON-RPC request, which contains an id and a method, and return its answer."""

        def ends(content: bytes) -> bool:
            return content.startswith(_EVENTS) and _find_answer(content, self._name) is not None

        response, content = self._http.send("POST", self._url, body=request, ends=ends)
        answer = _find_answer(content, self._name)
        if answer is None:
            answer = parse_json(content, self._name)
        _refuse_other(answer, request, self._name)
        if request["method"] == INITIALIZE:
            self._keep_headers(response.headers, request, answer)
        return answer

    def tell(self, notification: Mapping[str, Any]) -> None:
        self._http.send("POST", self._url, body=notification)

    def close(self) -> None:
        """Ask the server to end the session. A failure is ignored: a server may refuse this request."""
        try:
            if _SESSION in self._http.client.headers:
                self._http.send("DELETE", self._url, deadline_s=CLOSE_S)
        except ForeignFailed:
            pass
        finally:
            self._http.close()

    def _keep_headers(self, headers: Mapping[str, str], request: Mapping[str, Any], answer: Any) -> None:
        """Add the session id and the protocol version to the headers of all later requests.

        Raises ForeignFailed if a value cannot be a header.
        """
        result = answer.get("result") if isinstance(answer, dict) else None
        version = result.get("protocolVersion") if isinstance(result, dict) else None
        names = {"mcp-protocol-version": "protocolVersion", _SESSION: f"header {_SESSION}"}
        values = {"mcp-protocol-version": version or request["params"]["protocolVersion"]}
        for header, value in (
            values | ({_SESSION: headers[_SESSION]} if _SESSION in headers else {})
        ).items():
            if not isinstance(value, str) or not value.isascii() or len(value) > _MOST_HEADER:
                what = f"{self._name}: {names[header]}"
                allowed = f"a text of at most {_MOST_HEADER} ASCII characters"
                raise ForeignFailed(
                    f"{what} is {show_found(value)}; {allowed}", unquoted=f"{what}: {allowed}"
                )
            self._http.client.headers[header] = value


class ProcessLink:
    """One session of an MCP server that runs as a child process; the session ends with the process."""

    def __init__(self, name: str, server: McpServer, reach: Reach) -> None:
        assert server.command is not None, "one without a command is remote"
        self._name, self._reach = name, reach
        self._child = Child(
            name, [server.command, *server.args], reach,
            source="TURNWISE_MCP_SERVERS", variables=server.env, folder=server.cwd,
        )  # fmt: skip

    def ask(self, request: Mapping[str, Any]) -> Any:
        deadline_s = self._reach.environment_deadline_s
        if request["method"] == INITIALIZE:
            deadline_s = max(START_S, deadline_s)
        self._child.tell(request)
        lines = self._child.lines(deadline_s)
        while True:
            message = next(lines)
            if isinstance(message, dict) and "method" in message:
                self._answer(message)
            else:
                _refuse_other(message, request, self._name)
                return message

    def tell(self, notification: Mapping[str, Any]) -> None:
        self._child.tell(notification)

    def close(self) -> None:
        self._child.close(grace_s=CLOSE_S)

    def _answer(self, message: Mapping[str, Any]) -> None:
        """Answer a message of the server if it is a request; ignore a notification, which has no id."""
        if "id" not in message:
            return
        answer: dict[str, Any] = (
            {"result": {}}
            if message["method"] == "ping"
            else {"error": {"code": _METHOD_NOT_FOUND, "message": "Turnwise has no such method"}}
        )
        self._child.tell({"jsonrpc": "2.0", "id": message["id"], **answer})


Link = HttpLink | ProcessLink


def _refuse_other(message: Any, request: Mapping[str, Any], name: str) -> None:
    """Raise ForeignFailed unless `message` has the id of `request`, or is an error without an id."""
    if not isinstance(message, dict):
        return  # McpPeer refuses such a message
    answer_id, request_id = message.get("id"), request["id"]
    # JSON-RPC: if the server cannot read the request's id, its error has no id.
    is_error = answer_id is None and message.get("error") is not None
    if is_error or (type(answer_id) is int and answer_id == request_id):
        return
    what = f"{name}, the answer to {request['method']}: id"
    found = show_found(answer_id) if "id" in message else "missing"
    allowed = f"it should be {request_id}, that of the request"
    raise ForeignFailed(f"{what} is {found}; {allowed}", unquoted=f"{what}: {allowed}")


def _find_answer(content: bytes, name: str) -> Any:
    """Return the first answer in a stream of server-sent events, or None if no answer has arrived yet."""
    for event in content.replace(b"\r\n", b"\n").split(b"\n\n")[:-1]:
        lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
        if not any(lines):
            continue
        message = parse_json(b"\n".join(lines), name)
        if not isinstance(message, dict) or "method" not in message:
            return message
    return None
