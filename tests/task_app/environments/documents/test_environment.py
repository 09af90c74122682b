"""The documents environment: what its tools answer, when it ends, what it refuses."""

import json

import pytest
from pydantic import ValidationError

from shared_schemas.documents import MAX_DOCUMENT_CHARS
from task_app.environments.documents.environment import DocumentsConfig, DocumentsEnvironment
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
    with pytest.raises(ValidationError, match="chunk_size is 474; with its heading at most 473 fit into"):
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
        (
            {"question": "?"},
            "document_content is missing; give document_content, question and ground_truth, or",
        ),
        ({**ROW, "ground_truth": []}, "ground_truth is missing"),
        ({**ROW, "question": None}, "question is missing"),
        ({**ROW, "generate": {}}, "document_content and generate are both given"),
        (
            {**ROW, "ground_truth": ["red", "?!"]},
            "it holds no word or number, so no answer could ever match it",
        ),
        ({**ROW, "tools": ["readChunk"]}, "tools leaves out finish"),
        ({**ROW, "tools": ["readChunk", "deleteContext", "finish"]}, "Input should be 'analyzeText'"),
        ({**ROW, "document_content": "a" * (MAX_DOCUMENT_CHARS + 1)}, "at most 10000000 characters"),
        ({"generate": {"chars": 20_000_000}}, "less than or equal to 10000000"),
    ],
)
def test_a_config_without_a_checkable_question_is_refused(config, reason):
    with pytest.raises(ValidationError, match=reason.replace("?", r"\?")):
        DocumentsConfig(**config)


def test_without_a_row_the_document_is_made_from_the_seed():
    one, other = (DocumentsEnvironment(DocumentsConfig()) for _ in range(2))
    assert one.reset(1).text != other.reset(2).text
    assert one.reset(2) == other.reset(2)


def test_a_document_of_ten_megabytes_is_searched():
    environment = reading(document_content="The sea is blue. " * 588_000 + "The harbour is red.")
    # "blue. " ends at 4,000 - 5 characters: 235 sentences of 17 a chunk, and 588,000 / 235 = 2,502.1
    assert told(environment, "buildIndex").startswith("2503 chunks of up to 4000 characters")
    assert "The harbour is red." in told(environment, "searchEngine", keyword="harbour")
    assert told(environment, "buildIndex", chunk_size=50).startswith("error: chunk_size 50 makes more than")
    assert len(told(environment, "loadDocument")) < 20_100
