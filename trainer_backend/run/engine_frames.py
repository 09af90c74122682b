"""What a gateway and its engine's process say to each other: frames over a pair of connected sockets.

    gateway -> engine    (number, "generate", EngineCall), (number, "abort", number of what),
                         (number, "load", PolicyVersion), (number, "probe")
    engine -> gateway    (number, "token", SampledToken) any number of times, and then
                         (number, "done", the result, counts of the engine) or (number, "error", ErrorBody)

A frame is its length, four bytes, and a pickle: both ends are this program, one of which started the other.
"""

import asyncio
import pickle
import struct
from dataclasses import dataclass
from typing import Any

from shared_schemas.trajectory import Sampling

_LENGTH = struct.Struct("<I")
Frame = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class EngineCall:
    """A request for a sample.

    Attributes:
        likeliest, processed: as in `Extras`.
        stop: strings that end it, in the text that the policy's tokenizer gives.
        streams: whether each token is told as it comes.
    """

    ids: tuple[int, ...]
    sampling: Sampling
    likeliest: int
    processed: bool
    stop: tuple[str, ...]
    streams: bool


class Line:
    """One end of the connection; it belongs to an event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def say(self, *frame: Any) -> None:
        """Send a frame; nothing happens where the other end has gone."""
        if not self._writer.is_closing():
            body = pickle.dumps(frame, pickle.HIGHEST_PROTOCOL)
            self._writer.write(_LENGTH.pack(len(body)) + body)

    async def hear(self) -> Frame | None:
        """The next frame; None once the other end has gone."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            frame: Frame = pickle.loads(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError):
            return None
        return frame

    def close(self) -> None:
        self._writer.close()
