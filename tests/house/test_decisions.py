"""Docstrings cite decisions and sources by number: every one stands in docs/decisions/README.md."""

import re
from functools import cache

from tests.house.sources import ROOT

PAGE = (ROOT / "docs/decisions/README.md").read_text(encoding="utf-8")
NAME = "DESIGN" + ".md"  # so that this file cites nothing
NUMBER = r"\d+(?:\.\d+)?"
CITED = re.compile(rf"{re.escape(NAME)},? (?:sections? )?({NUMBER}(?:(?:, | and | to ){NUMBER})*)")
STOP = re.compile(rf"{re.escape(NAME)}, stop (\d+) of the route")
SOURCE = re.compile(r"\b[Ss]ource (\d)\b(?!-)")
DOCUMENT = re.compile(r"\b\d-[a-z-]+\.md\b")


@cache
def files() -> list[tuple[str, str]]:
    """Name and text of all code, line breaks and comment signs folded."""
    return [
        (path.relative_to(ROOT).as_posix(), re.sub(r"\s+(# )?", " ", path.read_text(encoding="utf-8")))
        for folder in ("shared_schemas", "task_app", "trainer_backend", "tests", "bench")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]


def numbers(cited: str) -> list[str]:
    """`4.2 to 4.4, 6` -> 4.2, 4.3, 4.4, 6."""
    found: list[str] = []
    for link, number in re.findall(rf"(, | and | to |)({NUMBER})", cited):
        section, _, point = number.partition(".")
        first = int(found[-1].partition(".")[2]) + 1 if link == " to " else int(point or 0)
        found += [f"{section}.{each}" for each in range(first, int(point) + 1)] if point else [section]
    return found


def test_a_list_and_a_range_of_numbers_are_read():
    assert numbers("4.2 to 4.4, 6 and 7") == ["4.2", "4.3", "4.4", "6", "7"]


def test_every_decision_that_code_cites_is_on_the_page():
    known = set(re.findall(rf"^###? ({NUMBER})\.? ", PAGE, re.M))
    cited = 0
    for name, text in files():
        matches = CITED.findall(text)
        assert len(matches) + len(STOP.findall(text)) == text.count(NAME), (
            f"{name} cites {NAME} without a number"
        )
        missing = [number for match in matches for number in numbers(match) if number not in known]
        assert missing == [], f"{name} cites {missing}; docs/decisions/README.md has {sorted(known)}"
        cited += len(matches)
    assert cited


def test_every_stop_that_code_cites_is_on_the_route():
    route = (ROOT / "docs/route.md").read_text(encoding="utf-8")
    for name, text in files():
        for stop in STOP.findall(text):
            assert f"\n**{stop}. " in route, f"{name} cites stop {stop}"


def test_every_source_that_code_cites_is_on_the_page():
    for name, text in files():
        cited = [f"| source {number} |" for number in SOURCE.findall(text)]
        cited += [f"`{document}`" for document in DOCUMENT.findall(text)]
        assert [each for each in cited if each not in PAGE] == [], f"{name} cites a source that is not there"


def test_the_settled_points_are_numbered_1_to_16_in_order():
    points = [number for number in re.findall(rf"^### ({NUMBER}) ", PAGE, re.M)]
    assert points == [f"4.{point}" for point in range(1, 17)]
