"""`mcp:URL` and `mcp:NAME`: an environment made of the tools of an MCP server.

A NAME is an entry of the operator's file of servers: a process, or a URL with headers. Each episode is a new
session of the server. Each call of a tool is one `tools/call` request.

Three objects of a result are searched for the keys `reward` and `done`, or the keys that the config names
instead: first `structuredContent`, then `_meta`, then the result's text if it is a JSON object with a numeric
reward. Each key is read from the first object that contains it. A missing reward is 0; a true `done` ends the
episode. A call whose result has `isError`, or whose arguments the server refuses, is a no-op.

MCP has neither seeds nor snapshots. If the server has a tool that takes a seed, the config can name it as
`reset_tool`: it is called at each reset, and by default not offered to the model.

Source: modelcontextprotocol.io/specification/2025-06-18, server/tools.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlunsplit

from pydantic import JsonValue
from pydantic_core import from_json

from shared_schemas.base import StrictReply
from shared_schemas.json_text import RepeatedKey, read_typed
from shared_schemas.messages import ToolSpec
from shared_schemas.prefixes import PREFIXES
from task_app.environments.foreign.configs import McpConfig
from task_app.environments.foreign.environment import ForeignEnvironment, remote_environment
from task_app.environments.foreign.mcp_links import INITIALIZE, HttpLink, Link, ProcessLink
from task_app.environments.foreign.mcp_servers import McpServer
from task_app.environments.foreign.peer import Call, ForeignFailed, Shown
from task_app.environments.foreign.wire import checked_url
from task_app.environments.foreign.words import mcp_tool, result_text, typed
from task_app.errors import InvalidRequest, clipped
from task_app.settings import Reach

# The protocol version that is requested, and the versions with which a server may answer.
VERSION = "2025-06-18"
VERSIONS = ("2024-11-05", "2025-03-26", VERSION, "2025-11-25")
_INVALID_PARAMS = -32602
_MAX_PAGES = 100


def mcp_environment(argument: str, config: McpConfig, reach: Reach) -> ForeignEnvironment:
    name = f"mcp:{argument}"
    connect: Callable[[], Link]
    is_secret = False
    if "://" in argument:
        connect = partial(HttpLink, name, urlunsplit(checked_url(argument, reach)), reach)
    else:
        server = _find_server(argument, reach)
        connect = partial(ProcessLink, name, server, reach)
        if server.command is None and server.url is not None:
            # A URL in the operator's file needs no other permission. It may contain secrets, as headers may.
            connect, is_secret = partial(HttpLink, name, server.url, reach, headers=server.headers), True
    return remote_environment(name, McpPeer(name, connect, config), config, is_secret=is_secret)


def _find_server(argument: str, reach: Reach) -> McpServer:
    server = reach.mcp_servers.get(argument)
    if server is None:
        raise InvalidRequest(
            f"{clipped(argument)!r} is no URL, and no MCP server that this task app knows; "
            f"it knows {', '.join(sorted(reach.mcp_servers)) or 'none'}",
            where="env_name",
            hint=f"a URL is one as in mcp:http://127.0.0.1:9000/mcp; {PREFIXES['mcp'].how}",
        )
    if server.why_not:
        raise InvalidRequest(
            f"MCP server {clipped(argument)!r} {server.why_not}",
            where="env_name",
            hint="the operator's file TURNWISE_MCP_SERVERS says so",
        )
    return server


# Keys of a result. Their values are objects that may contain the reward and the end of the episode.
_FACTS = ("structuredContent", "_meta")


class _RpcError(StrictReply):
    code: JsonValue = None
    message: JsonValue = None


class _Answer(StrictReply):
    error: _RpcError | None = None
    result: dict[str, JsonValue] | None = None


class _Initialized(StrictReply):
    protocolVersion: str = VERSION


class _Listed(StrictReply):
    tools: list[JsonValue] | None = None
    nextCursor: str | None = None


class _Result(StrictReply):
    isError: bool | None = None


class _Facts(StrictReply):
    """The reward of a call, and whether the call ended the episode."""

    reward: float | None = None
    done: bool | None = None


class Refused(Exception):
    """Raised if the server refuses the arguments of a tool call."""


class McpPeer:
    """Makes an environment of an MCP server's tools. `connect` opens a new session for each episode."""

    def __init__(self, name: str, connect: Callable[[], Link], config: McpConfig) -> None:
        self._name = name
        self._connect = connect
        self._config = config
        self._link: Link | None = None
        self._count = 0
        self._is_fresh = False

    def open(self) -> tuple[ToolSpec, ...]:
        self._begin()
        tools = [mcp_tool(described, self._name) for described in self._list_tools()]
        names = [spec.function.name for spec in tools]
        config = self._config
        for missing in {*config.tools, *filter(None, [config.reset_tool])} - set(names):
            raise InvalidRequest(
                f"{self._name} has no tool {missing!r}; it has {names}", where="config.tools"
            )
        offered = config.tools or [name for name in names if name != config.reset_tool]
        if not offered:
            raise ForeignFailed(f"{self._name} offers no tools (result.tools)")
        return tuple(spec for spec in tools if spec.function.name in offered)

    def reset(self, seed: int) -> Shown:
        if not self._is_fresh:
            self.close()
            self._begin()
        self._is_fresh = False
        texts = [self._config.task]
        if self._config.reset_tool is not None:
            shown = self._call(Call(self._config.reset_tool, {"seed": seed}))
            if shown.refused or shown.terminated:
                what = f"{self._name}: {self._config.reset_tool} fails"
                raise ForeignFailed(f"{what}: {shown.refused or 'done'}", unquoted=what)
            texts.append(shown.text)
        return Shown("\n\n".join(filter(None, texts)))

    def carry_out(self, calls: Sequence[Call]) -> Iterator[Shown]:
        return map(self._call, calls)

    def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _begin(self) -> None:
        self._link = self._connect()
        info = {"name": "turnwise", "version": "1"}
        params = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": info}
        reply = typed(_Initialized, self._request(INITIALIZE, params), self._where(INITIALIZE))
        if reply.protocolVersion not in VERSIONS:
            ours = f"of MCP; Turnwise speaks {', '.join(VERSIONS)} (protocolVersion)"
            raise ForeignFailed(
                f"{self._name} speaks version {clipped(reply.protocolVersion, 300)} {ours}",
                unquoted=f"{self._name} speaks another version {ours}",
            )
        self._link.tell({"jsonrpc": "2.0", "method": "notifications/initialized"})
        self._is_fresh = True

    def _list_tools(self) -> Iterator[Any]:
        """Yield the server's tools from all pages of its list."""
        params: dict[str, Any] = {}
        for _ in range(_MAX_PAGES):
            listed = typed(_Listed, self._request("tools/list", params), self._where("tools/list"))
            yield from listed.tools or ()
            if not listed.nextCursor:
                return
            params = {"cursor": listed.nextCursor}
        raise ForeignFailed(f"{self._name} lists tools without an end")

    def _call(self, call: Call) -> Shown:
        try:
            result = self._request("tools/call", {"name": call.tool, "arguments": dict(call.arguments)})
        except Refused as exc:
            return Shown("", refused=str(exc))
        text = result_text(result, self._name)
        if typed(_Result, result, self._where("tools/call")).isError:
            return Shown("", refused=text or "the tool failed")
        keys = self._config
        places = [*map(result.get, _FACTS), _read_paying_text(text, keys.reward_key, self._name)]
        values = {"reward": _find_value(places, keys.reward_key), "done": _find_value(places, keys.done_key)}
        facts = typed(_Facts, values, f"{self._name}, what a call of {call.tool} pays")
        return Shown(
            text,
            {name: result[name] for name in _FACTS if name in result},
            reward=facts.reward or 0.0,
            terminated=bool(facts.done),
        )

    def _request(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return its result.

        Raises Refused if the server finds the parameters of a tool call invalid, and ForeignFailed for any
        other error.
        """
        assert self._link is not None, "the peer is open"
        self._count += 1
        request = {"jsonrpc": "2.0", "id": self._count, "method": method, "params": params}
        answer = typed(_Answer, self._link.ask(request), self._where(method))
        if answer.error is not None:
            code = answer.error.code
            message = f"{clipped(str(answer.error.message), 300)} ({clipped(str(code))})"
            if method == "tools/call" and code == _INVALID_PARAMS:
                raise Refused(message)
            what = f"{self._name} answered an error to {method}"
            known = code if isinstance(code, int) else "no code"
            raise ForeignFailed(f"{what}: {message}", unquoted=f"{what}: {known}")
        if answer.result is None:
            raise ForeignFailed(f"{self._where(method)}: result is missing; an answer has it, or an error")
        return answer.result

    def _where(self, method: str) -> str:
        return f"{self._name}, the answer to {method}"


def _find_value(places: Sequence[Any], key: str) -> Any:
    """Return the value of `key` in the first object of `places` that contains it; None if none does."""
    return next((place[key] for place in places if isinstance(place, dict) and key in place), None)


def _read_paying_text(text: str, reward_key: str, name: str) -> Any:
    """Parse the text of a result if it is a JSON object whose `reward_key` is a number; else return None.

    Such texts are read because a tool without an output schema can give a reward only in its text. Raises
    ForeignFailed if the object contains a key twice.
    """
    try:
        value = from_json(text) if text.startswith("{") else None
    except ValueError:
        return None
    reward = value.get(reward_key) if isinstance(value, dict) else None
    if not isinstance(reward, int | float) or isinstance(reward, bool):
        return None
    try:
        return read_typed(from_json, text.encode())
    except RepeatedKey as exc:
        what = f"{name}, the text of a result that pays"
        raise ForeignFailed(f"{what}: {exc}", unquoted=f"{what}: a key comes twice") from exc
