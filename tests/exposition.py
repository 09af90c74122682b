"""What a scraper may rely on: names, types, helps, names of labels, and the edges of buckets."""

import re


def shape(text: str) -> list[str]:
    """The lines of our families in order, without values, and a sample for each name and its labels."""
    lines = (re.sub(r'(?<!le)="[^"]*"', "", line) for line in text.splitlines() if "turnwise" in line)
    return [*dict.fromkeys(line if line.startswith("#") else line.rpartition(" ")[0] for line in lines)]
