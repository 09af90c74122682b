"""What a gateway and its engine's process say to each other: frames over a pair of connected sockets.

    gateway -> engine    generate: EngineCall; abort: number of what; load: PolicyVersion; probe
    engine -> gateway    token: SampledToken, any number of times, and then
                         done: the sample, if it was one, and counts of the engine; or error: ErrorBody

A frame is its length, four bytes, and the number of the call, its kind and JSON, with a space between them.
Numbers come back bit for bit, NaN and infinity too.
"""

import asyncio
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from shared_schemas.trajectory import Sampling
from trainer_backend.inference.protocol import Generation, SampledToken
from trainer_backend.inference.versions import PolicyVersion
from trainer_backend.learner.calls import ErrorBody

_LENGTH = struct.Struct("<I")
# Number of the call, kind, and what it carries.
Frame = tuple[int, str, tuple[Any, ...]]
Kinds = Mapping[str, TypeAdapter[tuple[Any, ...]]]


@dataclass(frozen=True, slots=True)
class EngineCall:
    """A request for a sample; fields that `Extras` has too mean the same."""

    ids: tuple[int, ...]
    sampling: Sampling
    likeliest: int
    processed: bool
    common_draws: bool
    stop: tuple[str, ...]
    """Strings that end it, in the text that the policy's tokenizer gives."""
    streams: bool
    """Whether each token is sent as it comes."""


def _carries(*types: Any) -> TypeAdapter[tuple[Any, ...]]:
    # mypy takes a subscript for a type, which this one is when it runs.
    whole: Any = tuple.__class_getitem__(types)
    return TypeAdapter(whole, config=ConfigDict(ser_json_inf_nan="constants"))


TO_ENGINE: Kinds = MappingProxyType(
    {
        "generate": _carries(EngineCall),
        "abort": _carries(int),
        "load": _carries(PolicyVersion),
        "probe": _carries(),
    }
)
TO_GATEWAY: Kinds = MappingProxyType(
    {
        "token": _carries(SampledToken),
        "done": _carries(Generation | None, tuple[float, ...]),
        "error": _carries(ErrorBody),
    }
)


class Line:
    """One end of the connection; it belongs to an event loop.

    Args:
        says, hears: kinds of frames that are sent and received here.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, says: Kinds, hears: Kinds
    ) -> None:
        self._reader, self._writer, self._says, self._hears = reader, writer, says, hears

    def say(self, number: int, kind: str, *carried: Any) -> None:
        """Send a frame; nothing happens where the other end has gone, which `hear` tells."""
        if not self._writer.is_closing():
            body = b"%d %s " % (number, kind.encode()) + self._says[kind].dump_json(carried)
            self._writer.write(_LENGTH.pack(len(body)) + body)

    async def hear(self) -> Frame | None:
        """The next frame; None once the other end has gone."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            number, kind, body = (await self._reader.readexactly(length)).split(b" ", 2)
        except (asyncio.IncompleteReadError, OSError):
            return None
        return int(number), kind.decode(), self._hears[kind.decode()].validate_json(body)

    def close(self) -> None:
        self._writer.close()
