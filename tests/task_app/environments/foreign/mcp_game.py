"""The game of mcp_server.py over stdin and stdout, without the package `mcp`, which is slow to import."""

import json
import random
import sys
from typing import Any

from mcp_child import answer


def tool(name: str, argument: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {argument: {"type": "integer"}}, "required": [argument]}
    return {"name": name, "inputSchema": schema}


class Game:
    """A right guess pays 1 and ends the episode, a wrong one costs 0.1."""

    own = 0

    def call(self, name: str, arguments: dict[str, int]) -> dict[str, Any]:
        if name == "start":
            self.own = random.Random(arguments["seed"]).randint(0, 9)
            return {"content": [{"type": "text", "text": "a number from 0 to 9"}]}
        number = arguments["number"]
        if number < 0:
            return {"isError": True, "content": [{"type": "text", "text": "there is no such number"}]}
        hint = "right" if number == self.own else "higher" if number < self.own else "lower"
        reply = {"hint": hint, "reward": 1.0 if hint == "right" else -0.1, "done": hint == "right"}
        return {"content": [{"type": "text", "text": json.dumps(reply)}], "structuredContent": reply}


if __name__ == "__main__":
    game = Game()
    for line in sys.stdin:
        asked = json.loads(line)
        asked.setdefault("params", {})
        if asked["method"] == "tools/call":
            answer(asked["id"], game.call(asked["params"]["name"], asked["params"]["arguments"]))
        elif "id" in asked:
            tools = {"tools": [tool("start", "seed"), tool("guess", "number")]}
            answer(asked["id"], tools if asked["method"] == "tools/list" else {})
