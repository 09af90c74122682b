"""Encodes messages with arrays between processes: JSON, followed by the arrays' bytes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import GetCoreSchemaHandler, SerializationInfo, TypeAdapter, ValidationInfo
from pydantic_core import CoreSchema, core_schema

from shared_schemas.json_text import read_typed

# Numbers of the N sampled tokens of a segment, in order.
Row = NDArray[Any] | Sequence[float]

# Arrays start at multiples of 8 bytes, as processors and torch require.
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Column:
    """Makes pydantic write a flat array as [offset in bytes, count]; the array's bytes follow the JSON.

    Arrays that were read are read-only views of these bytes.
    """

    dtype: np.dtype[Any]
    """Little-endian."""

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
    """The bytes of arrays, one after the other."""

    parts: list[memoryview | bytes] = field(default_factory=list)
    size: int = 0

    def add(self, array: NDArray[Any]) -> int:
        """Add an array's bytes; return the offset of the first."""
        offset, padding = self.size, -array.nbytes % _ALIGNMENT
        self.parts += [np.ascontiguousarray(array).view(np.uint8).data, bytes(padding)]
        self.size += array.nbytes + padding
        return offset


def encoded(adapter: TypeAdapter[Any], value: Any) -> bytes:
    """Encode a value as one line of JSON, padded with spaces, and the bytes of its arrays."""
    arrays = _Bytes()
    head = adapter.dump_json(value, context=arrays)
    padding = b" " * (-(len(head) + 1) % _ALIGNMENT)
    return b"".join([head, padding, b"\n", *arrays.parts])


def decoded(adapter: TypeAdapter[Any], body: bytes) -> Any:
    """Read what `encoded` wrote; arrays are views of `body`. Raises ValueError as `read_typed`."""
    end = body.find(b"\n") + 1 or len(body)
    whole = memoryview(body)
    return read_typed(partial(adapter.validate_json, context=whole[end:]), bytes(whole[:end]))
