"""What a child says and leaves behind, what it prints into the log, and how the log looks."""

import asyncio
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

from service_kit import release
from service_kit.errors import SettingsError
from service_kit.logs import configure_logs, configure_logs_from
from service_kit.output import MAX_LOG_BYTES, Output
from service_kit.own_process import READY
from service_kit.process import PIPE, Child, Worker, last_line


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (b"first\n  out of memory \n\n \n", "out of memory"),
        (b"x" * 100_000 + b"\nthe end", "the end"),
        (b"\xff", "\N{REPLACEMENT CHARACTER}"),
        (b"\n\n", ""),
    ],
)
def test_the_last_line_of_a_log_is_the_last_that_says_something(log: bytes, line: str, tmp_path: Path):
    (tmp_path / "log").write_bytes(log)
    assert last_line(tmp_path / "log") == line
    assert last_line(tmp_path / "none") == ""


async def test_a_line_of_any_length_is_read_and_a_long_one_says_what_was_cut():
    # 65536 bytes fit the reader; of a longer line so many are kept as had come by then.
    printed = "print('a'); print('x' * 500_000); print(); print('y' * 65_536); print('z' * 500_000, end='')"
    child = await Child.start((sys.executable, "-c", printed), stdout=PIPE)
    first, long, empty, fits, last = [line async for line in child.lines()]
    assert (first, empty, fits) == ("a", "", "y" * 65_536)
    for line, letter in ((long, "x"), (last, "z")):
        kept, note = line.split(" ", 1)
        assert set(kept) == {letter}
        assert note == f"... and {500_000 - len(kept)} more bytes"
    assert await child.ended() == 0


class Scripted(Worker):
    """A worker whose processes live as long as the script says, by a clock of its own."""

    healthy_s = 30.0
    pauses_s = (0.5, 4.0)

    def __init__(self, lives_s: list[float]) -> None:
        self.now_s, self.lives_s = 0.0, iter(lives_s)
        self.pauses: list[float] = []
        super().__init__(lambda: self.now_s)

    async def start(self) -> Child:
        if (life_s := next(self.lives_s, None)) is None:
            raise FileNotFoundError("no such program")
        self.now_s += life_s
        return await Child.start(["sh", "-c", f"echo '{READY}x'; exit 7"], stdout=PIPE)

    def on_end(self, code: int, lasted_s: float, pause_s: float) -> None:
        assert code == 7
        self.pauses.append(pause_s)


async def test_a_worker_starts_its_process_again_after_a_pause_that_doubles(monkeypatch):
    slept, own, real = [], asyncio.current_task(), asyncio.sleep

    async def sleep(seconds: float) -> None:
        if asyncio.current_task() is own:
            slept.append(seconds)
        else:
            await real(seconds)

    worker = Scripted([0, 1, 2, 3, 4, 31, 0])
    monkeypatch.setattr("service_kit.process.asyncio.sleep", sleep)
    with pytest.raises(FileNotFoundError):
        await worker.run_forever()
    assert worker.pauses == [0.5, 1.0, 2.0, 4.0, 4.0, 0.0, 0.5]
    assert worker.restarts == 7
    assert [pause for pause in slept if pause] == [pause for pause in worker.pauses if pause]


async def test_a_worker_that_may_not_start_waits_until_it_may():
    worker, is_held = Scripted([40, 2]), asyncio.Event()
    on_end = worker.on_end

    def hold(code: int, lasted_s: float, pause_s: float) -> None:
        on_end(code, lasted_s, pause_s)
        if not is_held.is_set():
            worker.may_start.clear()
            is_held.set()

    worker.on_end = hold  # type: ignore[method-assign]
    running = asyncio.ensure_future(worker.run_forever())
    await is_held.wait()
    for _ in range(10):  # it has lived long, so nothing but this keeps it from a start at once
        await asyncio.sleep(0)
    assert worker.now_s == 40
    worker.may_start.set()
    with pytest.raises(FileNotFoundError):
        await running
    assert worker.now_s == 42


def test_a_checkout_that_was_never_installed_says_so_and_does_not_fail():
    code = f"{Path(release.__file__).read_text()}\nprint(version())"
    # without site-packages, and without the folder of today
    command = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == release.FROM_SOURCE


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


LEVEL_VARIABLE, FORM_VARIABLE = "TURNWISE_LOG_LEVEL", "TURNWISE_LOG_FORMAT"


@pytest.fixture
def written(capsys):
    """What came out on stderr; afterwards nothing writes to a stream that pytest has closed."""
    yield lambda: capsys.readouterr().err
    structlog.reset_defaults()


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_line_has_its_ids_and_a_traceback_no_local_variables(form, written):
    configure_logs_from({FORM_VARIABLE: form})
    secret = "zebra-" + "quagga"
    with structlog.contextvars.bound_contextvars(request_id="mine-1"):
        try:
            raise ValueError("broken")
        except ValueError:
            structlog.get_logger("trainer").exception("failed", job="j1")
    line = written()
    assert "ValueError: broken" in line and "j1" in line and "mine-1" in line and secret not in line
    if form == "json":
        found = json.loads(line)
        assert (found["event"], found["level"], found["job"]) == ("failed", "error", "j1")


def test_what_is_below_the_level_is_not_written(written):
    log = structlog.get_logger("trainer")
    for environ, told in (({}, ["info"]), ({LEVEL_VARIABLE: "debug"}, ["debug", "info"])):
        configure_logs_from({FORM_VARIABLE: "json", **environ})
        log.debug("seen")
        log.info("seen")
        assert [json.loads(line)["level"] for line in written().splitlines()] == told
    configure_logs_from({LEVEL_VARIABLE: "warning"})
    log.info("seen")
    assert written() == ""


def test_a_value_that_is_none_names_its_variable_and_what_is_known():
    with pytest.raises(SettingsError, match=r"_FORMAT is 'jsn'\. Did you mean 'json'\? Known: json, text"):
        configure_logs_from({FORM_VARIABLE: "jsn"})
