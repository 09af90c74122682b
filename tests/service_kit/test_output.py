"""What child processes print, in the log."""

import os
import subprocess
import sys
from contextlib import contextmanager

import structlog
from structlog.testing import capture_logs

from service_kit.logs import configure_logs
from service_kit.output import MAX_LOG_BYTES, Output


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@contextmanager
def printing(**options):
    """The log's entries, what takes the prints, and a descriptor that prints to it."""
    with capture_logs() as logs:
        output = Output("environment", "mcp:files", **options)
        with output.given() as descriptor:
            copy = os.dup(descriptor)
        try:
            yield logs, output, copy
        finally:
            output.end()
            os.close(copy)


def write(descriptor: int, text: bytes) -> None:
    while text:
        text = text[os.write(descriptor, text) :]


def texts(logs) -> str:
    return "".join(entry["text"] for entry in logs if entry["event"] == "environment_printed")


def test_prints_stand_in_the_log_with_their_owner_and_the_last_line_needs_no_end():
    with printing() as (logs, output, descriptor):
        write(descriptor, b"one\n\x1b[31mtwo\n\nthree")
        output.end()
        assert output.last_text() == "one\n\x1b[31mtwo\n\nthree"
    assert texts(logs).replace("\n", "") == "one\x1b[31mtwothree"
    assert {entry["environment"] for entry in logs} == {"mcp:files"}
    assert {entry["log_level"] for entry in logs} == {"info"}


def test_beyond_a_bound_for_each_call_and_second_prints_are_counted_and_the_last_of_them_kept():
    clock = Clock()
    with printing(clock=clock) as (logs, output, descriptor):
        write(descriptor, b"x" * 99 + b"\n" + b"y" * 300_000 + b"\nthe reason\n")
        while not output.last_text().endswith("the reason"):
            pass
        output.begin_call()
        assert not [entry for entry in logs if "bytes" in entry], "the call is within the same second"
        clock.now_s = 1.0
        output.begin_call()
        write(descriptor, b"of the next call\n")
    (left_out,) = [entry for entry in logs if entry["event"] == "environment_prints_left_out"]
    assert left_out["bytes"] == 300_112 - MAX_LOG_BYTES
    assert left_out["last"].endswith("the reason") and len(left_out["last"]) <= 2_000
    assert texts(logs).endswith("of the next call")
    assert len(texts(logs)) <= MAX_LOG_BYTES + len("of the next call")


def test_a_process_that_prints_without_an_end_is_not_blocked_and_does_not_block_the_end():
    floods = "import os\nfor _ in range(500): os.write(2, b'x' * 10_000)\nos.write(1, b'through')\n"
    holds = "import time; time.sleep(600)"
    configure_logs("debug")
    with capture_logs() as logs:
        output = Output("agent", "agent:a", is_for_debugging=True)
        with output.given() as descriptor:
            # It outlives what floods, and holds the pipe.
            holder = subprocess.Popen([sys.executable, "-c", holds], stderr=descriptor)
            flood = subprocess.run([sys.executable, "-c", floods], stdout=subprocess.PIPE, stderr=descriptor)
        output.end()
        output.end()
        holder.kill()
        holder.wait()
    assert flood.stdout == b"through"
    assert {(entry["agent"], entry["log_level"]) for entry in logs} == {("agent:a", "debug")}
    logged = sum(len(entry.get("text", "")) for entry in logs)
    assert logged + sum(entry.get("bytes", 0) for entry in logs) == 5_000_000 and logged <= MAX_LOG_BYTES


def test_a_secret_is_replaced_wherever_a_long_line_is_cut():
    secret = "k" * 32
    with printing(secret=secret) as (logs, output, descriptor):
        for _ in range(40):
            write(descriptor, b"." * 500 + secret.encode())
        output.end()
        assert "kk" not in output.last_text() and "[key]" in output.last_text()
    assert texts(logs).count("[key]") == 40 and "kk" not in texts(logs)


def test_a_log_line_escapes_what_would_control_a_terminal(capfd):
    configure_logs()
    try:
        output = Output("environment", "mcp:files")
        with output.given() as descriptor:
            write(descriptor, b"\x1b[31mred\nnext\n")
        output.end()
    finally:
        structlog.reset_defaults()
    (line,) = capfd.readouterr().err.splitlines()
    assert "environment=mcp:files" in line and "\x1b" not in line and r"red\nnext" in line
