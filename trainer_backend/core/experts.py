"""Encodes and decodes the experts that a sampler chose for tokens of a mixture-of-experts model.

W is the number of experts per token, over all layers. UNKNOWN means that the sampler reported no expert.
"""

from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import PlainSerializer, PlainValidator

from shared_schemas.trajectory import ExpertChoices
from trainer_backend.errors import SegmentError

ID = np.dtype("<u2")
# The number of an unknown expert in an array; the learner's router then chooses.
UNKNOWN = int(np.iinfo(ID).max)
_TYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: ID}


def write_experts(experts_LW: NDArray[np.uint16], first: int) -> dict[str, Any]:
    """Return the JSON of `ExpertChoices` for the experts, [L, W], of the tokens from index `first` on.

    Each number takes one byte if all are below 255, otherwise two.
    """
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
    """Decode the experts, [n, W], of the n tokens from index `choices.first` on.

    Raises SegmentError if the data is not base64, does not contain W numbers for each token, or continues
    beyond the `length` tokens of the model call. `where` is the place named in errors.
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
            f"experts are given for tokens {choices.first} to {choices.first + len(experts_LW)}, but the "
            f"call has {length}",
            where=where,
        )
    if choices.number_bytes == 1:
        experts_LW[experts_LW == 255] = UNKNOWN
    return experts_LW


def join_experts(
    parts: Sequence[tuple[int, NDArray[np.uint16]]], length: int, *, where: str
) -> NDArray[np.uint16]:
    """Join the experts of parts of a token sequence; return the experts of all its tokens, [length * W].

    Each part is (index of its first token, its experts [n, W]). A later part overwrites an earlier one, a
    part is cut off at `length`, and tokens outside all parts get UNKNOWN. Without parts the result is empty.
    Raises SegmentError if parts differ in W.
    """
    if not parts:
        return np.zeros(0, ID)
    widths = {experts_LW.shape[1] for _, experts_LW in parts}
    if len(widths) > 1:
        raise SegmentError(
            f"experts of {sorted(widths)} numbers per token; all parts of a sequence must agree", where=where
        )
    joined_LW = np.full((length, widths.pop()), UNKNOWN, ID)
    for first, experts_LW in parts:
        here_LW = joined_LW[first : first + len(experts_LW)]
        here_LW[:] = experts_LW[: len(here_LW)]
    return joined_LW.ravel()


# Experts of all L tokens, [L, W]; in JSON between processes, an `ExpertChoices`.
ExpertColumns = Annotated[
    NDArray[np.uint16],
    PlainValidator(_read_whole),  # must come first, otherwise it removes the serializer
    PlainSerializer(lambda experts_LW: write_experts(experts_LW, 0)),
]
