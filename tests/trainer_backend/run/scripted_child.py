"""Stands in for the process of a gateway, an engine or the learner: a test copies it as `sitecustomize.py`.

It needs no torch. What it does is named by SCRIPT. Files in its own folder are how it and the test wait
for each other.
"""

import json
import os
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from importlib.metadata import version
from pathlib import Path
from socketserver import TCPServer

HERE, SCRIPT = Path(__file__).parent, os.environ.get("SCRIPT", "")


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


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if SCRIPT == "no first totals" and any(is_first(f"asked_{number}") for number in range(5)):
            self.close_connection = True
            return
        if SCRIPT == "wedges" and self.path == "/control/probe" and is_first("wedged"):
            wait_for("never")
        if self.path == "/about":
            self.answer(json.dumps({"version": version("turnwise")}))
            return
        self.answer(json.dumps({"requests": 3}))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if SCRIPT == "dies in loads":
            end(9, f"no memory for version {json.loads(body)['number']}")
        elif SCRIPT == "outlives its engine" and is_first("answered"):
            self.answer(json.dumps({"code": "engine_stopped", "detail": "its process has ended"}), status=503)
            self.wfile.flush()
            wait_for("end")
            end(1, "the engine's process has ended")
        elif SCRIPT == "breaks in loads":
            end(3, "its engine has failed")
        elif SCRIPT == "answers after its end":
            if os.fork():
                end(9, "killed")
            os.close(1)
            wait_for("answer")
            self.answer("{}")
            os._exit(0)
        elif self.path == "/calls/publish":
            tell("x" * 2_000_000)  # more than pipe and reader hold
        self.answer("result [null]\n" if self.path.startswith("/calls/") else "{}")
        if self.path == "/calls/save":
            self.wfile.flush()
            end(7, "its last words")

    def answer(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: the last line of the log is a script's own."""


def end_with_the_test() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def serve(descriptor: int | None) -> None:
    threading.Thread(target=end_with_the_test, daemon=True).start()
    server = TCPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
    if descriptor is None:
        server.server_bind()
    else:
        server.socket.close()
        server.socket = socket.socket(fileno=descriptor)
        number = json.loads(os.environ["TURNWISE_GATEWAY"])["version"]["number"]
        with (HERE / "starts").open("a") as starts:
            starts.write(f"{number}\n")
        if SCRIPT == "answers after its end" and not is_first("began"):
            wait_for("ready")
    server.server_activate()
    tell(f"listening on http://127.0.0.1:{server.socket.getsockname()[1]}")
    if SCRIPT == "dies in loads":
        tell("has answered a request")
    server.serve_forever()


if "trainer_backend.run.gateway_process" in sys.orig_argv:
    serve(int(sys.orig_argv[-1]))
elif "trainer_backend.learner.process" in sys.orig_argv:
    serve(None)
elif "trainer_backend.run.engine_process" in sys.orig_argv:
    end(2, "its folder cannot be served")
