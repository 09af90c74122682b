"""[data] of a job TOML: rows to train and evaluate on, where an environment does not make its own worlds."""

from pathlib import Path

from pydantic import Field, model_validator

from shared_schemas.rollouts import Name
from trainer_backend.jobfile.table import Table


class DataTable(Table):
    """[data]"""

    path: Path = Field(
        description="a .jsonl or .parquet file, or a folder as `datasets` or the hub have it (docs/data.md)"
    )
    split: str = Field(default="train", min_length=1, description="to train on; of a lone file its name only")
    evaluation_path: Path | None = Field(
        default=None, description="file or folder of the held-out rows; absent: path"
    )
    evaluation_split: str | None = Field(
        default=None,
        min_length=1,
        description="the held-out rows; absent: test, where evaluation_path is given",
    )
    held_out_share: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="instead of both: about this share of split is held out, by a hash of held_out_seed and "
        "a row's id",
    )
    held_out_seed: int = Field(
        default=0, ge=0, lt=2**31, description="jobs that share it hold out, and evaluate on, the same rows"
    )
    shuffle: bool = Field(
        default=True, description="each epoch in an order of its own; false: each in that of the file"
    )
    interaction: Name | None = Field(
        default=None,
        description="answers as the user where a row names no interaction; its kwargs are then the row's "
        "`query` and `ground_truth`, unless the row has its own",
    )

    @property
    def held_out(self) -> str:
        """Which rows are held out, where a person reads it."""
        if self.held_out_share is not None:
            share = f"{self.held_out_share:g} of {self.split} of {self.path}"
            return f"{share}, held_out_seed {self.held_out_seed}"
        return f"{self.held_out_split} of {self.evaluation_path or self.path}"

    @property
    def held_out_split(self) -> str:
        """The split of the held-out rows, where they are one."""
        return self.evaluation_split or "test"

    @model_validator(mode="after")
    def _one_way_to_hold_out(self) -> "DataTable":
        named = self.evaluation_path is not None or self.evaluation_split is not None
        if named == (self.held_out_share is not None):
            found = ", and not both" if named else "; found none"
            raise ValueError(
                "held-out rows come from evaluation_split or evaluation_path, or are a held_out_share of "
                f"split{found}"
            )
        if self.evaluation_path is None and self.evaluation_split == self.split:
            raise ValueError(
                f"evaluation_split is {self.split!r}, which is trained on; did you mean held_out_share?"
            )
        return self
