"""The base class of all keys of a job. Keys are declared in the file that reads them.

A job's table inherits these classes, so a loss reads its keys from `[training]` directly.
"""

from pydantic import ConfigDict

from shared_schemas.base import Body


def refuse_no_share(**shares: float) -> None:
    """Raise ValueError, with the name, for a value outside [0, 1]."""
    for name, share in shares.items():
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"{name} must lie in [0, 1], got {share}")


class Table(Body):
    """Keys of a job; no number may be infinite or NaN.

    The sentence beneath a field is its documentation. job/docs.py reads it from the source;
    `use_attribute_docstrings` of pydantic would read it at every start.
    """

    model_config = ConfigDict(allow_inf_nan=False, defer_build=True)
