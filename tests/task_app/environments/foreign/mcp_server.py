"""An MCP server with a game, made with the package `mcp`: `python mcp_server.py DESCRIPTOR`, or without one
over stdin and stdout.

Each session has its own number; a right guess pays 1 and ends the episode, a wrong one costs 0.1.
"""

import random
import sys
from typing import Any

import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("guess", log_level="CRITICAL")
numbers: dict[str, int] = {}


def name_session(context: Context[Any, Any]) -> str:
    return "" if context.headers is None else context.headers["mcp-session-id"]


@server.tool()
def start(seed: int, context: Context[Any, Any]) -> str:
    """Think of a number."""
    numbers[name_session(context)] = random.Random(seed).randint(0, 9)
    return "a number from 0 to 9"


@server.tool()
def guess(number: int, context: Context[Any, Any]) -> dict[str, Any]:
    """Guess the number."""
    own = numbers[name_session(context)]
    if number < 0:
        raise ToolError("there is no such number")
    right = number == own
    hint = "right" if right else "higher" if number < own else "lower"
    return {"hint": hint, "reward": 1.0 if right else -0.1, "done": right}


if __name__ == "__main__":
    if len(sys.argv) == 1:
        server.run()
    else:
        uvicorn.run(server.streamable_http_app(), fd=int(sys.argv[1]), log_level="critical")
