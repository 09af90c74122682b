"""An MCP server of a process by hand: `python mcp_child.py HOW [FILE]` says how it answers its first call.

FILE is written when its stdin closes, or as HOW says. HOW `game` is the game of mcp_server.py, without the
package `mcp`, which is slow to import.
"""

import itertools
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any


def tool(name: str, argument: str, **schema: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {argument: schema}, "required": [argument]}
    return {"name": name, "inputSchema": parameters}


def say(text: str) -> None:
    print(text, flush=True)


def answer(request_id: Any, result: Any) -> None:
    say(json.dumps({"jsonrpc": "2.0", "id": request_id, "result": result}))


def pays(request_id: Any, reward: float = 1.0) -> None:
    content = [{"type": "text", "text": "at: 1"}]
    answer(request_id, {"content": content, "structuredContent": {"reward": reward}})


def asks_before(request_id: Any) -> None:
    """It asks the client twice, tells it something, and pays 1 if the answers are those of a client.

    The blank line is no message.
    """
    say("")
    say(json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {}}))
    say(json.dumps({"jsonrpc": "2.0", "id": "alive", "method": "ping"}))
    alive = json.loads(sys.stdin.readline())
    say(json.dumps({"jsonrpc": "2.0", "id": request_id, "method": "sampling/createMessage", "params": {}}))
    model = json.loads(sys.stdin.readline())
    right = alive == {"jsonrpc": "2.0", "id": "alive", "result": {}} and model["error"]["code"] == -32601
    pays(request_id, float(right))


def only_tells(request_id: Any) -> None:
    for number in itertools.count():
        say(
            json.dumps({"jsonrpc": "2.0", "method": "notifications/progress", "params": {"progress": number}})
        )
        time.sleep(0.02)


def reads_no_more(request_id: Any) -> None:
    pays(request_id)
    time.sleep(60)


def floods(request_id: Any) -> None:
    """It prints 20 MB to stderr before it pays, and a word before it reads on."""
    for _ in range(2_000):
        os.write(2, b"." * 9_999 + b"\n")
    pays(request_id)
    os.write(2, b"\nhas paid\n")


def shows_its_place(request_id: Any) -> None:
    """It pays 1 if it has the variables and the folder of its entry, and no key of ours."""
    here = os.environ.get("HERE") == os.getcwd()
    pays(request_id, float(here and "ENVIRONMENT_API_KEY" not in os.environ))


def goes_at_a_signal(request_id: Any) -> None:
    """It outlives its stdin, and writes FILE at a SIGTERM."""

    def left(*_: Any) -> None:
        Path(sys.argv[2]).write_text("told")
        os._exit(0)

    signal.signal(signal.SIGTERM, left)
    pays(request_id)
    time.sleep(60)


def ignores_a_signal(request_id: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pays(request_id)
    time.sleep(60)


HOWS = {
    "goes_at_a_signal": goes_at_a_signal,
    "ignores_a_signal": ignores_a_signal,
    "did_not_read": lambda request_id: say('{"jsonrpc": "2.0", "id": null, "error": {"message": "what?"}}'),
    "shows": shows_its_place,
    "reads_no_more": reads_no_more,
    "asks": asks_before,
    "floods": floods,
    "hangs": lambda request_id: time.sleep(60),
    "only_tells": only_tells,
    "closes": lambda request_id: sys.exit(),
    "large": lambda request_id: say("x" * 100_000_000),
}


class Game:
    """A right guess pays 1 and ends the episode, a wrong one costs 0.1."""

    own = 0

    def answer(self, request_id: Any, call: Any) -> None:
        ((_, number),) = call["arguments"].items()
        if call["name"] == "start":
            self.own = random.Random(number).randint(0, 9)
            answer(request_id, {"content": [{"type": "text", "text": "a number from 0 to 9"}]})
        elif number < 0:
            told = {"type": "text", "text": "there is no such number"}
            answer(request_id, {"isError": True, "content": [told]})
        else:
            hint = "right" if number == self.own else "higher" if number < self.own else "lower"
            reply = {"hint": hint, "reward": 1.0 if hint == "right" else -0.1, "done": hint == "right"}
            text = {"type": "text", "text": json.dumps(reply)}
            answer(request_id, {"content": [text], "structuredContent": reply})


def main(how: str, file: str | None = None) -> None:
    game, tools = Game(), [tool("step", "move")]
    if how == "game":
        tools = [tool("start", "seed", type="integer"), tool("guess", "number", type="integer")]
    results: dict[str, Any] = {"tools/list": {"tools": tools}}
    if how == "newer":
        results["initialize"] = {"protocolVersion": "2099-01-01"}
    methods = []
    for line in sys.stdin:
        asked = json.loads(line)
        methods.append(asked["method"])
        if asked["method"] == "tools/call" and how == "game":
            game.answer(asked["id"], asked["params"])
        elif asked["method"] == "tools/call":
            HOWS[how](asked["id"])
        elif "id" in asked:
            answer(asked["id"], results.get(asked["method"], {}))
    if file is not None:
        Path(file).write_text("left" if how != "newer" else " ".join(methods))


if __name__ == "__main__":
    main(*sys.argv[1:])
