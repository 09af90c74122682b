"""Encodes messages that contain arrays, for sending between processes: JSON, then the arrays' bytes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import GetCoreSchemaHandler, SerializationInfo, TypeAdapter, ValidationInfo
from pydantic_core import CoreSchema, core_schema

from shared_schemas.json_text import read_typed

# One number for each of the N sampled tokens of a segment, in order.
Row = NDArray[Any] | Sequence[float]

# Arrays start at multiples of 8 bytes, as processors and torch require.
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Column:
    """Annotation of a flat numpy array in a pydantic model, for `encoded` and `decoded`.

    In the JSON, the array is [offset in bytes, count]; its bytes follow the JSON. A decoded array is a
    read-only view of these bytes.
    """

    dtype: np.dtype[Any]
    """Dtype of the array, little-endian."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_plain_validator_function(
            self._read,
            serialization=core_schema.plain_serializer_function_ser_schema(self._write, info_arg=True),
        )

    def _write(self, array: NDArray[Any], info: SerializationInfo) -> tuple[int, int]:
        if array.dtype != self.dtype or array.ndim != 1:
            raise TypeError(
                f"an array of {array.ndim} dimensions and {array.dtype}; expected 1, {self.dtype}"
            )
        assert isinstance(info.context, _Bytes)
        return info.context.add(array), len(array)

    def _read(self, place: Any, info: ValidationInfo) -> NDArray[Any]:
        match place:
            case [int(offset), int(count)] if offset >= 0 and count >= 0:
                return np.frombuffer(info.context or b"", self.dtype, count, offset)
        raise ValueError(f"an array is [offset, count], got {place!r}")


@dataclass(slots=True)
class _Bytes:
    """Collects the bytes of arrays, one after the other."""

    parts: list[memoryview | bytes] = field(default_factory=list)
    size: int = 0

    def add(self, array: NDArray[Any]) -> int:
        """Append an array's bytes; return the offset at which they start."""
        offset, padding = self.size, -array.nbytes % _ALIGNMENT
        self.parts += [np.ascontiguousarray(array).view(np.uint8).data, bytes(padding)]
        self.size += array.nbytes + padding
        return offset


def encoded(adapter: TypeAdapter[Any], value: Any) -> bytes:
    """Encode a value as one line of JSON, followed by the bytes of its arrays.

    Spaces at the end of the line align the arrays.
    """
    arrays = _Bytes()
    head = adapter.dump_json(value, context=arrays)
    padding = b" " * (-(len(head) + 1) % _ALIGNMENT)
    return b"".join([head, padding, b"\n", *arrays.parts])


def decoded(adapter: TypeAdapter[Any], body: bytes) -> Any:
    """Decode a result of `encoded`; arrays are views of `body`. Raises the errors of `read_typed`."""
    end = body.find(b"\n") + 1 or len(body)
    whole = memoryview(body)
    return read_typed(partial(adapter.validate_json, context=whole[end:]), bytes(whole[:end]))
