"""Commands and files of users in every locale and encoding."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from service_kit.errors import ServiceError
from service_kit.keys import key_from_environ
from service_kit.process import PIPE, Child
from shared_schemas.plain_text import decode_text
from task_app.environments.foreign.mcp_servers import read_servers
from task_app.interactions.config_file import load_interactions
from task_app.settings import Settings
from trainer_backend.data.records import read_records
from trainer_backend.job.load import load_job

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
def test_files_are_found_by_any_name_and_the_rest_is_escaped(tmp_path, environment, encoding):
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


JOB = '[model]\npreset = "tiny-0.3m"\n[rollout.env_config]\ntext = "ü"\n'
CLASS = "task_app.interactions.gsm8k.Gsm8kInteraction"
# The text of a file, by its name, and who reads it.
FILES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "job.toml": (JOB, lambda path: load_job(path).config),
    "users.yaml": (
        f"# ü\ninteraction:\n- {{name: u, class_name: {CLASS}}}\n",
        lambda path: load_interactions(path, Settings()).keys(),
    ),
    "users.toml": (
        f'# ü\n[[interaction]]\nname = "u"\nclass_name = "{CLASS}"\n',
        lambda path: load_interactions(path, Settings()).keys(),
    ),
    "mcp.json": ('{"mcpServers": {"ü": {"command": "a"}}}', read_servers),
    "rows.jsonl": (
        '{"question": "a"}\n{"question": "ü"}\n',
        lambda path: [row.columns for row in read_records(path)],
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_mark_is_no_part_of_a_text_and_another_encoding_is_named(tmp_path: Path, name: str):
    text, read = FILES[name]
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    value = read(path)
    path.write_text(text.replace("\n", "\r\n"), encoding="utf-8-sig")
    assert read(path) == value
    for encoding, told in (("utf-16", "UTF-16"), ("utf-16-le", "UTF-16"), ("latin-1", "is no UTF-8")):
        path.write_text(text, encoding=encoding)
        with pytest.raises((ServiceError, ValueError)) as refusal:
            read(path)
        assert told in str(refusal.value) and "save" in str(refusal.value)


def test_a_key_in_a_file_may_have_a_mark_and_no_error_holds_a_part_of_it(tmp_path: Path):
    path = tmp_path / "key"
    path.write_text("schlüssel", encoding="latin-1")
    with pytest.raises(ServiceError) as refusal:
        key_from_environ({"KEY_FILE": str(path)}, "KEY")
    assert "column 5 is no UTF-8" in str(refusal.value) and "fc" not in str(refusal.value).lower()
    path.write_text("secret\n", encoding="utf-8-sig")
    key = key_from_environ({"KEY_FILE": str(path)}, "KEY")
    assert key is not None and key.get_secret_value() == "secret"


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"\xfc", "column 1 is"),
        (b"\xef\xbb\xbfa\xfc", "column 2 is"),
        (b"a\n\xc3\xbc\xff\n", "column 2 of line 2 is"),
        ("a".encode("utf-32"), "UTF-32"),
        (json.dumps("ü").encode("utf-16-be"), "UTF-16"),
    ],
)
def test_the_place_counts_characters_and_lines_from_one(data: bytes, told: str):
    with pytest.raises(ValueError, match=told):
        decode_text(data)
