"""A command runs the same in every locale, and shows what the terminal has no character for as an escape."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from service_kit.process import PIPE, Child

# Prints a path that it was given, and one that a file of the user names.
COMMAND = """
import sys
from pathlib import Path
from service_kit.console import begin_command
begin_command(sys.argv[1:])
folder = Path(sys.argv[1])
print(folder.name, (folder / "\\u00fc").exists(), "\\U0001f600", "\\udcff")
"""


def run(argument: str | bytes, **environment: str) -> subprocess.CompletedProcess[bytes]:
    own = {
        name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHON"))
    }
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-c", COMMAND, argument],
        env={**own, "PYTHONPATH": root, **environment},
        capture_output=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("environment", "encoding"),
    [
        ({"LC_ALL": "C", "PYTHONUTF8": "0"}, "ascii"),
        ({"LANG": "xx"}, "utf-8"),
        ({"PYTHONIOENCODING": "latin-1"}, "latin-1"),
    ],
)
def test_files_are_found_by_any_name_and_the_rest_is_escaped(
    tmp_path: Path, environment: dict[str, str], encoding: str
):
    folder = tmp_path / "dür"
    folder.mkdir()
    (folder / "ü").touch()
    done = run(str(folder), **environment)
    shown = "dür True 😀 \udcff\n".encode(encoding, "backslashreplace")
    assert (done.returncode, done.stdout, done.stderr) == (0, shown, b"")


def test_an_argument_that_is_no_text_is_refused_as_that():
    done = run(b"d\xfcr", PYTHONUTF8="1")
    assert rb"the argument b'd\xfcr' is no UTF-8 text" in done.stderr


async def test_what_a_child_prints_is_utf_8_whatever_the_terminal():
    printing = [sys.executable, "-c", "print('\\u00fc \\U0001f600 \\udcff')"]
    child = await Child.start(printing, stdout=PIPE, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert [line async for line in child.lines()] == ["ü 😀 \\udcff"]
    assert await child.ended() == 0
