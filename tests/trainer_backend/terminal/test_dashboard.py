"""The dashboard of a run: a child that lives as long as the run at most, and that no run waits for."""

import signal
import sys
from queue import Queue

import pytest

from trainer_backend.terminal.train_command import open_dashboard

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
