"""The base class of all groups of job keys. Each group is declared in the file that reads its keys.

The class of a TOML table, such as `[training]`, inherits the groups, so a loss can read its keys from the
table itself.
"""

from pydantic import ConfigDict

from shared_schemas.base import Body


def refuse_no_share(**shares: float) -> None:
    """Raise ValueError with the argument's name if a value lies outside [0, 1]."""
    for name, share in shares.items():
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"{name} must lie in [0, 1], got {share}")


class Table(Body):
    """A group of job keys; no number may be infinite or NaN.

    The string below a field is the field's documentation. job/docs.py reads these strings from the source.
    """

    # Without `use_attribute_docstrings`, which would parse the source at every start.
    model_config = ConfigDict(allow_inf_nan=False, defer_build=True)
