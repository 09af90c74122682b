"""Pure: the credit of a decision for pages and `turnwise inspect`: its figures, and where they come from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainer_backend.core.advantages.derivation import PARTS
from trainer_backend.plugins import ESTIMATORS

Columns = Mapping[str, Any]  # of one decision in a Parquet file

_FIGURES = (
    ("reward", "r_t", "what this decision earned"),
    ("return_to_go", "return-to-go", "discounted sum of r from here on"),
    ("value", "V", "the return that the critic expected"),
    ("episode_advantage", "A_E", "its episode against the siblings"),
    ("step_advantage", "A_S", "the decision against others made in the same state"),
    ("advantage", "advantage", "what the update was given"),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its name and the meaning of the name."""

    name: str
    value: str
    meaning: str


def credit_figures(stored: Columns, show: Callable[[float], str]) -> list[Figure]:
    """Return the rewards and advantages that a decision has."""
    numbers = _numbers(stored)
    return [
        Figure(title, show(value), meaning)
        for name, title, meaning in _FIGURES
        if (value := numbers.get(name)) is not None
    ]


def credit_lines(stored: Columns) -> list[tuple[str, str]]:
    """Return how the advantage follows from its parts: equations with their numbers, each with words.

    Files of earlier versions tell neither parts nor estimator; nothing is returned.
    """
    plug = ESTIMATORS.get(stored.get("estimator") or "")
    return [] if plug is None else plug.derivation.lines(_numbers(stored), _shown)


def _numbers(stored: Columns) -> dict[str, float | None]:
    """Every number by its name; in files of earlier versions some parts are columns."""
    names = {*PARTS, "reward", "return_to_go", "advantage"}
    return {name: stored.get(name) for name in names} | (stored.get("advantage_parts") or {})


_ROUNDING = 1e-12  # of sums in double precision, which is shown as 0


def _shown(value: float) -> str:
    """Three decimals, so that sums can be checked by eye; small numbers with three digits."""
    value = 0.0 if abs(value) < _ROUNDING else value
    text = f"{value:.3f}" if abs(value) >= 0.1 or value == 0.0 else f"{value:.3g}"
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text
