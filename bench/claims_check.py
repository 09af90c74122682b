"""Do the pages say what bench/results says? Their figures, computed again, and what rests on no data.

    python -m bench.claims_check

bench/claims.py has the figures that are compared. A row of README's figures and of docs/figures.md must have
one of four things:

    a claim                 its data are in bench/results
    a script                its last column names a script of bench/ or a test, which measures it again, or
                            `COMMIT:bench/NAME.py`, which git still has
    `REPEATED`              README repeats a row of docs/figures.md that has one of these
    "(no data committed)"   in the row, or in the paragraph above its table

The tables of estimators in docs/truth.md are compared cell by cell; rows and columns that the page adds are
not looked at. Printed are claims that a page does not hold, and rows with none of the four; then the exit
code is 1.
"""

import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench import kit
from bench.claims import DOCUMENTS, FIGURES, MIXTURE, README, STUDIES, Claim, claims, data

TRUTH = "docs/truth.md"
PAGES = (README, FIGURES, STUDIES, TRUTH, DOCUMENTS, MIXTURE)
MARK = "(no data committed)"
# Rows of README: the row of docs/figures.md that they repeat, and the numbers that both hold.
REPEATED = (
    ("log-probs of sampled tokens, recomputed", "log-probs of sampled tokens with `tiny-0.8m`", ("4.5e-5",)),
)
# Columns of the table in docs/truth.md, by words of their heads.
TRUTH_COLUMNS = {
    "short games": "crafter", "one action a decision": "one_action", "a corridor": "rooms",
    "sokoban": "sokoban",
}  # fmt: skip
# Rows of several estimators: the least and the greatest of all their seeds.
KIN = ("grpo", "grpo_no_std", "dr_grpo", "rloo", "reinforce_pp_baseline")


def tables(text: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """The heads and the rows of each table of a page."""
    for block in re.findall(r"(?:^\|.*\n?)+", text, re.M):
        head, _, *rows = (
            [cell.strip() for cell in line.strip("| ").split(" | ")] for line in block.splitlines()
        )
        yield head, rows


def truth_problems(text: str) -> Iterator[str]:
    """What docs/truth.md says otherwise than truth.json; columns and rows that it adds are not looked at."""
    seen = 0
    for head, rows in tables(text):
        columns = [
            (index, setting)
            for index, cell in enumerate(head)
            for words, setting in TRUTH_COLUMNS.items()
            if head[0] == "estimator" and cell.startswith(words)
        ]
        for row in rows:
            for index, setting in columns:
                expected, seen = _of_row(row[0], setting), seen + 1
                if not _once(row[index]).startswith(expected):
                    yield f"{TRUTH}: {row[0]}, {setting}: the data say {expected!r}, the page {row[index]!r}"
    if seen < len(TRUTH_COLUMNS) * 9:
        yield f"{TRUTH}: only {seen} cells of the table of estimators were found"
    yield from _whole_problems(text)


def _once(cell: str) -> str:
    """The cell with a range of one number as that number: "0.22 to 0.22" is "0.22"."""
    return re.sub(r"^(-?[\d.]+) to \1 ", r"\1 ", cell)


def _of_row(label: str, setting: str) -> str:
    """The cell of an estimator's row: median, least and greatest of the seeds; or of all its kin."""
    figure = "unbiased" if label.startswith("unbiased") else "correlation"
    names = KIN if "kin" in label else re.findall(r"`(\w+)`", label)
    scores = [seed["estimators"] for seed in data("truth")[setting]["seeds"].values()]
    # A constant has no correlation.
    seeds = [[one[name][figure] for one in scores if one[name].get(figure) is not None] for name in names]
    if not all(seeds):
        return "-"
    middles = sorted({f"{statistics.median(values):z.2f}" for values in seeds}, key=float)
    middle = middles[0] if len(middles) == 1 else f"{middles[0]} to {middles[-1]}"
    every = [value for values in seeds for value in values]
    return f"{middle} ({min(every):z.2f} to {max(every):z.2f})"


def _whole_problems(text: str) -> Iterator[str]:
    """The table of whole games: a row an estimator, a column a seed, and what an unbiased one scores."""
    seeds, seen = data("truth")["whole"]["seeds"], 0
    cells = (
        (row, number, head.index(f"seed {number}"), head)
        for head, rows in tables(text)
        for row in rows
        for number in seeds
        if f"seed {number}" in head
    )
    for row, number, index, head in cells:
        named, weight = re.match(r"`([^`]+)`", row[0]), re.search(r"lambda ([\d.]+)", row[0])
        own = named[1] if named else f"gae, lambda {weight[1]}" if weight else ""
        if own not in seeds[number]["estimators"]:
            continue
        found, seen = seeds[number]["estimators"][own], seen + 1
        parts = [f"{found['correlation']:z.2f} ({found['low']:z.2f} to {found['high']:z.2f})"]
        parts += [f"{found['gradient_cosine']:z.2f}"] if ";" in row[index] else []
        told = row[index]
        if head[index + 1 : index + 2] == ["unbiased"]:
            parts.append("-" if found.get("unbiased") is None else f"{found['unbiased']:z.2f}")
            told += f"; {row[index + 1]}"
        if told != "; ".join(parts):
            yield f"{TRUTH}: {row[0]}, seed {number}: the data say {'; '.join(parts)!r}, the page {told!r}"
    if seen < 21:
        yield f"{TRUTH}: only {seen} cells of the table of whole games were found"


class Row(NamedTuple):
    """A row of a table, and the paragraph above the table."""

    text: str
    above: str

    @property
    def script(self) -> str:
        return self.text.strip("| ").rpartition("|")[2].strip()


def rows_of(text: str) -> list[Row]:
    """The rows of all tables of a page, without their heads."""
    blocks = [block.splitlines() for block in re.split(r"\n\s*\n", text)]
    rows: list[Row] = []
    for above, block in zip([[""], *blocks], blocks, strict=False):
        if block and block[0].startswith("|"):
            rows += [Row(line, " ".join(above)) for line in block[2:]]
    return rows


def the_row(page: str, rows: Sequence[Row], words: str) -> str:
    found = [row.text for row in rows if words in row.text]
    if len(found) != 1:
        raise SystemExit(f"{page}: {len(found)} rows have {words!r}; a claim needs one")
    return found[0]


def problems(pages: Mapping[str, str]) -> list[str]:
    """What the pages, text by path, say otherwise than the data, or without data, script and mark."""
    found, rows = [], {page: rows_of(text) for page, text in pages.items()}
    made = claims()
    for page, words, text in made:
        row = the_row(page, rows[page], words) if words else " ".join(pages[page].split())
        if text not in row:
            found.append(f"{page}: the data say {text!r}, the row {row[:300]!r}")
    for readme, figures, texts in REPEATED:
        for page, words in ((README, readme), (FIGURES, figures)):
            row = the_row(page, rows[page], words)
            missing = [text for text in texts if text not in row]
            found += [f"{page}: {text!r} is not in the row {words!r}, as in the other" for text in missing]
    found += truth_problems(pages[TRUTH])
    for page in (README, FIGURES):
        found += [f"{page}: no data, script or mark: {row[:200]}" for row in _unfounded(page, rows, made)]
    if MARK not in pages[STUDIES].partition("\n## ")[0]:
        found.append(f"{STUDIES}: its first paragraph has to say {MARK}")
    return found


def _unfounded(page: str, rows: Mapping[str, Sequence[Row]], made: Sequence[Claim]) -> Iterator[str]:
    """Rows that rest on nothing."""
    script = ""
    for row in rows[page]:
        if page == README and "docs/figures.md" not in row.above:
            continue  # of its tables, that of the figures alone
        script = row.script if not row.script.startswith("the same") else script
        claimed = any(claim.page == page and claim.row and claim.row in row.text for claim in made)
        repeated = [figures for readme, figures, _ in REPEATED if page == README and readme in row.text]
        marked = MARK in row.text or MARK in row.above.replace(f"*{MARK}*", "")  # where it is explained
        if repeated and not marked and MARK in the_row(FIGURES, rows[FIGURES], repeated[0]):
            yield row.text  # the mark of docs/figures.md is missing here
        if not (claimed or marked or repeated or (page == FIGURES and measured_again(script))):
            yield row.text


def measured_again(script: str) -> bool:
    """Whether a column names a script of bench/ that is no study, or a test, and the file is there; or one of
    an earlier commit."""
    named = re.findall(r"`((?:bench|tests)/[\w/]+(?:\.py)?)", script)
    return bool(re.search(r"`[0-9a-f]{8}:bench/\w+\.py", script)) or any(
        (kit.ROOT / name).exists() and not Path(name).name.startswith("study_") for name in named
    )


def main() -> int:
    pages = {page: (kit.ROOT / page).read_text(encoding="utf-8") for page in PAGES}
    found = problems(pages)
    print("\n".join(found))
    return kit.report(f"{len(claims())} claims of {', '.join(PAGES)}: {len(found)} do not hold", not found)


if __name__ == "__main__":
    sys.exit(main())
