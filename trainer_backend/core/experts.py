"""The experts that a sampler sent tokens to, as they travel with a rollout and as columns of a segment."""

from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import PlainSerializer, PlainValidator

from shared_schemas.trajectory import ExpertChoices
from trainer_backend.errors import SegmentError

ID = np.dtype("<u2")
# In a column: the expert is not known, and the learner's router chooses.
UNKNOWN = int(np.iinfo(ID).max)
_TYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: ID}


def write_experts(experts_LW: NDArray[np.uint16], first: int) -> dict[str, Any]:
    """The JSON of `ExpertChoices` for tokens from the place `first` on; of a byte each if that will do."""
    size = 1 if bool((experts_LW < 255).all()) else 2
    data = b64encode(experts_LW.astype(_TYPES[size]).tobytes()).decode()
    return {"first": first, "per_token": experts_LW.shape[1], "number_bytes": size, "data": data}


def _read_whole(value: Any) -> NDArray[np.uint16]:
    if isinstance(value, np.ndarray):
        return value
    choices = ExpertChoices.model_validate(value)
    try:
        return read_experts(choices, length=choices.first + len(choices.data), where="experts")
    except SegmentError as error:
        raise ValueError(error.detail) from error


def read_experts(choices: ExpertChoices, *, length: int, where: str) -> NDArray[np.uint16]:
    """[n, W] of n tokens from the place `choices.first` on.

    Raises:
        SegmentError: the data is no base64 of whole tokens, or goes beyond the `length` tokens of the call.
    """
    try:
        numbers = np.frombuffer(b64decode(choices.data, validate=True), _TYPES[choices.number_bytes])
        experts_LW: NDArray[np.uint16] = numbers.reshape(-1, choices.per_token).astype(ID)
    except ValueError as error:
        raise SegmentError(
            f"experts.data is no base64 of {choices.per_token} numbers a token: {error}", where=where
        ) from error
    if choices.first + len(experts_LW) > length:
        raise SegmentError(
            f"experts are those of the tokens {choices.first} to {choices.first + len(experts_LW)}, and the "
            f"call has {length}",
            where=where,
        )
    if choices.number_bytes == 1:
        experts_LW[experts_LW == 255] = UNKNOWN
    return experts_LW


def join_experts(
    parts: Sequence[tuple[int, NDArray[np.uint16]]], length: int, *, where: str
) -> NDArray[np.uint16]:
    """[length * W] of one sequence, from parts that begin at their places; UNKNOWN where no part is.

    No part: empty. A part may go beyond `length`, and the later one holds.
    """
    if not parts:
        return np.zeros(0, ID)
    widths = {experts_LW.shape[1] for _, experts_LW in parts}
    if len(widths) > 1:
        raise SegmentError(
            f"experts of {sorted(widths)} numbers a token; those of one sequence have one number", where=where
        )
    joined_LW = np.full((length, widths.pop()), UNKNOWN, ID)
    for first, experts_LW in parts:
        here_LW = joined_LW[first : first + len(experts_LW)]
        here_LW[:] = experts_LW[: len(here_LW)]
    return joined_LW.ravel()


# [L, W], which crosses from one process to another as `ExpertChoices` of all L tokens.
ExpertColumns = Annotated[
    NDArray[np.uint16],
    PlainValidator(_read_whole),  # first, or it takes the serializer out
    PlainSerializer(lambda experts_LW: write_experts(experts_LW, 0)),
]
