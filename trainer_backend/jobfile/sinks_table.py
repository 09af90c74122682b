"""[sinks] of a job TOML: where metrics go beside metrics.jsonl."""

from typing import Literal

from pydantic import Field

from trainer_backend.jobfile.table import Table


class WandbTable(Table):
    """sinks.wandb"""

    project: str = Field(min_length=1, description="that the run appears in")
    entity: str | None = Field(default=None, description="user or team; absent: the default one")
    name: str | None = Field(default=None, description="of the run; absent: that of its directory")
    mode: Literal["online", "offline"] | None = Field(
        default=None, description="absent: as WANDB_MODE says, else online"
    )


class SinksTable(Table):
    """[sinks]"""

    tensorboard: bool = Field(
        default=False,
        description="event files in RUN/tensorboard; needs `pip install 'turnwise[tensorboard]'`",
    )
    wandb: WandbTable | None = Field(
        default=None,
        description='`{ project = "…" }`, also `entity`, `name`, `mode` (online, offline); needs '
        "`pip install 'turnwise[wandb]'`",
    )
