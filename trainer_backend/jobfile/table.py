"""What every table of a job is."""

from pydantic import ConfigDict

from shared_schemas.base import Body


class Table(Body):
    """A table of the job; no number in it may be infinite or NaN."""

    model_config = ConfigDict(allow_inf_nan=False)
