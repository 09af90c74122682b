"""Answers about documents: what counts when two are compared."""

import pytest

from shared_schemas.documents import normalise


@pytest.mark.parametrize(
    ("answer", "form"),
    [
        ("The Amber Harbour.", "amber harbour"),
        ("1,000 boats", "1000 boats"),
        ("-3.5", "-3.5"),
        ("pages 3-5", "pages 3 5"),
        ("Ｆｕｌｌ  width", "full width"),  # noqa: RUF001
        ("?!", ""),
        ("A", "a"),
        ("42.0", "42"),
        ("3.50 m", "3.5 m"),
        ("1,234,567.80", "1234567.8"),
        ("007 or -0.0", "7 or 0"),
        ("1,5", "1,5"),
        ("1.2.3", "1.2.3"),
    ],
)
def test_case_punctuation_articles_and_commas_in_numbers_do_not_count(answer, form):
    assert normalise(answer) == form
