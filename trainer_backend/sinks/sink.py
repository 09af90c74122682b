"""What a sink of metrics is, and what of a row it gets. Reading this file imports no sink's library."""

import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trainer_backend.errors import JobError
from trainer_backend.jobfile.sinks_table import SinksTable


class Sink(Protocol):
    """Takes rows of metrics.jsonl, oldest first. May raise anything; then it is told and dropped."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Take one row; returns at once."""

    def close(self) -> None:
        """Hand on what is still buffered."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What a sink is opened with.

    Attributes:
        table: [sinks].
        folder: the run directory.
        run_id: the same for every start of the run.
        job: the whole job as plain values, without its keys.
    """

    table: SinksTable
    folder: Path
    run_id: str
    job: Mapping[str, Any]


OpenSink = Callable[[Opening], Sink]


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def refuse_missing(table: SinksTable, *, installed: Callable[[str], bool] = is_installed) -> None:
    """Before anything is started: the library of every sink that the job asks for must be there.

    Raises:
        JobError: it is not; the sentence names what to install.
    """
    for name in type(table).model_fields:
        if getattr(table, name) and not installed(name):
            raise JobError(
                f"sinks.{name} needs the package {name}, which is not installed: "
                f"pip install 'turnwise[{name}]'"
            )


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row by tag, for sinks that draw curves.

    A table such as eval/success_rates gives a tag an entry. Rows of other kinds than `iteration` have their
    kind before the name, so that an evaluation's rollout/finished stays apart from the iteration's.
    Left out are lists (a reward for every turn is no curve), texts, and what is not finite.
    """
    kind = row["kind"]
    tags: dict[str, float] = {}
    for name, value in row.items():
        if name in ("kind", "iteration"):
            continue
        prefix = {"iteration": "", "evaluation": "eval/"}.get(kind, f"{kind}/")
        tag = name if name.startswith(prefix) else prefix + name
        if isinstance(value, Mapping):
            tags |= {f"{tag}/{key}": number for key, number in value.items() if _is_number(number)}
        elif _is_number(value):
            tags[tag] = value
    return {tag: float(value) for tag, value in tags.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
