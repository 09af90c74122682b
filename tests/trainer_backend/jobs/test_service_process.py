"""`turnwise trainer` as a process: a second one is refused; `contract/test_readme.py` has its pages."""

import socket

import pytest

from tests.processes import service
from tests.trainer_backend.test_command_line import turnwise


def test_a_second_one_in_the_same_folder_is_refused(tmp_path):
    """One that only shows is not: `test_data_dir.py`."""
    words = ("trainer", "--port", "0", "--data-dir", "runs")
    keyless = {"environ": {"TRAINER_API_KEY": ""}, "cwd": tmp_path}
    with service("trainer_backend", *words, "--exit-with-parent", **keyless) as (first, _):
        second = turnwise(*words, cwd=tmp_path)
        assert second.returncode == 2
        assert second.stderr.startswith(
            f"error: another trainer service runs jobs in {tmp_path}/runs. Stop it, choose"
        )
        first.stdin.close()
        assert first.wait(60) == 0, "it ends when its standard input closes"


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (
            ("--host", "0.0.0.0"),
            2,
            "error: --host is '0.0.0.0', which others can reach, and there is no key.",
        ),
        (
            ("--database-url", "postgresql://turnwise:hunter2@127.0.0.1:1/turnwise"),
            1,
            "error: the store postgresql://turnwise:***@127.0.0.1:1/turnwise cannot be used: ",
        ),
    ],
)
def test_what_keeps_it_from_starting_is_one_sentence(tmp_path, words, code, told):
    done = turnwise("trainer", "--port", "0", "--data-dir", "runs", *words, cwd=tmp_path)
    assert (done.returncode, "listening" in done.stdout) == (code, False)
    assert done.stderr.startswith(told), done.stderr
    assert "hunter2" not in done.stderr + done.stdout


def test_a_port_that_is_taken_is_told_before_the_store_is_touched(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = turnwise("trainer", "--data-dir", "runs", "--port", str(port), cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.startswith(f"error: cannot listen on 127.0.0.1:{port}")
    assert list(tmp_path.iterdir()) == []
