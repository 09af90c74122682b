"""`--set table.key=value`: overrides of a job's keys, and which place is named when one of them is wrong."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tomli

from trainer_backend.errors import JobError
from trainer_backend.jobfile.layers import Files, is_in, make_way


@dataclass(frozen=True, slots=True)
class Override:
    """An override that was applied. Its value is not kept: it may be a key, and a place is shown.

    Attributes:
        dotted: the key as it was given.
        owned: `dotted`, or the first part of it that was not there before: all below it came with --set.
    """

    dotted: str
    owned: str

    def __str__(self) -> str:
        return f"--set {self.dotted}=…"


@dataclass(frozen=True, slots=True)
class Places:
    """Where the keys of a job come from: its files, and the overrides in the order in which they came."""

    files: Files
    overrides: Sequence[Override] = ()

    def of(self, *dotted: str) -> str:
        """The place to name for a key; several for a key that may stand in several tables."""
        owners = [item for item in self.overrides if any(is_in(key, item.owned) for key in dotted)]
        if owners:
            return str(
                max(reversed(owners), key=lambda item: len(item.owned))
            )  # of equals the last, which won
        inside = [item for item in self.overrides if any(is_in(item.dotted, key) for key in dotted)]
        return _with(self.files.of(*dotted), inside)

    def of_sentence(self, sentence: str) -> str:
        """The place to name for keys that contradict each other; the sentence names them."""
        inside = [item for item in self.overrides if item.dotted in sentence]
        return _with(self.files.of_sentence(sentence), inside)


def _with(files: str, overrides: Sequence[Override]) -> str:
    told = " ".join(dict.fromkeys(map(str, overrides)))
    return f"{files} with {told}" if told else files


def apply_override(document: dict[str, Any], override: str) -> Override:
    """Put the value of `table.key=value` into the document.

    The value is read as TOML; what is no TOML counts as a string.

    Raises:
        JobError: it names no key in a table.
    """
    dotted, equals, text = override.partition("=")  # in errors without its value, which may be a key
    keys = dotted.strip().split(".")
    if not equals or len(keys) < 2 or not all(keys):
        raise JobError(f"--set {dotted!r}: expected table.key=value, such as training.group_size=4")
    try:
        value = tomli.loads(f"value = {text}")["value"]
    except tomli.TOMLDecodeError:
        value = text
    table, owned = document, len(keys)
    for depth, key in enumerate(keys[:-1], start=1):
        if key not in table:
            owned = min(owned, depth)
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            found = (
                "several tables, of which --set names none"
                if isinstance(table, list) and table and isinstance(table[0], dict)
                else "a value, not a table"
            )
            raise JobError(f"--set {dotted!r}: {key} is {found}")
    table[keys[-1]] = value
    layer = value
    for key in reversed(keys):
        layer = {key: layer}
    make_way(document, layer)
    return Override(".".join(keys), ".".join(keys[:owned]))
