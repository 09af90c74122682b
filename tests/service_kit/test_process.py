"""What a child says, and what it leaves behind."""

import asyncio
import sys
from pathlib import Path

import pytest

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
