"""README, figures, studies and the truth say what bench/results says, and mark what has no data."""

from collections.abc import Mapping

import pytest

from bench.claims import FIGURES, README
from bench.claims_check import MARK, PAGES, TRUTH, problems, rows_of, the_row
from bench.kit import ROOT


@pytest.fixture(scope="module")
def pages() -> Mapping[str, str]:
    return {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}


def test_the_pages_claim_what_the_data_say(pages: Mapping[str, str]):
    assert problems(pages) == []


@pytest.mark.parametrize(
    ("page", "claim", "other"),
    [
        (README, "1.95 | 1.76 to 2.02", "1.96 | 1.76 to 2.02"),
        (FIGURES, ", which includes 0", ""),
        (FIGURES, "1.24 | 1.09 to 1.47", "1.24 | 1.12 to 1.47"),
        (FIGURES, "in 3.7 optimizer steps per iteration", "in fewer optimizer steps"),
        (TRUTH, "| 0.29 (0.17 to 0.40)", "| 0.28 (0.17 to 0.40)"),
    ],
)
def test_a_number_that_the_data_do_not_say_is_found(
    pages: Mapping[str, str], page: str, claim: str, other: str
):
    changed = pages[page].replace(claim, other)
    assert any(problem.startswith(page) for problem in problems({**pages, page: changed}))


def test_a_learning_figure_without_data_has_to_be_marked(pages: Mapping[str, str]):
    page, words = pages[FIGURES], "**Orders**"
    row = the_row(FIGURES, rows_of(page), words)
    found = problems({**pages, FIGURES: page.replace(row, row.replace(MARK, ""))})
    (problem,) = [one for one in found if one.startswith(FIGURES)]
    assert words in problem and "no data, script or mark" in problem
