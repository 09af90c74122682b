"""The base of every class that declares keys of a job, in the file that reads them.

A job's table inherits these classes, so `[training]` is what a loss reads, and nothing is copied.
"""

from pydantic import ConfigDict

from shared_schemas.base import Body


class Table(Body):
    """Keys of a job; no number may be infinite or NaN. The sentence beneath a field is its documentation."""

    model_config = ConfigDict(allow_inf_nan=False, use_attribute_docstrings=True)
