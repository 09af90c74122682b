"""What `turnwise recredit` leaves on disk: figures as JSON, advantages as Parquet, one picture."""

import json
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

from trainer_backend.core.agreement import correlation, sign_agreement, spread_of
from trainer_backend.recredit.estimators import Recredited
from trainer_backend.report.agreement_chart import agreement_png
from trainer_backend.rundir.boundary import writing
from trainer_backend.rundir.rollout_files import write_rollouts


def write_recredit(
    found: Recredited, folder: Path, cosines: Mapping[tuple[str, str], float] | None = None
) -> None:
    """`figures.json`, `agreement.png`, and NAME.parquet for each estimator: the rollouts with its credit.

    Raises:
        RunDirectoryError: the disk is full, or refuses.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "figures.json").write_text(json.dumps(figures(found, cosines), indent=1), encoding="utf-8")
        if len(found.credits) > 1:
            (folder / "agreement.png").write_bytes(
                agreement_png({name: found.advantages(name) for name in found.credits})
            )
    for name, credits in found.credits.items():
        write_rollouts(folder / f"{name}.parquet", found.rollouts, credits)


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
