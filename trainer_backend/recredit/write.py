"""What `turnwise recredit` leaves on disk: figures as JSON, advantages as Parquet, one page of charts."""

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

from trainer_backend.core.agreement import correlation, sign_agreement, spread_of
from trainer_backend.dashboard.panels import Panel
from trainer_backend.dashboard.rendering import saved_page
from trainer_backend.dashboard.series import Chart, Curve
from trainer_backend.recredit.estimators import Recredited
from trainer_backend.rundir.boundary import writing
from trainer_backend.rundir.rollout_files import write_rollouts

_POINTS = 4_000


def write_recredit(
    found: Recredited, folder: Path, cosines: Mapping[tuple[str, str], float] | None = None
) -> None:
    """`figures.json`, `agreement.html`, and NAME.parquet for each estimator: the rollouts with its credit.

    Raises:
        RunDirectoryError: the disk is full, or refuses.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "figures.json").write_text(json.dumps(figures(found, cosines), indent=1), encoding="utf-8")
        if len(found.credits) > 1:
            (folder / "agreement.html").write_bytes(
                agreement_page({name: found.advantages(name) for name in found.credits})
            )
    for name, credits in found.credits.items():
        write_rollouts(folder / f"{name}.parquet", found.rollouts, credits)


def agreement_page(advantages: Mapping[str, Sequence[float]]) -> bytes:
    """A chart for each estimator but the first: its advantages over the first's, a point a decision."""
    first, *others = advantages
    # Evenly spread over the batch: a picture of every decision would be a blot.
    step = max(1, len(advantages[first]) // _POINTS)
    charts = []
    for name in others:
        points = sorted(zip(advantages[first][::step], advantages[name][::step], strict=True))
        panel = Panel(
            name, name, f"Advantage of a decision, over that by {first}.", (), x=first, scatter=True
        )
        y_N = tuple(y for _, y in points)
        charts.append(Chart(panel, tuple(x for x, _ in points), (Curve(name, 0, 0, False, y_N),)))
    return saved_page("agreement", charts, first=first, panels=[chart.panel for chart in charts])


def figures(found: Recredited, cosines: Mapping[tuple[str, str], float] | None = None) -> dict[str, object]:
    """All numbers of the tables."""
    advantages = {name: found.advantages(name) for name in found.credits}
    pairs = list(combinations(advantages, 2))
    return {
        "episodes": len(found.rollouts),
        "estimators": {
            name: {
                "mean": spread_of(values).mean,
                "variance": spread_of(values).std ** 2,
                "zero_frac": spread_of(values).zero_frac,
            }
            for name, values in advantages.items()
        },
        "pairs": [
            {
                "estimators": [a, b],
                "correlation": correlation(advantages[a], advantages[b]),
                "sign_agreement": sign_agreement(advantages[a], advantages[b]),
                "gradient_cosine": (cosines or {}).get((b, a)),
            }
            for a, b in pairs
        ],
        "refused": dict(found.refused),
    }
