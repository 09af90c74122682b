"""The documents environment: its tools, its end, its refusals; chunks, search, notes, generated questions."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shared_schemas.documents import MAX_DOCUMENT_CHARS
from task_app.environments.documents.chunks import (
    MAX_CHUNKS,
    SNIPPET_CHARS,
    SearchIndex,
    cut_into_chunks,
    snippet,
)
from task_app.environments.documents.desk import MAX_NOTE_CHARS, MAX_NOTES, Desk
from task_app.environments.documents.environment import DocumentsConfig, DocumentsEnvironment
from task_app.environments.documents.generate import GenerateConfig, generate_task
from task_app.errors import EpisodeOver
from task_app.protocols import ToolRequest

ROW = {
    "document_content": "The sea is blue. " * 20 + "The harbour is red. " + "The sky is grey. " * 20,
    "question": "Which colour is the harbour?",
    "ground_truth": ["red", "crimson"],
}


def reading(**changes):
    environment = DocumentsEnvironment(DocumentsConfig(**{**ROW, **changes}))
    environment.reset(0)
    return environment


def call(tool, **arguments):
    return ToolRequest(tool, arguments, json.dumps(arguments))


def told(environment, tool, **arguments):
    """The text of one call."""
    (text,) = environment.step([call(tool, **arguments)]).results
    return text


def test_it_opens_with_the_question_and_never_with_the_document():
    system, task = reading().opening()
    assert (system.role, task.role) == ("system", "user")
    assert task.content == "The document has 700 characters.\n\nQuestion: Which colour is the harbour?"
    (compact,) = reading(text="compact").opening()
    assert compact.content == ROW["question"]


def test_a_chunk_is_read_by_its_id_or_in_order():
    environment = reading()
    assert told(environment, "readChunk", chunk_id=0) == "error: there is no index yet; call buildIndex first"
    assert told(environment, "buildIndex", chunk_size=100).startswith("8 chunks of up to 100 characters")
    assert told(environment, "readChunk", chunk_id=6).startswith("chunk 6 of 0 to 7:\n")
    assert told(environment, "readChunk", enable_scan=True).startswith("chunk 7 of 0 to 7:\n")
    assert told(environment, "readChunk", enable_scan=True) == "the document is read to its end"
    assert (
        told(environment, "readChunk", chunk_id=8) == "error: there is no chunk 8; chunk_id runs from 0 to 7"
    )
    assert told(environment, "readChunk") == "error: give chunk_id, or enable_scan = true"


def test_searching_finds_the_chunk_that_answers():
    environment = reading(indexed=True, chunk_size=100)
    first, *others = told(environment, "searchEngine", keyword="harbour").splitlines()
    assert "The harbour is red." in first and not others
    assert told(environment, "searchEngine", keyword="zebra") == "no chunk holds any of these words"


def test_a_right_answer_pays_1_at_finish_and_ends_the_episode():
    environment = reading()
    outcome = environment.step([call("analyzeText"), call("finish", answer="Crimson!"), call("analyzeText")])
    assert outcome.env_rewards == (0.0, 1.0) and outcome.executed_actions == ("analyzeText", "finish")
    assert outcome.terminated and environment.outcome_reward() == 1.0
    assert outcome.results[2] == "error: not carried out: the task had ended before"
    with pytest.raises(EpisodeOver):
        environment.step([call("analyzeText")])
    with pytest.raises(EpisodeOver):
        environment.answer("red")


@pytest.mark.parametrize("wrong", ["blue", "crimson or blue"])
def test_a_wrong_answer_pays_nothing_and_ends_it_too(wrong):
    outcome = reading().step([call("finish", answer=wrong)])
    assert (outcome.env_rewards, outcome.terminated) == ((0.0,), True)


def test_of_several_calls_each_is_carried_out_or_refused_by_itself():
    outcome = reading().step([call("readChunks"), call("analyzeText"), call("note", key="a")])
    assert outcome.executed_actions == ("noop", "analyzeText", "noop")
    assert outcome.invalid_reason.startswith("there is no tool 'readChunks'")
    assert outcome.results[1].startswith("700 characters, ")
    assert outcome.results[2] == "error: note needs the argument 'summary'"


def test_words_without_a_call_are_no_answer():
    environment = reading()
    outcome = environment.answer("It is red.")
    assert outcome.invalid_reason == "no tool call; call one of the tools, and finish with your answer"
    assert (outcome.executed_actions, outcome.results, outcome.terminated) == (("noop",), (), False)


def test_a_result_has_a_bound():
    text = told(reading(max_result_chars=100, chunk_size=50), "loadDocument")
    assert text.endswith("\n[cut: the first 100 of 700 characters are shown]")


def test_a_chunk_is_read_to_its_end_with_its_heading():
    # 500 characters for a result, 27 of them for the longest heading
    environment = reading(max_result_chars=500, chunk_size=473)
    assert "up to 473 characters" in told(environment, "buildIndex")
    assert "[cut" not in told(environment, "readChunk", chunk_id=0)
    refused = told(environment, "buildIndex", chunk_size=474)
    assert refused == "error: chunk_size is 474; at most 473 fit into one result"
    with pytest.raises(ValidationError, match=r"chunk_size is 474; .* 473"):
        reading(max_result_chars=500, chunk_size=474)


def test_a_note_is_read_to_its_end_with_its_heading():
    environment = reading(max_result_chars=500, chunk_size=100)
    # "key: about" and the end of its line are 11 characters
    refused = told(environment, "note", key="key", summary="about", content="a" * 490)
    assert refused == "error: the note would have 490 characters; 489 are allowed"
    told(environment, "note", key="key", summary="about", content="a" * 489)
    assert told(environment, "readNote", key="key") == "key: about\n" + "a" * 489
    restored = reading(max_result_chars=500, chunk_size=100)
    restored.restore(environment.snapshot())
    assert "489 are allowed" in told(restored, "updateNote", mode="append", key="key", new_content="b"), (
        "the bound comes back with a snapshot"
    )


def test_only_the_named_tools_are_on_offer():
    environment = reading(tools=["readChunk", "finish"])
    assert [tool.function.name for tool in environment.tools()] == ["readChunk", "finish"]
    assert told(environment, "analyzeText").startswith("error: there is no tool 'analyzeText'")


def test_a_snapshot_holds_what_was_done_and_not_the_document():
    environment = reading(indexed=True, chunk_size=100)
    told(environment, "note", key="a", summary="b", content="c")
    told(environment, "readChunk", chunk_id=2)
    state = environment.snapshot()
    assert len(state) < 200
    other = reading(chunk_size=100)
    other.restore(state)
    assert told(other, "readNote", key="a") == "a: b\nc"
    assert told(other, "readChunk", enable_scan=True).startswith("chunk 3 of ")


def test_a_snapshot_of_another_document_is_refused():
    state = reading().snapshot()
    with pytest.raises(
        ValueError, match="the snapshot's document has 700 characters, this environment's has 5"
    ):
        reading(document_content="short").restore(state)
    with pytest.raises(ValueError, match=r"snapshot\.seed: "):
        reading().restore(state.replace(b'"seed":0', b'"seed":-1'))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"question": "?"}, "document_content is missing"),
        ({**ROW, "ground_truth": []}, "ground_truth is missing"),
        ({**ROW, "question": None}, "question is missing"),
        ({**ROW, "generate": {}}, "document_content and generate are both given"),
        ({**ROW, "ground_truth": ["red", "?!"]}, "it holds no word or number"),
        ({**ROW, "tools": ["readChunk"]}, "tools leaves out finish"),
        ({**ROW, "tools": ["readChunk", "deleteContext", "finish"]}, "Input should be 'analyzeText'"),
        ({**ROW, "document_content": "a" * (MAX_DOCUMENT_CHARS + 1)}, "at most 10000000 characters"),
        ({"generate": {"chars": 20_000_000}}, "less than or equal to 10000000"),
    ],
)
def test_a_config_without_a_checkable_question_is_refused(config, reason):
    with pytest.raises(ValidationError, match=reason.replace("?", r"\?")):
        DocumentsConfig(**config)


def test_a_document_of_ten_megabytes_is_searched():
    environment = reading(document_content="The sea is blue. " * 588_000 + "The harbour is red.")
    # "blue. " ends at 4,000 - 5 characters: 235 sentences of 17 a chunk, and 588,000 / 235 = 2,502.1
    assert told(environment, "buildIndex").startswith("2503 chunks of up to 4000 characters")
    assert "The harbour is red." in told(environment, "searchEngine", keyword="harbour")
    assert told(environment, "buildIndex", chunk_size=50).startswith("error: chunk_size 50 makes more than")
    assert len(told(environment, "loadDocument")) < 20_100


@pytest.mark.parametrize(
    ("text", "overlap", "spans"),
    [
        ("one two four five", 0, ((0, 8), (8, 17))),  # 10 characters would end inside "four"
        ("a" * 25, 0, ((0, 10), (10, 20), (20, 25))),
        ("a" * 25, 4, ((0, 10), (6, 16), (12, 22), (18, 25))),
    ],
    ids=["white space", "a long word", "an overlap"],
)
def test_a_chunk_of_10_characters_ends_behind_the_last_white_space_that_fits(text, overlap, spans):
    assert cut_into_chunks(text, size=10, overlap=overlap).spans == spans


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
    with pytest.raises(ValueError, match=f"chunk_size 1 .*{MAX_CHUNKS}"):
        cut_into_chunks("a" * (MAX_CHUNKS + 1), size=1, overlap=0)
    with pytest.raises(ValueError, match=r"overlap is 6; .* 5,"):
        cut_into_chunks("abc", size=10, overlap=6)


def test_the_chunk_with_the_rarer_word_is_found_first_and_ties_go_to_the_earlier():
    index = SearchIndex(["the sea is blue", "the harbour is red", "the sea is blue", "Harbour!"])
    assert index.hits("sea", at_most=5) == [0, 2]
    # The shorter chunk says more with the same word.
    assert index.hits("HARBOUR", at_most=5) == [3, 1]
    assert index.hits("HARBOUR", at_most=1) == [3]


def test_words_that_stand_nowhere_find_nothing():
    for texts in (["..."], ["", "- -"], ["words here"]):
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


SEEDS = range(40)


def test_the_needle_stands_in_the_document_once():
    for seed in SEEDS:
        task = generate_task(GenerateConfig(kind="needle", chars=3_000), seed)
        name = re.fullmatch(r"What is the code of (.+)\?", task.question).group(1)
        assert re.findall(rf"The code of {name} is (\d+)\.", task.document) == list(task.answers)


def test_the_keeper_is_named_once_and_others_keep_other_places():
    for seed in SEEDS:
        task = generate_task(GenerateConfig(kind="keeper", chars=3_000, distractors=5), seed)
        name = re.fullmatch(r"Who is the keeper of (.+)\?", task.question).group(1)
        kept = re.findall(r"The keeper of ([\w ]+) is (\w+)\.", task.document)
        assert len(kept) == len(dict(kept)) == 6
        assert (dict(kept)[name],) == task.answers


@pytest.mark.parametrize("hops", [1, 3, 12])
def test_following_the_parcel_from_hand_to_hand_leads_to_the_locker(hops):
    for seed in SEEDS:
        task = generate_task(GenerateConfig(kind="hops", hops=hops, chars=3_000), seed)
        taker = dict(re.findall(r"(\w+) gave the parcel to (\w+)\.", task.document))
        locker = dict(re.findall(r"(\w+) has locker (\d+)\.", task.document))
        holder = task.question.split()[0]
        assert len(taker) == hops
        while holder in taker:
            holder = taker[holder]
        assert (locker[holder],) == task.answers
        assert len(set(locker.values())) == len(locker)


def test_counting_the_deliveries_gives_the_answer():
    for seed in SEEDS:
        task = generate_task(GenerateConfig(kind="count", chars=3_000), seed)
        thing, place = re.fullmatch(r"How many crates of (\w+) arrived at (.+)\?", task.question).groups()
        count = task.document.count(f"a crate of {thing} arrived at {place}.")
        assert (str(count),) == task.answers and 2 <= count <= 9


@pytest.mark.parametrize("chars", [500, 20_000, 1_000_000])
def test_a_document_is_as_long_as_was_asked_for(chars):
    task = generate_task(GenerateConfig(chars=chars, distractors=3), 5)
    # A sentence at most is too much.
    assert chars <= len(task.document) + 1 and len(task.document) <= chars + 100


def test_equal_seeds_make_equal_documents_and_other_seeds_others():
    tasks = [generate_task(GenerateConfig(), seed) for seed in (1, 1, 2)]
    assert tasks[0] == tasks[1] != tasks[2]
