"""Text that grows token by token, and stop strings in it: never a broken character, nothing missed."""

import itertools

from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from trainer_backend.inference.rendering import ChatRenderer
from trainer_backend.inference.stop_strings import (
    BROKEN,
    Decode,
    GrowingText,
    StopStrings,
    cut_before,
    earliest,
    possible_start,
)

# One id a byte: the hardest case, every character but ASCII is split.
BYTES: Decode = lambda ids: bytes(ids).decode("utf-8", "replace")  # noqa: E731


def byte_fallback() -> Tokenizer:
    """As after SentencePiece: words with their space in front, and ids for single bytes."""
    words = ["<unk>", "▁wood", "▁tree", "s", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def pieces(decode: Decode, ids: list[int]) -> list[str]:
    text = GrowingText(decode)
    return [text.take(token) for token in ids]


@given(st.text(alphabet="wod 2\n\0€é日\U0001f333\u0301", max_size=30))
def test_a_text_comes_in_whole_characters_however_it_is_split(tokenizer: PreTrainedTokenizerFast, text: str):
    renderer = ChatRenderer(tokenizer)
    by_bytes = pieces(BYTES, list(text.encode()))
    by_words = pieces(renderer.decode, renderer.encode(text))
    assert "".join(by_bytes) == "".join(by_words) == text
    assert not any(BROKEN in piece for piece in by_bytes + by_words)


@given(st.binary(max_size=30))
def test_of_any_bytes_what_is_given_out_is_a_prefix_of_the_whole_and_only_broken_ends_wait(data: bytes):
    whole, given = BYTES(list(data)), "".join(pieces(BYTES, list(data)))
    assert whole.startswith(given) and whole[len(given) :].strip(BROKEN) == ""


def test_the_same_with_byte_fallback_whose_decoder_drops_the_first_space():
    decode = byte_fallback().decode
    euro = [4 + byte for byte in "€".encode()]
    ids = [1, 2, 3, *euro, 2, *euro, *euro, 3]
    assert pieces(decode, ids) == ["wood", " tree", "s", "", "", "€", " tree", "", "", "€", "", "", "€", "s"]
    assert "".join(pieces(decode, ids)) == decode(ids)


def test_only_a_few_tokens_are_decoded_a_step():
    longest = 0

    def decode(ids: object) -> str:
        nonlocal longest
        longest = max(longest, len(list(ids)))
        return BYTES(ids)

    pieces(decode, list(("wood €" * 200).encode()))
    assert longest <= 5  # the last whole character and the parts of the next


def stops_at(strings: list[str], text: str) -> tuple[int | None, str | None]:
    """After how many bytes the rule stops, and at which string."""
    rule = StopStrings(BYTES, strings)
    found = ((i, rule.take(byte)) for i, byte in enumerate(text.encode(), start=1))
    return next(((i, string) for i, string in found if string), (None, None))


words = st.lists(st.sampled_from("ab"), min_size=1, max_size=4).map("".join)


@given(st.lists(words, min_size=1, max_size=4), st.lists(st.sampled_from("abc"), max_size=30).map("".join))
def test_a_stop_string_is_found_exactly_where_it_first_stands_in_the_text(strings: list[str], text: str):
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(string) for string in strings)]
    at, string = stops_at(strings, text)
    assert at == (ends[0] if ends else None)
    if string is not None:
        assert cut_before(text[:at], strings) == text[: min(text[:at].find(s) % 99 for s in strings)]


@given(st.lists(words, min_size=1, max_size=4), st.lists(st.sampled_from("abc"), max_size=20).map("".join))
def test_what_may_begin_a_stop_string_is_the_longest_end_of_the_text_that_one_begins_with(strings, text):
    assume(earliest(text, strings) is None)
    held = possible_start(text, strings)
    beginnings = {string[:n] for string, n in itertools.product(strings, range(1, 4)) if n < len(string)}
    fitting = [n for n in range(len(text) + 1) if n == 0 or text[-n:] in beginnings]
    assert held == max(fitting)


def test_without_strings_nothing_is_held_or_cut():
    assert (possible_start("wood", ()), cut_before("wood", ())) == (0, "wood")
