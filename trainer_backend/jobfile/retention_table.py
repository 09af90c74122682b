"""[retention] of a job TOML: how long what a run has stored is kept."""

from pydantic import Field

from trainer_backend.jobfile.table import Table


class RetentionTable(Table):
    """[retention]: read by `turnwise trainer`, which indexes runs in its database; absent keys keep all."""

    decisions_iterations: int | None = Field(
        default=None,
        ge=1,
        description="the database keeps single decisions of the newest so many iterations; rollouts, metrics "
        "and the run directory keep all",
    )
    decisions_days: float | None = Field(
        default=None,
        gt=0,
        description="the same by age, in days since their file was written; looked at when the run has news "
        "and when the service starts",
    )
    rollout_files_iterations: int | None = Field(
        default=None,
        ge=1,
        description="the run directory keeps the rollout files of the newest so many iterations and those of "
        "evaluations; older ones are deleted, and leave the database with it",
    )
