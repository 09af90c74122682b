"""Chunks, search, notes and answers of the documents environment."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from task_app.environments.documents.chunks import (
    MAX_CHUNKS,
    SNIPPET_CHARS,
    SearchIndex,
    cut_into_chunks,
    snippet,
)
from task_app.environments.documents.desk import MAX_NOTE_CHARS, MAX_NOTES, Desk


def test_a_chunk_ends_behind_the_last_white_space_that_fits():
    # 10 characters would end inside "four"
    text = "one two four five"
    assert [text[a:b] for a, b in cut_into_chunks(text, size=10, overlap=0).spans] == [
        "one two ",
        "four five",
    ]


def test_a_word_longer_than_a_chunk_is_cut():
    assert cut_into_chunks("a" * 25, size=10, overlap=0).spans == ((0, 10), (10, 20), (20, 25))


def test_an_overlap_repeats_the_end_of_the_chunk_before():
    assert cut_into_chunks("a" * 25, size=10, overlap=4).spans == ((0, 10), (6, 16), (12, 22), (18, 25))


@given(st.text("ab \n", max_size=300), st.integers(2, 40), st.integers(0, 20))
def test_chunks_cover_the_document_in_order_and_none_is_too_long(text, size, overlap):
    overlap = min(overlap, size // 2)
    spans = cut_into_chunks(text, size=size, overlap=overlap).spans
    assert all(0 < end - start <= size for start, end in spans)
    covered = 0
    for start, end in spans:
        # Each begins inside or right behind what is covered, and adds something.
        assert covered - overlap <= start <= covered < end
        covered = end
    assert covered == len(text)


def test_chunks_that_would_be_too_many_or_the_same_again_are_refused():
    with pytest.raises(ValueError, match=f"chunk_size 1 makes more than {MAX_CHUNKS} chunks"):
        cut_into_chunks("a" * (MAX_CHUNKS + 1), size=1, overlap=0)
    with pytest.raises(ValueError, match="overlap is 6; at most half of chunk_size, 5, is allowed"):
        cut_into_chunks("abc", size=10, overlap=6)


def test_the_chunk_with_the_rarer_word_is_found_first_and_ties_go_to_the_earlier():
    index = SearchIndex(["the sea is blue", "the harbour is red", "the sea is blue", "Harbour!"])
    assert index.hits("sea", at_most=5) == [0, 2]
    # The shorter chunk says more with the same word.
    assert index.hits("HARBOUR", at_most=5) == [3, 1]
    assert index.hits("HARBOUR", at_most=1) == [3]


@pytest.mark.parametrize("texts", [["..."], ["", "- -"], ["words here"]])
def test_words_that_stand_nowhere_find_nothing(texts):
    assert SearchIndex(texts).hits("absent", at_most=5) == []


def test_a_snippet_shows_where_most_words_of_the_query_stand_together():
    text = "red " + "x " * SNIPPET_CHARS + "the harbour is red " + "y " * SNIPPET_CHARS
    assert "the harbour is red" in snippet(text, "harbour red")
    assert snippet("red sea", "red") == "red sea"


def test_notes_are_written_once_changed_read_and_deleted():
    desk = Desk("", 50)
    assert desk.readNote() == "there are no notes yet"
    assert desk.note("colour", "of the harbour", "red") == "noted. notes:\n- colour: of the harbour"
    assert desk.note("colour", "", "blue").startswith("error: there is a note 'colour' already")
    desk.updateNote("append", "colour", "or pink")
    assert desk.readNote("colour") == "colour: of the harbour\nred\nor pink"
    desk.updateNote("overwrite", "colour", "blue", "of the sea")
    assert desk.readNote("colour") == "colour: of the sea\nblue"
    assert desk.readNote("color") == "error: there is no note 'color'; known: colour. Did you mean 'colour'?"
    assert desk.updateNote("delete", "colour") == "deleted. there are no notes yet"
    assert desk.updateNote("delete", "colour") == "error: there is no note 'colour'"


def test_notes_have_bounds_that_say_so():
    desk = Desk("", 50, max_result_chars=2 * MAX_NOTE_CHARS)
    desk.note("long", "", "a" * MAX_NOTE_CHARS)
    assert desk.updateNote("append", "long", "b") == (
        f"error: the note would have {MAX_NOTE_CHARS + 2} characters; {MAX_NOTE_CHARS} are allowed"
    )
    for number in range(MAX_NOTES - 1):
        desk.note(f"note {number}", "", "")
    assert desk.note("one more", "", "").startswith(f"error: there are {MAX_NOTES} notes")


def test_the_search_does_not_start_jax_which_would_take_the_memory_of_a_gpu(tmp_path: Path):
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("print('started')\n")
    (tmp_path / "jax" / "lax.py").write_text("")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import task_app.environments.documents.chunks;"
        "print('imported'); import jax.lax"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["imported", "started"]  # by who wants it, it is found as before
