"""Weights & Biases: one run of the project for one run directory, also after a resume."""

from collections.abc import Mapping
from typing import Any

from trainer_backend.sinks.sink import Opening, Sink, scalars


def open_wandb(opening: Opening) -> Sink:
    """Begin the run, or go on with it: what it holds already is not sent again."""
    return _Wandb(opening)


class _Wandb:
    def __init__(self, opening: Opening) -> None:
        import wandb

        table = opening.table.wandb
        assert table is not None, "opened only where the job asks for it"
        self._run = wandb.init(
            project=table.project,
            entity=table.entity,
            name=table.name or opening.folder.name,
            mode=table.mode,
            id=opening.run_id,
            resume="allow",
            dir=str(opening.folder),
            config=dict(opening.job),
            # A run of its own, whatever else this process logs; and nothing of it in our live table.
            settings=wandb.Settings(console="off", silent=True),
            reinit="create_new",
        )
        # W&B takes no row of a step before the one that it is at.
        self._from = self._run.step

    def write(self, row: Mapping[str, Any]) -> None:
        if row["iteration"] >= self._from:
            self._run.log(scalars(row), step=row["iteration"])

    def close(self) -> None:
        self._run.finish()
