"""shared_schemas.json_text: what enters as JSON can be written out again, by anybody, anywhere."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared_schemas.json_text import MAX_DEPTH, MAX_MEMBERS, encodable_json, read_json

FINITE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("ab\\u0e3"), inner),
)  # fmt: skip


@given(FINITE)
def test_what_can_be_written_out_again_is_read_as_it_stands(value):
    assert read_json(json.dumps(value)) == value
    assert read_json(json.dumps(value, ensure_ascii=False).encode()) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (rb'{"tag": "\ud83d"}', "half a character"),
        (rb'{"\udc00": 1}', "half a character"),
        (b'"\xed\xa0\xbd"', "column 2 is no UTF-8"),
        ('{"tag": "\ud83d"}', "no JSON: half a character .* at line 1 column 1"),
        (rb'{"a": [1, "x\u0000"]}', "a.1 holds U+0000"),
        (rb'{"a": {"\u0000": 1}}', "a holds a key with U+0000"),
        (b"[NaN]", "no JSON"),
        (b"[-Infinity]", "no JSON"),
        (b'{"a": [1e999]}', "a.0 holds a number beyond 1.8e308"),
        (b"-1E+400", "the value holds a number beyond"),
        (b"1" + b"0" * 250 + b"e99", "the value holds a number beyond"),
        (b"1" + b"0" * 400, "the value holds a number beyond"),
        (b"1" + b"0" * 5_000, "out of range"),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), f"more than {MAX_DEPTH} levels"),
        (json.dumps([dict.fromkeys(map(str, range(MAX_MEMBERS + 1)))]), "0 holds 10001 keys; at most 10000"),
        (b'\xef\xbb\xbf[{"a": 1, "a": 1}]', "the key 'a' comes twice"),
        ('{"a": 1}'.encode("utf-16"), "is UTF-16"),
        (b"", "no JSON"),
    ],
)
def test_what_could_not_be_stored_is_refused_with_its_place(text, words):
    with pytest.raises(ValueError, match=words.replace("+", r"\+")):
        read_json(text)


def test_text_that_only_looks_suspect_is_read():
    assert read_json(rb'["\\u0000", "e+999", "\ud83d\ude00", 1e-999]') == [r"\u0000", "e+999", "😀", 0.0]


@given(FINITE)
def test_encodable_data_is_an_equal_copy(value):
    assert encodable_json({"value": value}) == {"value": value}


@pytest.mark.parametrize(("text", "encodable"), [("\u00e4", "\u00e4"), ("a\ud800b", "a?b")])
def test_encodable_data_shares_no_list_with_its_source_whether_a_text_is_changed_or_not(text, encodable):
    inner = [1, 2.5, None]
    copy = encodable_json({text: (True, inner)})
    assert copy == {encodable: [True, [1, 2.5, None]]}
    inner.append(0)
    assert copy[encodable][1] == [1, 2.5, None]
