"""`Table`, from which the keys of each component are derived, in the component's own file."""

from pydantic import ConfigDict

from shared_schemas.base import Body


class Table(Body):
    """Keys of a job. No number in them may be infinite or NaN; the sentence beneath a field describes it."""

    model_config = ConfigDict(allow_inf_nan=False, use_attribute_docstrings=True)
