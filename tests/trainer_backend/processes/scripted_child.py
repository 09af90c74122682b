"""Stands in for the process of a gateway or the learner: a test copies it as `sitecustomize.py`.

It needs no torch. What it does is named by SCRIPT. Files in its own folder are how it and the test wait
for each other.
"""

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from importlib.metadata import version
from pathlib import Path
from socketserver import ThreadingTCPServer

HERE, SCRIPT = Path(__file__).parent, os.environ.get("SCRIPT", "")
RESULTS = {"totals": {"requests": 3}, "verify": []}


def tell(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def end(code: int, word: str) -> None:
    os.write(2, f"{word}\n".encode())
    os._exit(code)


def wait_for(name: str) -> None:
    while not (HERE / name).exists():
        time.sleep(0.01)


def is_first(name: str) -> bool:
    """Whether nothing of this name was done before, by any process."""
    try:
        (HERE / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def error(code: str, detail: str) -> str:
    body = {"classes": ["EngineStopped"], "code": code, "detail": detail}
    return f"error {json.dumps(body)}\n"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(json.dumps({"version": version("turnwise")}))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        name = self.path.removeprefix("/calls/")
        if name == "serve":
            self.serve(json.loads(body)[0]["version"]["number"])
        elif name == "load" and self.load(json.loads(body)[0]["number"]):
            return
        elif name == "probe" and SCRIPT == "wedges" and is_first("wedged"):
            wait_for("never")
        elif (
            name == "totals" and SCRIPT == "no first totals" and any(is_first(f"asked_{n}") for n in range(5))
        ):
            self.close_connection = True
            return
        elif name == "move_server":
            (HERE / "moves").write_bytes(body)
        elif name == "publish":
            tell("x" * 2_000_000)  # more than pipe and reader hold
        self.answer(f"result [{json.dumps(RESULTS.get(name))}]\n")
        if name == "save":
            self.wfile.flush()
            end(7, "its last words")

    def serve(self, number: int) -> None:
        with (HERE / "starts").open("a") as starts:
            starts.write(f"{number}\n")
        if SCRIPT in ("answers after its end", "hears of moves") and not is_first("began"):
            wait_for("ready")
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        events = [{"kind": "serving", "text": "http://127.0.0.1:1"}]
        events += [{"kind": "answered"}] * (SCRIPT == "dies in loads")
        for event in events:
            self.wfile.write(f"progress {json.dumps([event])}\n".encode())
        wait_for("broken")
        self.wfile.write(error("engine_stopped", "its engine has failed").encode())
        self.wfile.flush()
        end(3, "its engine has failed")

    def load(self, number: int) -> bool:
        """Whether it has answered."""
        if SCRIPT == "dies in loads":
            end(9, f"no memory for version {number}")
        elif SCRIPT == "outlives its engine" and not (HERE / "ended").exists():
            self.answer(error("engine_stopped", "its process has ended"))
            self.wfile.flush()
            is_first("answered")
            if (HERE / "end").exists() and is_first("ended"):
                end(1, "the engine's process has ended")
            return True
        elif SCRIPT == "breaks in loads":
            (HERE / "broken").touch()
            wait_for("never")
        elif SCRIPT == "answers after its end":
            if os.fork():
                end(9, "killed")
            os.setsid()  # what a process leaves behind is killed by its group
            os.close(1)
            wait_for("answer")
            self.answer("result [null]\n")
            os._exit(0)
        return False

    def answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: the last line of the log is a script's own."""


def end_with_the_test() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if {"trainer_backend.processes.gateway_process", "trainer_backend.learner.process"} & set(sys.orig_argv):
    if "WORLD_SIZE" in os.environ:
        end(2, "it would look for other ranks")
    threading.Thread(target=end_with_the_test, daemon=True).start()
    server = ThreadingTCPServer(("127.0.0.1", 0), Handler)
    tell(f"listening on http://127.0.0.1:{server.server_address[1]}")
    server.serve_forever()
