"""The envelope of every snapshot: what it is of, in which version, whole and unchanged, within bounds.

    TWSN | format: 2 bytes | length of the rest: 4 | SHA-256 of all else: 32 | zlib of (head, state)

`head` is JSON, `state` the bytes of the environment. The checksum tells of accidents; it is no signature, so
whoever reads head and state checks them as anything that comes from outside. Never pickle.
"""

import base64
import binascii
import hashlib
import json
import struct
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Literal

from task_app.errors import SnapshotRefused

Kind = Literal["environment", "policy"]

FORMAT = 1
MAGIC = b"TWSN"
_FIXED = struct.Struct("<4sHI32s")
_HEAD_LENGTH = struct.Struct("<I")
# Fast, and the generator's words do not compress at any level.
_LEVEL = 1
_RESTORED_BY: dict[Kind, str] = {"environment": "/env/restore", "policy": "/policy/restore"}


@dataclass(frozen=True, slots=True)
class Contents:
    """What an envelope holds."""

    head: dict[str, Any]
    state: bytes


def seal(kind: Kind, contents: Contents, *, at_most_bytes: int) -> bytes:
    """The envelope around a snapshot.

    Raises:
        SnapshotRefused: it holds more than `at_most_bytes`, so that it could never be opened again.
    """
    text = json.dumps({"kind": kind, **contents.head}, ensure_ascii=False, allow_nan=False)
    # Half a character of a plug-in's becomes "?", as in every answer.
    head = text.encode("utf-8", "replace")
    inside = _HEAD_LENGTH.pack(len(head)) + head + contents.state
    if len(inside) > at_most_bytes:
        raise SnapshotRefused(
            f"this snapshot holds {len(inside)} bytes; at most {at_most_bytes} are taken back"
        )
    body = zlib.compress(inside, _LEVEL)
    return _FIXED.pack(MAGIC, FORMAT, len(body), _checksum(len(body), body)) + body


def open_envelope(kind: Kind, data: bytes, *, at_most_bytes: int) -> Contents:
    """What `seal` was given.

    Raises:
        SnapshotRefused: no snapshot, of another version or kind, cut short, changed, or too large inside.
    """
    inside = _inflated(_checked(data), at_most_bytes=at_most_bytes)
    (length,) = _HEAD_LENGTH.unpack_from(inside.ljust(_HEAD_LENGTH.size, b"\0"))
    start = _HEAD_LENGTH.size + length
    try:
        head = json.loads(inside[_HEAD_LENGTH.size : start])
    except (ValueError, RecursionError) as exc:
        raise SnapshotRefused("the snapshot's head is no JSON") from exc
    if not isinstance(head, dict) or head.get("kind") not in _RESTORED_BY:
        raise SnapshotRefused("the snapshot's head does not say what it is of")
    found: Kind = head.pop("kind")
    if found != kind:
        raise SnapshotRefused(
            f"this is a snapshot of the kind {found!r}, expected {kind!r}",
            hint=f"{_RESTORED_BY[found]} takes it",
        )
    return Contents(head, inside[start:])


def to_text(data: bytes) -> str:
    """A snapshot as it travels in JSON."""
    return base64.b64encode(data).decode()


def from_text(text: str, *, where: str) -> bytes:
    """The bytes of a snapshot in JSON.

    Raises:
        SnapshotRefused: not base64, or not as `to_text` writes it: a changed last letter may decode alike.
    """
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise SnapshotRefused(f"the snapshot is not base64: {exc}", where=where) from exc
    if to_text(data) != text:
        raise SnapshotRefused("the snapshot is not the base64 that this service writes", where=where)
    return data


def _checked(data: bytes) -> bytes:
    """The compressed body, whole and unchanged."""
    if len(data) < _FIXED.size or not data.startswith(MAGIC):
        raise SnapshotRefused(
            f"{len(data)} bytes that are no snapshot of a task app", hint="cut at its start?"
        )
    _, version, length, checksum = _FIXED.unpack_from(data)
    if version != FORMAT:
        raise SnapshotRefused(f"the snapshot has format {version}; this task app reads {FORMAT}")
    body = data[_FIXED.size :]
    if len(body) != length:
        told = "cut short" if len(body) < length else "followed by something else"
        raise SnapshotRefused(f"the snapshot is {told}: {len(body)} of {length} bytes after its start")
    if _checksum(length, body) != checksum:
        raise SnapshotRefused("the snapshot's checksum does not match: a part of it was changed on the way")
    return body


def _checksum(length: int, body: bytes) -> bytes:
    digest = hashlib.sha256(MAGIC + FORMAT.to_bytes(2, "little") + length.to_bytes(4, "little"))
    digest.update(body)
    return digest.digest()


def _inflated(body: bytes, *, at_most_bytes: int) -> bytes:
    """Decompress no more than the bound: a small body must not become gigabytes."""
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


class Held:
    """Byte strings by name.

    Args:
        at_most: how many.
        at_most_bytes: of all together; a larger one alone is not kept.
    """

    def __init__(self, *, at_most: int, at_most_bytes: int) -> None:
        self._at_most = at_most
        self._at_most_bytes = at_most_bytes
        self._items: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._items)

    def get(self, name: str) -> bytes | None:
        """The bytes, which count as used now."""
        if name in self._items:
            self._items.move_to_end(name)
        return self._items.get(name)

    def put(self, name: str, data: bytes) -> bool:
        """Keep byte strings and drop the least recently used; False if these alone exceed the bound."""
        if len(data) > self._at_most_bytes:
            return False
        self._bytes += len(data) - len(self._items.pop(name, b""))
        self._items[name] = data
        while len(self._items) > self._at_most or self._bytes > self._at_most_bytes:
            _, dropped = self._items.popitem(last=False)
            self._bytes -= len(dropped)
        return True
