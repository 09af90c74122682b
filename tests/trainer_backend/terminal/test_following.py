"""`--follow` over the ends of a stream, and a run's own dashboard, which no run waits for."""

import signal
import sys
from collections.abc import Iterator
from io import StringIO
from queue import Queue

import pytest
from rich.console import Console

from trainer_backend.terminal.jobs_client import Event, ServiceUnreachable
from trainer_backend.terminal.jobs_commands import follow
from trainer_backend.terminal.train_command import open_dashboard

AWAY = ServiceUnreachable("no service answers")
END = Event("end", {"state": "succeeded"}, None)


def line(number: int) -> Event:
    return Event("log", {"time": "", "text": f"line {number}"}, f"0.{number}")


class Service:
    """Answers each question with the next of these: events, and after them an error of the connection."""

    url = "http://played"

    def __init__(self, *answers: list[Event | ServiceUnreachable]) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, str | None]] = []

    def events(self, path: str, *, after: str | None = None) -> Iterator[Event]:
        self.asked.append((path, after))
        for one in self.answers.pop(0):
            if isinstance(one, ServiceUnreachable):
                raise one
            yield one


def followed(service: Service) -> tuple[str, str, str, list[float]]:
    """How the job has ended, what was printed to stdout and stderr, and the waits."""
    out, err, waits = StringIO(), StringIO(), []
    state = follow(service, "j", Console(file=out), Console(file=err), sleep=waits.append)  # type: ignore[arg-type]
    return state, out.getvalue(), err.getvalue(), waits


def test_it_ends_with_the_job_and_tells_the_reasons_of_a_restart_and_of_the_end_once():
    assert followed(Service([line(1), END])) == ("succeeded", "line 1\n", "the job is succeeded\n", [])
    again = Event("state", {"state": "running", "detail": "restart 1 of 3 in 5 s after: no room"}, None)
    failed = Event("state", {"state": "failed", "detail": "no room"}, None)
    _, _, err, _ = followed(Service([again, again, failed, Event("end", {"state": "failed"}, None)]))
    assert err == "restart 1 of 3 in 5 s after: no room\nthe job is failed: no room\n"


def test_a_service_that_stops_is_told_and_asked_again_from_where_it_was():
    service = Service([line(1), line(2)], [AWAY], [AWAY], [line(3), AWAY], [END])
    state, out, err, waits = followed(service)
    assert (state, out) == ("succeeded", "line 1\nline 2\nline 3\n")
    assert [after for _, after in service.asked] == [None, "0.2", "0.2", "0.2", "0.3"]
    assert waits == [1.0, 2.0, 4.0, 1.0], "it answered in between"
    assert err.count("the service has stopped before the job has ended; asking again in") == 4


def test_one_that_was_never_there_is_told_at_once_and_one_that_stays_away_in_the_end():
    with pytest.raises(ServiceUnreachable):
        followed(Service([AWAY]))
    service = Service([line(1)], *([AWAY] for _ in range(8)))
    with pytest.raises(ServiceUnreachable, match="no service answers"):
        followed(service)
    assert service.answers == []
    # A stream that only ends is not asked for ever.
    with pytest.raises(ServiceUnreachable, match="does not tell how j goes on"):
        followed(Service(*([] for _ in range(9))))


LONG_S = 60


def child(script: str) -> tuple[str, ...]:
    """A command that is given the words of `turnwise`, and does this."""
    return (sys.executable, "-c", f"import sys; {script}", "turnwise")


def test_its_address_is_told_once_and_it_ends_with_the_run(tmp_path):
    told: Queue[str] = Queue()
    script = "print('store: x'); print('listening on http://h:1', flush=True); sys.stdin.read()"
    with open_dashboard(tmp_path, told.put, command=child(script)):
        assert told.get(timeout=LONG_S) == "dashboard: http://h:1"
    assert (
        told.get_nowait() == f"the dashboard ends with the run; again: turnwise trainer --data-dir {tmp_path}"
    )
    assert told.empty()
    # A run that fails takes it along.
    with pytest.raises(ValueError, match="full"), open_dashboard(tmp_path, told.put, command=child(script)):
        assert told.get(timeout=LONG_S)
        raise ValueError("full")


def test_it_is_asked_to_show_that_folder_on_a_free_port_and_to_run_nothing(tmp_path):
    told: Queue[str] = Queue()
    script = child("print('listening on', *sys.argv[2:])")
    with open_dashboard(tmp_path, told.put, roots=[tmp_path / "mine"], command=script):
        words = told.get(timeout=LONG_S)
    own = f"--no-jobs --allow-root {tmp_path / 'mine'}"
    assert words == f"dashboard: trainer {own} --port 0 --data-dir {tmp_path} --exit-with-parent"


def test_it_stays_until_ctrl_c_and_one_that_has_ended_is_not_waited_for(tmp_path):
    told: Queue[str] = Queue()

    def say(line: str) -> None:
        told.put(line)
        if "Ctrl-C" in line:
            signal.raise_signal(signal.SIGINT)

    script = "print('listening on x', flush=True); sys.stdin.read()"
    with open_dashboard(tmp_path, say, command=child(script)) as stay:
        assert told.get(timeout=LONG_S) == "dashboard: x"
        stay()
    assert told.get() == "the dashboard stays until Ctrl-C"
    assert told.get().startswith("the dashboard ends with the run")
    with open_dashboard(tmp_path, told.put, command=child("sys.exit('error: no such store')")) as stay:
        assert told.get(timeout=LONG_S) == "the dashboard did not start: no such store"
        stay()
