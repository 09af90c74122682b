"""The site's links: within the site they lead on, elsewhere they become words and a path."""

from pathlib import Path

import pytest

from bench.http_reference import write_reference
from bench.site import ROOT, rewrite_links

DOCS = ROOT / "docs"


@pytest.mark.parametrize(
    ("source", "target", "text", "found"),
    [
        (ROOT, DOCS, "[credit](docs/credit.md#the-update)", "[credit](credit.md#the-update)"),
        (DOCS, DOCS, "[it](../AGENTS.md)", "[it](agents.md)"),
        (DOCS / "http", DOCS / "http", "[all](../http.md)", "[all](../http.md)"),
        (DOCS, DOCS, "![c](../bench/results/mixture.png)", "![c](results/mixture.png)"),
        (DOCS, DOCS, "[loops](../trainer_backend/train.py)", "loops (`trainer_backend/train.py`)"),
        (DOCS, DOCS, "[`train.py`](../trainer_backend/train.py)", "`trainer_backend/train.py`"),
        (DOCS, DOCS, "[lost](../nowhere.md)", "[lost](../nowhere.md)"),
        (DOCS, DOCS, "```\n[x](../AGENTS.md)\n```", "```\n[x](../AGENTS.md)\n```"),
    ],
)
def test_a_link_leads_on_or_becomes_a_path(source: Path, target: Path, text: str, found: str):
    assert rewrite_links(text, source, target) == found


def test_the_reference_has_each_route_with_its_body_and_each_type_with_its_fields():
    step = {
        "tags": ["env"],
        "description": "One decision.",
        "parameters": [{"name": "dry", "in": "query", "schema": {"type": "boolean", "default": True}}],
        "requestBody": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Step"}}}},
        "responses": {"200": {"content": {"text/plain": {}}}, "404": {}},
    }
    fields = {"seed": {"anyOf": [{"type": "integer"}, {"type": "null"}], "description": "a | b"}}
    document = {
        "info": {"title": "App"},
        "paths": {"/step": {"post": step}},
        "components": {"schemas": {"Step": {"properties": fields, "required": ["seed"]}}},
    }
    lines = write_reference(document).splitlines()
    assert [line for line in lines if line.startswith(("###", "| `", "Body", "Reply", "Errors"))] == [
        "### `POST /step`",
        "| `dry` | query | boolean = `True` |  |",
        "Body: [Step](#step) (`application/json`)",
        "Reply 200: `text/plain`",
        "Errors: 404",
        "### Step",
        "| `seed` | integer or null | a \\| b |",
    ]
