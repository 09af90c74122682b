"""README, figures, studies and the truth say what bench/results says; the site's links, and `make size`."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from bench.claims import FIGURES, README
from bench.claims_check import MARK, PAGES, TRUTH, problems, rows_of, the_row
from bench.http_reference import write_reference
from bench.kit import ROOT
from bench.site import rewrite_links
from bench.size import measure, table


@pytest.fixture(scope="module")
def pages() -> Mapping[str, str]:
    return {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}


def test_the_pages_claim_what_the_data_say(pages: Mapping[str, str]):
    assert problems(pages) == []


@pytest.mark.parametrize(
    ("page", "claim", "other"),
    [
        (README, "4.11 | 3.63 to 5.35", "4.12 | 3.63 to 5.35"),
        (FIGURES, ", which includes 0", ""),
        (FIGURES, "0.91 | 0.42 to 0.95 | 0.98", "0.91 | 0.41 to 0.95 | 0.98"),
        (FIGURES, "played 2,681 to 2,980 decisions", "played about 2,900 decisions"),
        (TRUTH, "| 0.29 (0.17 to 0.40)", "| 0.28 (0.17 to 0.40)"),
    ],
)
def test_a_number_that_the_data_do_not_say_is_found(
    pages: Mapping[str, str], page: str, claim: str, other: str
):
    changed = pages[page].replace(claim, other)
    assert any(problem.startswith(page) for problem in problems({**pages, page: changed}))


def test_a_figure_without_data_and_script_has_to_be_marked(pages: Mapping[str, str]):
    page, words = pages[FIGURES], "**Time of an iteration of short games**"
    row = the_row(FIGURES, rows_of(page), words)
    found = problems({**pages, FIGURES: page.replace(row, row.replace(MARK, ""))})
    (problem,) = [one for one in found if one.startswith(FIGURES)]
    assert words in problem and "no data, script or mark" in problem


CALLER = '''"""Says what it is."""

from task_app.small import CONSTANT


def run(numbers):  # read by nobody
    """Doc."""

    return helper(numbers) + CONSTANT


def helper(numbers):
    # a comment
    return sum(numbers)
'''
TREE = {"task_app/caller.py": CALLER, "task_app/small.py": "CONSTANT = 1\n", "docs/a.md": "# A\n\nText\n"}


def test_code_leaves_out_blank_lines_comments_and_docstrings():
    assert measure(TREE).rows["task_app"] == {
        "files": 2, "lines": 15, "code": 6, "functions": 2, "classes": 0, "inline": 1, "one-reader": 1,
    }  # fmt: skip


def test_the_candidates_are_named():
    found = measure(TREE)
    assert found.inline == ["task_app/caller.py: helper"]
    assert found.one_reader == ["task_app/small.py: read by task_app/caller.py"]


def test_a_difference_stands_next_to_its_number():
    changed = {**TREE, "task_app/rollouts/new.py": "class A: ...\n"}
    lines = [line.split() for line in table(measure(changed), measure(TREE))]
    assert ["task_app/rollouts", "1", "+1", "1", "+1", "1", "+1", "1", "+1", "0", "0", "0"] in lines
    assert lines[-1][:4] == ["all", "4", "+1", "19"]


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
