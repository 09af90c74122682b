"""An event loop in virtual time: sleeps take none, and a program sees the same clock each time it runs."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")


class VirtualTime(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when nothing else is left to do."""

    def __init__(self) -> None:
        super().__init__(_Jumping(self))
        self.now = 0.0
        self.set_default_executor(_AtOnce())

    def time(self) -> float:
        return self.now


class _Jumping(selectors.DefaultSelector):
    def __init__(self, loop: VirtualTime) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        self._loop.now += timeout or 0.0
        return super().select(0)


class _AtOnce(ThreadPoolExecutor):
    def submit(self, call: Callable[..., Any], /, *arguments: Any, **keys: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*arguments, **keys))
        except BaseException as error:
            future.set_exception(error)
        return future


def in_virtual_time(work: Coroutine[Any, Any, Result]) -> tuple[Result, float]:
    """The result of `work`, and how many virtual seconds it took."""
    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        return runner.run(work), runner.get_loop().time()
