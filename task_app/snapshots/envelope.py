"""The envelope of a snapshot: a byte format with the snapshot's kind, a version and a checksum.

    TWSN | format: 2 bytes | length of zlib part: 4 | SHA-256 of all other bytes: 32 | zlib of (head, state)

`head` is JSON; `state` contains the environment's own bytes and is never unpickled. The checksum detects
accidental damage only: anyone can compute it, so the reader validates head and state like any other input.
"""

import base64
import binascii
import hashlib
import json
import struct
import zlib
from collections.abc import Mapping
from typing import Any, Literal

from cachetools import LRUCache

from task_app.errors import SnapshotRefused

Kind = Literal["environment", "policy"]

FORMAT = 1
MAGIC = b"TWSN"
_PREFIX = struct.Struct("<4sHI32s")
_HEAD_LENGTH = struct.Struct("<I")
# The fastest level, because the state of a random generator does not compress at any level.
_LEVEL = 1
_ROUTES: dict[Kind, str] = {"environment": "/env/restore", "policy": "/policy/restore"}


def seal(kind: Kind, head: Mapping[str, Any], state: bytes, *, at_most_bytes: int) -> bytes:
    """Return a snapshot in its envelope.

    Raises SnapshotRefused if the snapshot has more than `at_most_bytes` before compression.
    """
    text = json.dumps({"kind": kind, **head}, ensure_ascii=False, allow_nan=False)
    # A lone surrogate from a plug-in becomes "?", as in every answer.
    line = text.encode("utf-8", "replace")
    inside = _HEAD_LENGTH.pack(len(line)) + line + state
    if len(inside) > at_most_bytes:
        raise SnapshotRefused(
            f"this snapshot holds {len(inside)} bytes; at most {at_most_bytes} are taken back"
        )
    body = zlib.compress(inside, _LEVEL)
    return _PREFIX.pack(MAGIC, FORMAT, len(body), _checksum(len(body), body)) + body


def open_envelope(kind: Kind, data: bytes, *, at_most_bytes: int) -> tuple[dict[str, Any], bytes]:
    """Return the head and the state that `seal` put into the envelope.

    Raises:
        SnapshotRefused: `data` is not a snapshot, has another version or kind, was cut short or changed, or
            has more than `at_most_bytes` when decompressed.
    """
    inside = _decompress(_read_body(data), at_most_bytes=at_most_bytes)
    (length,) = _HEAD_LENGTH.unpack_from(inside.ljust(_HEAD_LENGTH.size, b"\0"))
    start = _HEAD_LENGTH.size + length
    try:
        head = json.loads(inside[_HEAD_LENGTH.size : start])
    except (ValueError, RecursionError) as exc:
        raise SnapshotRefused("the snapshot's head is no JSON") from exc
    if not isinstance(head, dict) or head.get("kind") not in _ROUTES:
        raise SnapshotRefused("the snapshot's head does not name its kind")
    head_kind: Kind = head.pop("kind")
    if head_kind != kind:
        raise SnapshotRefused(
            f"this is a snapshot of the kind {head_kind!r}, expected {kind!r}",
            hint=f"{_ROUTES[head_kind]} takes it",
        )
    return head, inside[start:]


def to_text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def from_text(text: str, *, where: str) -> bytes:
    """Decode a snapshot from base64. Raises SnapshotRefused for text that `to_text` would not write."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise SnapshotRefused(f"the snapshot is not base64: {exc}", where=where) from exc
    # base64 ignores some bits of the last letter, so a changed letter may decode to the same bytes.
    if to_text(data) != text:
        raise SnapshotRefused("the snapshot is not the base64 that this service writes", where=where)
    return data


def _read_body(data: bytes) -> bytes:
    """Check an envelope's version, length and checksum; return its compressed part."""
    if len(data) < _PREFIX.size or not data.startswith(MAGIC):
        raise SnapshotRefused(
            f"{len(data)} bytes that are no snapshot of a task app", hint="cut at its start?"
        )
    _, version, length, checksum = _PREFIX.unpack_from(data)
    if version != FORMAT:
        raise SnapshotRefused(f"the snapshot has format {version}; this task app reads {FORMAT}")
    body = data[_PREFIX.size :]
    if len(body) != length:
        fault = "cut short" if len(body) < length else "followed by something else"
        raise SnapshotRefused(f"the snapshot is {fault}: {len(body)} of {length} bytes after its start")
    if _checksum(length, body) != checksum:
        raise SnapshotRefused("the snapshot's checksum does not match: a part of it was changed on the way")
    return body


def _checksum(length: int, body: bytes) -> bytes:
    digest = hashlib.sha256(MAGIC + FORMAT.to_bytes(2, "little") + length.to_bytes(4, "little"))
    digest.update(body)
    return digest.digest()


def _decompress(body: bytes, *, at_most_bytes: int) -> bytes:
    """Decompress `body`, but stop above `at_most_bytes`, because a small body could become gigabytes.

    Raises SnapshotRefused if the result is larger.
    """
    inflater = zlib.decompressobj()
    try:
        inside = inflater.decompress(body, at_most_bytes + 1)
    except zlib.error as exc:
        raise SnapshotRefused(f"the snapshot does not decompress: {exc}") from exc
    if len(inside) > at_most_bytes:
        raise SnapshotRefused(f"the snapshot holds more than {at_most_bytes} bytes")
    if not inflater.eof or inflater.unused_data:
        raise SnapshotRefused("the snapshot's compressed part does not end where it says")
    return inside


class ByteCache(LRUCache[str, bytes]):
    """A least-recently-used cache of at most `at_most` byte strings with at most `at_most_bytes` in total.

    `get` counts as use.
    """

    def __init__(self, *, at_most: int, at_most_bytes: int) -> None:
        super().__init__(at_most_bytes, getsizeof=len)
        self._at_most = at_most

    def put(self, name: str, data: bytes) -> bool:
        """Store the data under `name`, and drop the least recently used entries to make room.

        If `data` alone exceeds `at_most_bytes`, return False and store nothing.
        """
        if len(data) > self.maxsize:
            return False
        self[name] = data
        while len(self) > self._at_most:
            self.popitem()
        return True
