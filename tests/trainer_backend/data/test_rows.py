"""One row: the layouts of public data sets, and what is refused with the row and column named."""

import math
from datetime import date

import pytest

from trainer_backend.data.rows import parse_row
from trainer_backend.errors import DataError


def parsed(**columns):
    return parse_row(columns, where="a.jsonl: line 3", default_id="train/2")


def row(**columns):
    return parsed(**columns).row


def refused(**columns) -> str:
    with pytest.raises(DataError) as found:
        row(**columns)
    assert str(found.value).startswith("a.jsonl: line 3: ")
    return str(found.value)


def test_a_row_of_gsm8k_as_the_hub_has_it():
    found = parsed(
        question="Ada has 1,000 shells and finds 2.", answer="1000+2 = <<1000+2=1002>>1002\n#### 1,002"
    )
    assert found.row.prompt == "Ada has 1,000 shells and finds 2."
    assert found.row.ground_truth == "1002"
    assert found.row.id == "train/2"
    assert found.used == {"prompt": "question", "ground_truth": "answer after ####"}


def test_a_result_that_is_no_number_keeps_its_commas():
    assert row(question="Who?", answer="#### Ada, then Ben").ground_truth == "Ada, then Ben"
    assert row(question="Which two?", answer="#### 1,2").ground_truth == "1,2"
    assert row(question="How many?", answer="#### $1,234,567").ground_truth == "$1234567"
    assert row(question="?", answer="it falls\n#### -1,204.50").ground_truth == "-1204.50"
    # every form with groups, as far as it is one number
    assert row(question="?", answer="#### 12,34,567").ground_truth == "1234567"
    assert row(question="?", answer="#### €1'000 000").ground_truth == "€1'000 000"
    assert row(question="?", answer="#### 1 000%").ground_truth == "1000%"
    assert row(question="?", answer="#### _2 1/2_").ground_truth == "_2 1/2_"
    assert row(question="Who?", answer="Ada").ground_truth == "Ada"


def test_a_row_of_source_5_asks_the_query_of_its_interaction():
    # "Data Requirements": {"query": "What is 2+2?", "ground_truth": "4"}
    kwargs = {"query": "What is 2+2?", "ground_truth": "4"}
    for columns in (kwargs, {"interaction_kwargs": kwargs}, {"extra_info": {"interaction_kwargs": kwargs}}):
        found = row(**columns)
        assert (found.prompt, found.ground_truth) == ("What is 2+2?", "4")
    assert (found.interaction.name, found.interaction.kwargs) == (None, kwargs)
    found = parsed(raw_prompt="2+2?", interaction_kwargs=kwargs)
    assert found.used["ground_truth"] == "interaction_kwargs.ground_truth"
    assert row(question="Two and two?", interaction_kwargs=kwargs).prompt == "Two and two?"


def test_a_row_in_the_layout_of_verl():
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+2?"}]
    found = parsed(
        data_source="openai/gsm8k",
        prompt=prompt,
        ability="math",
        reward_model={"style": "rule", "ground_truth": "4"},
        extra_info={
            "split": "train",
            "index": 0,
            "interaction_kwargs": {"name": "gsm8k", "query": "What is 2+2?", "ground_truth": "4"},
        },
    )
    assert found.row.prompt == tuple(prompt)
    assert found.row.question == "What is 2+2?"
    assert found.row.ground_truth == "4"
    assert found.row.interaction.name == "gsm8k"
    assert found.row.interaction.kwargs == {"query": "What is 2+2?", "ground_truth": "4"}
    assert found.used == {
        "interaction": "extra_info.interaction_kwargs",
        "prompt": "prompt",
        "ground_truth": "reward_model.ground_truth",
    }


def test_a_row_in_the_layout_of_skyrl():
    found = parsed(
        data_source="openai/gsm8k",
        prompt=[{"role": "user", "content": "What is 2+2?"}],
        env_class="gsm8k",
        reward_spec={"method": "rule", "ground_truth": "4"},
        extra_info={"split": "train", "index": 0, "answer": "2+2=4\n#### 4", "question": "What is 2+2?"},
    )
    assert (found.row.question, found.row.ground_truth) == ("What is 2+2?", "4")
    assert found.used == {"prompt": "prompt", "ground_truth": "reward_spec.ground_truth"}


def test_a_document_goes_with_a_question_and_the_answers_that_count():
    found = row(id=7, question="Who?", document_content="Ada did.", ground_truth=["Ada", "Ada Byron"])
    assert (found.id, found.document, found.ground_truth) == ("7", "Ada did.", ["Ada", "Ada Byron"])


def test_with_a_document_a_message_of_the_user_is_the_question_and_numbers_become_texts():
    prompt = [{"role": "user", "content": "How many?"}]
    found = row(raw_prompt=prompt, document_content="42 are here.", ground_truth=42)
    assert (found.prompt, found.ground_truth) == ("How many?", "42")
    assert row(question="?", document_content="d", ground_truth=[3.5, "seven"]).ground_truth == [
        "3.5",
        "seven",
    ]


def test_what_is_null_is_absent_as_parquet_cannot_tell_the_two_apart():
    kwargs = {"name": None, "query": "2+2?", "hint": None}
    found = row(prompt=None, question="2+2?", interaction_kwargs=kwargs, ground_truth=[None, "4"])
    assert found.interaction.kwargs == {"query": "2+2?"}
    assert found.ground_truth == [None, "4"]


@pytest.mark.parametrize("truth", [0, 42, 1.5, True, "x", ["a"], {"a": [1]}, None])
def test_a_ground_truth_is_any_json(truth):
    assert row(prompt="?", ground_truth=truth).ground_truth == truth


def test_two_columns_that_name_the_same_must_agree():
    assert row(prompt="2+2?", raw_prompt="2+2?").prompt == "2+2?"
    assert "prompt and raw_prompt are both there and differ" in refused(prompt="2+2?", raw_prompt="3+3?")
    told = refused(prompt="?", ground_truth="4", reward_model={"ground_truth": 4})
    assert "ground_truth and reward_model.ground_truth are both there and differ" in told


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"text": "2+2?"}, "no prompt; it is in prompt, raw_prompt, question or query, and found were: text"),
        ({}, "found were: none"),
        ({"prompt": ""}, "prompt is '' (str); it is a text or a list of messages, and not empty"),
        ({"prompt": []}, "prompt is [] (list)"),
        ({"question": 4}, "question is 4 (int)"),
        ({"prompt": ["2+2?"]}, "prompt[0] is '2+2?' (str); a message has role and content"),
        ({"prompt": [{"role": "user"}]}, "prompt[0].content is None"),
        ({"prompt": [{"role": "user", "content": " "}]}, "prompt[0].content is ' '"),
        ({"prompt": [{"role": "human", "content": "?"}]}, "known: system, user, assistant"),
        ({"prompt": [{"role": "user", "content": "?", "name": "a"}]}, "prompt[0] has 'name'"),
        ({"prompt": [{"role": "assistant", "content": "4"}]}, "the last is the user's"),
        ({"prompt": "?", "id": ""}, "id is ''"),
        ({"prompt": "?", "id": True}, "id is True (bool); it is a string or a whole number"),
        ({"prompt": "?", "id": 1.0}, "id is 1.0 (float)"),
        ({"prompt": "?", "id": "a\nb"}, "printable"),
        ({"prompt": "?", "id": "a" * 101}, "1 to 100"),
        ({"prompt": "?", "ground_truth": math.nan}, "ground_truth is nan (float)"),
        ({"prompt": "?", "ground_truth": date(2020, 1, 1)}, "ground_truth is datetime.date(2020, 1, 1)"),
        ({"prompt": "?", "ground_truth": "x" * 100_001}, "at most 100000"),
        ({"question": "?", "answer": "2+2\n####"}, "the result stands after it"),
        ({"prompt": "?", "interaction_kwargs": "gsm8k"}, "it is a table of keyword arguments"),
        ({"prompt": "?", "interaction_kwargs": {"name": 7}}, "interaction_kwargs.name is 7 (int); it is"),
        ({"prompt": "?", "interaction_kwargs": {"score": math.nan}}, "interaction_kwargs: kwargs"),
        ({"prompt": "?", "interaction_kwargs": {"messages": []}}, "'messages' is an argument"),
        ({"question": "?", "document_content": 7}, "document_content is 7 (int)"),
        ({"question": "?", "document_content": ""}, "document_content is ''"),
        (
            {"question": "?", "document_content": "d" * 10_000_001, "ground_truth": "a"},
            "document_content has 10,000,001 characters; at most 10,000,000 are taken",
        ),
        ({"question": "?" * 20_001, "document_content": "d", "ground_truth": "a"}, "question has 20,001 ch"),
        ({"question": "?", "document_content": "d", "ground_truth": ["a", "b" * 2_001]}, "2,001 characters"),
        (
            {
                "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}],
                "document_content": "d",
                "ground_truth": "a",
            },
            "prompt begins with a message of 'system'; with document_content it is one question",
        ),
    ],
)  # fmt: skip
def test_a_bad_row_is_told_with_its_place_its_column_and_what_is_allowed(columns, told):
    assert told in refused(**columns)
