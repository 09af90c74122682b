"""Files as people's programs save them: with a byte order mark, in UTF-16, in Latin-1."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from service_kit.errors import ServiceError
from service_kit.keys import key_from_environ
from shared_schemas.plain_text import decode_text
from task_app.environments.foreign.mcp_servers import read_servers
from task_app.interactions.config_file import load_interactions
from task_app.settings import Settings
from trainer_backend.data.records import read_records
from trainer_backend.job.load import load_job

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
