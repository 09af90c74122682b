"""The envelope lets in what it sealed, and nothing else: not a bit more, less or other."""

import struct
import zlib
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from task_app.errors import SnapshotRefused
from task_app.snapshots.envelope import from_text, open_envelope, seal, to_text

MOST = 10_000
Contents = tuple[dict[str, object], bytes]
CONTENTS: Contents = ({"env": "maze"}, bytes(range(200)))


def sealed(contents: Contents = CONTENTS) -> bytes:
    return seal("environment", *contents, at_most_bytes=MOST)


def opened(data: bytes) -> Contents:
    return open_envelope("environment", data, at_most_bytes=MOST)


def forged(inside: bytes, *, version: int = 1, behind: bytes = b"") -> bytes:
    """An envelope with a valid checksum around any body; an attacker can compute one too."""
    body = zlib.compress(inside) + behind
    rest = b"TWSN" + struct.pack("<HI", version, len(body))
    return rest + sha256(rest + body).digest() + body


@given(
    head=st.dictionaries(
        st.text(max_size=5).filter(lambda name: name != "kind"), st.integers() | st.text(), max_size=5
    ),
    state=st.binary(max_size=3_000),
)
def test_what_is_sealed_is_opened(head: dict[str, object], state: bytes):
    assert opened(sealed((head, state))) == (head, state)


@given(st.integers(min_value=0, max_value=8 * len(sealed()) - 1))
def test_every_flipped_bit_is_refused(bit: int):
    data = bytearray(sealed())
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(SnapshotRefused):
        opened(bytes(data))


@given(st.integers(min_value=0, max_value=len(sealed()) - 1))
def test_every_shorter_one_is_refused(length: int):
    with pytest.raises(SnapshotRefused):
        opened(sealed()[:length])


BAD = {
    "bytes that are no snapshot": b"PK\3\4" + bytes(100),
    "has format 2; this task app reads 1": forged(b"", version=2),
    "cut short: 5": sealed()[:47],
    "followed by something else": sealed() + b"x",
    "checksum does not match": sealed()[:-1] + bytes([sealed()[-1] ^ 1]),
    # A thousand times its own size: no more than the bound of it is ever unpacked.
    "holds more than 10000 bytes": forged(bytes(10_000_000)),
    "does not end where it says": forged(struct.pack("<I", 23) + b'{"kind": "environment"}', behind=b"more"),
    "head is no JSON": forged(struct.pack("<I", 3) + b"abc"),
    "does not name its kind": forged(struct.pack("<I", 2) + b"{}"),
    "of the kind 'policy', expected 'environment'": seal("policy", *CONTENTS, at_most_bytes=MOST),
}


@pytest.mark.parametrize("told", BAD)
def test_each_kind_of_damage_is_told(told: str):
    with pytest.raises(SnapshotRefused) as caught:
        opened(BAD[told])
    assert told in caught.value.detail


def test_what_could_not_be_opened_again_is_not_sealed():
    with pytest.raises(SnapshotRefused, match="at most 10000 are taken back"):
        sealed(({}, bytes(MOST)))


def test_the_text_form_has_one_spelling():
    # 2 bytes are 16 bits in 3 letters of 6: the last two bits stand for nothing, and yet may not be changed.
    assert from_text(to_text(b"ab"), where="snapshot") == b"ab"
    assert to_text(b"ab") == "YWI="
    for other in ("YWJ=", "YWI", "YWI=\n", "Y WI=", "é", "YWI=YWI="):
        with pytest.raises(SnapshotRefused) as caught:
            from_text(other, where="snapshot")
        assert caught.value.where == "snapshot"
