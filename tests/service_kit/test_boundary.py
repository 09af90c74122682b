"""Errors of services, and the boundary around foreign code, which makes one error of all that it raises."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from service_kit.boundary import Boundary
from service_kit.errors import ServiceError


class Failed(ServiceError, code="failed"):
    pass


class Unreadable(Exception):
    def __str__(self):
        raise SystemExit(4)


class Hostile(Exception):
    """Raises wherever a formatter looks."""

    def __getattr__(self, name: str) -> Any:
        raise SystemExit(5)


KINDS = {
    "Hostile": Hostile,
    "KeyError: 'oops'": lambda: KeyError("oops"),
    "StopIteration": StopIteration,
    "SystemExit: 3": lambda: SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt,
    "CancelledError": asyncio.CancelledError,
    "GeneratorExit": GeneratorExit,
    "TimeoutError: of its own": lambda: TimeoutError("of its own"),
    "BaseExceptionGroup: two (1 sub-exception)": lambda: BaseExceptionGroup("two", [SystemExit(1)]),
    "Unreadable: its text cannot be read, which raises SystemExit": Unreadable,
    "ValueError: first": lambda: ValueError("first\nsecond"),
}


def step(make: Callable[[], BaseException]) -> None:
    raise make()


async def decide(make: Callable[[], BaseException]) -> None:
    await asyncio.sleep(0)
    raise make()


@pytest.mark.parametrize("told", KINDS)
async def test_all_that_a_plug_in_raises_is_one_error_with_file_and_line(told):
    failures: list[str] = []

    def call() -> None:
        try:
            with Boundary("plug.step", Failed):
                step(KINDS[told])
        except Failed as failure:
            failures.append(failure.detail)

    async def wait() -> None:
        with Boundary("plug.step", Failed):
            await decide(KINDS[told])

    call()  # on the event loop
    await asyncio.to_thread(call)
    line = step.__code__.co_firstlineno + 1
    assert failures == [f"plug.step raised {told} (test_boundary.py:{line})"] * 2
    with pytest.raises(Failed) as caught:
        await wait()
    # A StopIteration too, which Python turns into a RuntimeError where it leaves a coroutine.
    line = decide.__code__.co_firstlineno + 2
    assert caught.value.detail == f"plug.step raised {told} (test_boundary.py:{line})"


def test_the_log_of_an_exception_is_bounded_and_changes_no_error_if_it_cannot_be_written(monkeypatch):
    written: list[str] = []

    def full(event: str, **facts: str) -> None:
        written.append(facts["exception"])
        raise OSError("disk full")

    monkeypatch.setattr("service_kit.boundary.log.error", full, raising=False)
    with pytest.raises(Failed, match=r"^plug\.step raised ValueError"), Boundary("plug.step", Failed):
        raise ValueError("x" * 1_000_000)
    assert len(written[0]) < 10_000 and "characters are left out" in written[0]


async def wait_within(entered: asyncio.Event) -> None:
    with Boundary("plug.step", Failed):
        entered.set()
        await asyncio.Event().wait()


async def test_a_cancellation_and_a_deadline_of_others_stay_what_they_are():
    entered = asyncio.Event()
    task = asyncio.create_task(wait_within(entered))
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.0):
            await wait_within(entered)


def test_a_coroutine_that_is_closed_from_outside_ends():
    with asyncio.Runner() as runner:
        entered = asyncio.Event()

        async def start() -> Coroutine[Any, Any, None]:
            task = asyncio.create_task(wait_within(entered))
            await entered.wait()
            return task.get_coro()

        coroutine = runner.run(start())
        coroutine.close()
        assert coroutine.cr_frame is None, "it has ended"


def test_ctrl_c_stays_one_where_a_signal_raises_it(monkeypatch):
    # A shell starts what runs in the background with the signal ignored.
    monkeypatch.setattr("signal.getsignal", lambda number: signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), Boundary("plug.step", Failed):
        raise KeyboardInterrupt  # outside an event loop the main thread's handler raises just this


@pytest.mark.parametrize(("error", "recurs"), [(KeyError("a"), True), (OSError("disk"), False)])
def test_an_error_of_code_recurs_and_one_of_the_machine_may_not(error, recurs):
    with pytest.raises(Failed) as caught, Boundary("plug.step", Failed):
        step(lambda: error)
    assert caught.value.recurs is recurs


class Broken(ServiceError, code="broken", status=503, title="It is broken", retry_after_s=5):
    pass


class Torn(Broken, code="torn", recurs=True):
    pass


def test_keywords_declare_an_error_and_the_rest_is_inherited():
    assert (Torn.code, Torn.status, Torn.title, Torn.retry_after_s) == ("torn", 503, "It is broken", 5)
    assert (ServiceError.recurs, Broken.recurs, Torn.recurs) == (False, False, True)
    assert list(Broken.tree()) == [Broken, Torn]


def test_a_code_that_another_class_of_the_service_has_and_a_status_that_is_none_are_refused():
    with pytest.raises(TypeError, match=r"Worn .*'torn', .*Torn"):
        type("Worn", (ServiceError,), {"__module__": __name__}, code="torn")
    assert type("Worn", (ServiceError,), {"__module__": "another.service"}, code="torn").code == "torn"
    with pytest.raises(ValueError, match="600 is not a valid HTTPStatus"):
        type("Odd", (ServiceError,), {}, status=600)
