"""The commands of docs/http.md, sent as they stand, section by section.

The answers are those that the page shows, and its table has every operation of /openapi.json.
"""

import re
from dataclasses import replace
from typing import Any

import httpx
import pytest
from openapi_spec_validator import validate

from task_app.interactions.config_file import load_interactions
from task_app.plugins import PlugBoards, default_plug_boards
from task_app.settings import Settings
from tests.house.pages import KINDS, Command, Reader, cut, has_status, play
from tests.house.sources import ROOT
from tests.task_app import counting
from tests.task_app.counting import KEY, openapi, running_app
from tests.trainer_backend.jobs import served

PAGE = (ROOT / "docs/http.md").read_text(encoding="utf-8")
READER = Reader("localhost:8001", {"X-API-Key": KEY, "Content-Type": "application/json"})
# What an answer tells, and a later command names as `<env_id>` and so on.
TOLD = (
    "env_id",
    "capture_id",
    "policy_id",
    "interaction_id",
    "session_id",
    "snapshot",
    "snapshot_id",
    "tool_calls",
)


def sections() -> dict[str, str]:
    found = {part.splitlines()[0]: part for part in PAGE.split("\n## ")[1:]}
    return {title: text for title, text in found.items() if READER.commands(text)}


async def played(client: httpx.AsyncClient, text: str) -> list[tuple[Command, httpx.Response, Any]]:
    """Every command of a section with its answer, and what the page says of it, ids filled in."""
    del client.headers["X-API-Key"]
    return await play(client, READER.commands(text), TOLD, key=KEY)


def plug_boards() -> PlugBoards:
    """Ours, and the interactions that the page names."""
    found = load_interactions(ROOT / "configs/interactions/gsm8k.yaml", Settings())
    return replace(default_plug_boards(), interactions=found)


@pytest.mark.parametrize("title", sections())
async def test_the_answers_are_those_that_the_page_shows(title):
    async with running_app(plug_boards()) as client:
        for one, answer, shown in await played(client, sections()[title]):
            kind = answer.headers["content-type"].partition(";")[0]
            if kind in KINDS.values():
                assert (answer.status_code, kind) == (200, shown)
            elif kind == "text/plain":
                assert set(shown) <= set(answer.text.splitlines())
            elif shown is not None:
                assert cut(shown, answer.json()) == shown, (one.method, one.path)
            assert has_status(answer, shown), answer.text


def test_the_table_has_every_operation():
    rows = "".join(line for line in PAGE.splitlines() if line.startswith("| "))
    told = re.findall(r"`(/[^`]*)`", rows)
    for label, _ in openapi().operations():
        path = label.split()[1]
        fitting = [one for one in told if one == path or (one[-3:] == "..." and path.startswith(one[:-3]))]
        assert fitting, f"{label} is in no row of docs/http.md's table"


async def test_every_key_of_a_step_is_named():
    text = sections()["A decision by hand"]
    async with running_app(default_plug_boards()) as client:
        _, (_, answer, _) = await played(client, text)
    assert set(answer.json()) <= set(re.findall(r"[`\"](\w+)[`\"]", text))


async def test_a_refusal_shows_every_key_that_a_problem_can_have():
    async with running_app(default_plug_boards()) as client:
        ((_, answer, shown),) = await played(client, sections()["Errors"])
    assert answer.json() == shown


DOCUMENTS = {"task app": counting.openapi, "trainer": served.openapi}


@pytest.fixture(params=DOCUMENTS)
def document(request):
    return DOCUMENTS[request.param]()


def test_it_is_an_openapi_document(document):
    validate(document.document)


def test_every_reply_has_a_type(document):
    # A reply of JSON names a model: `response_model`, where the route returns a Response of its own.
    assert list(document.untyped_replies()) == []


def test_every_operation_is_named_by_its_function_and_by_no_other_one(document):
    names = [operation["operationId"] for _, operation in document.operations()]
    assert len(set(names)) == len(names)
    # FastAPI's own names end with the path and the method, as in show_job_jobs__job_id__get.
    assert [name for name in names if "__" in name or name.endswith(("_get", "_post", "_delete"))] == []
