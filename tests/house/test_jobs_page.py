"""The commands of docs/operations.md about jobs, sent as they stand, to a service whose jobs are played.

The answers are those that the page shows, and its table has every operation of /openapi.json.
"""

import re
import shlex
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.house.pages import Reader, cut, has_status, play
from tests.house.sources import ROOT
from tests.trainer_backend.jobs.served import Served, openapi, serving, settings_for
from trainer_backend.errors import ApiError
from trainer_backend.store.database import StoreError

PAGE = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
CHAPTER = PAGE.split("\n## Jobs over HTTP\n")[1].split("\n## ")[0]
KEY = "choose-one"
READER = Reader("localhost:8100", {"X-API-Key": KEY, "Content-Type": "application/toml"})
SECTIONS = {part.splitlines()[0]: part for part in CHAPTER.split("\n### ")[1:]}


def allowed() -> dict[str, tuple[str, ...]]:
    """What the page's own `turnwise trainer` allows, as fields of the settings."""
    (line,) = re.findall(r"^\$ turnwise trainer (.*) &$", PAGE, re.M)
    words = shlex.split(line)
    return {
        f"{name.removeprefix('--allow-').replace('-', '_')}s": (value,)
        for name, value in pairwise(words)
        if name.startswith("--allow-")
    }


@pytest.fixture
async def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    monkeypatch.setenv("ENVIRONMENT_API_KEY", "of-the-task-apps")
    settings = settings_for(tmp_path, environ={"TRAINER_API_KEY": KEY}, **allowed())
    async with serving(settings) as found:
        yield found


@pytest.mark.parametrize("title", [title for title, text in SECTIONS.items() if READER.commands(text)])
async def test_the_answers_are_those_that_the_page_shows(served, title):
    for one, answer, shown in await play(served.client, READER.commands(SECTIONS[title]), ["id"]):
        if shown is not None and "json" in answer.headers["content-type"]:
            assert cut(shown, answer.json()) == shown, (one.method, one.path, answer.text)
        elif shown is not None:
            assert [line for line in shown if plain(line) not in plain(answer.text)] == [], answer.text
        assert has_status(answer, shown), answer.text


def plain(text: str) -> str:
    return text.replace(" ", "")


def test_the_table_has_every_operation():
    table = CHAPTER.split("\n### ")[0]
    for method, path in (label.split() for label, _ in openapi().operations()):
        assert re.search(rf"{method} [^|]*`{re.escape(path)}`", table), f"{method} {path} is in no row"


async def test_every_key_of_a_job_is_named(served):
    ((_, answer, _), *_) = await play(served.client, READER.commands(SECTIONS["Post one"]), ["id"])
    keys = set(answer.json()) - {"id", "name", "tags", "created", "started", "ended", "warnings"}
    assert keys <= set(re.findall(r"`(\w+)`", SECTIONS["States"]))


def test_every_code_of_the_api_is_named():
    bases = [ApiError, StoreError]
    codes = {error.code for base in bases for error in base.tree()}
    assert {code for code in codes if f"`{code}`" not in PAGE} <= {"rollout_unknown", "store_invalid"}
