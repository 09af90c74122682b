"""Which first prompts the trainer knows, and what it says of those that do not fit the model."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from pydantic import SecretStr

from trainer_backend import job_parts
from trainer_backend.collect.first_prompts import FirstPrompts
from trainer_backend.collect.plan import Inference, Planner
from trainer_backend.core.prompt_lengths import LongPrompt
from trainer_backend.data.dataset import DataSet
from trainer_backend.data.rows import Row
from trainer_backend.errors import DataError
from trainer_backend.job.load import parse_job


def planner(training: Sequence[Row], held_out: Sequence[Row], **tables: Mapping[str, Any]) -> Planner:
    document = {
        "model": {"preset": "tiny-0.3m"},
        "inference": {"max_model_len": 40},
        "multi_turn": {"enable": True},
        "data": {"path": "a.jsonl", "held_out_share": 0.5, "interaction": "gsm8k"},
        "rollout": {"env_name": "dialogue", "max_tokens": 10},
        **tables,
    }
    inference = Inference("http://127.0.0.1:1", "job/actor", SecretStr("key"), 40)
    job = parse_job(document, where="test").config
    return job_parts.planner(job, "run", inference, DataSet(tuple(training), tuple(held_out)))


def rows(*lengths: int) -> list[Row]:
    return [Row(f"row-{place}", "x" * length) for place, length in enumerate(lengths)]


def find_long(conversations: Sequence[Sequence[Mapping[str, Any]]], most: int) -> list[LongPrompt]:
    """A token for each character, and no template."""
    counts = [sum(len(message["content"]) for message in messages) for messages in conversations]
    return [LongPrompt(place, count, count > 1000) for place, count in enumerate(counts) if count > most]


def report(*arguments: Any, **tables: Any) -> list[str]:
    prompts = FirstPrompts.of(planner(*arguments, **tables))
    assert prompts is not None
    return prompts.report(find_long)


def test_long_rows_are_told_by_id_tokens_and_limit_ten_of_them_at_most():
    assert report(rows(1, 30), rows(30)) == []
    few, many = report(rows(30, 31, 2000), rows(1, *range(31, 43)))
    assert few == (
        "data.path: 2 of 3 training rows do not fit the model: row-1 (31 tokens), row-2 (at least 2,000 "
        "tokens); 30 tokens fit: inference.max_model_len 40 less rollout.max_tokens 10; their rollouts will "
        "be lost (context_length_exceeded)"
    )
    assert "12 of 13 held-out rows" in many and "row-10 (40 tokens) and 2 more; 30 tokens fit" in many


def test_the_lowest_limits_count_and_the_system_message_stands_before_a_text():
    tables = {
        "multi_turn": {"enable": True, "max_model_length": 38, "max_episode_tokens": 6},
        "rollout": {"env_name": "dialogue", "max_tokens": 10, "env_config": {"system": "Add."}},
    }
    messages = ({"role": "assistant", "content": "x" * 16}, {"role": "user", "content": "x" * 16})
    (line,) = report([*rows(28, 29), Row("list", messages)], rows(1), **tables)
    assert "1 of 3 training rows do not fit the model: row-1 (33 tokens); 32 tokens fit: " in line
    assert "multi_turn.max_model_length 38 less multi_turn.max_episode_tokens 6" in line
    (line,) = report(rows(1, 31), rows(1), multi_turn={"enable": True, "max_model_length": 40})
    assert "multi_turn.max_model_length and inference.max_model_len 40 less rollout.max_tokens 10" in line


@pytest.mark.parametrize(
    ("lengths", "where"), [(((31,), (1,)), "data.path"), (((1,), (31, 32)), "data.evaluation_path")]
)
def test_a_job_none_of_whose_rows_fits_is_refused(lengths: tuple[tuple[int, ...], ...], where: str):
    data = {"path": "a.jsonl", "evaluation_path": "b.jsonl", "interaction": "gsm8k"}
    with pytest.raises(DataError, match=rf"^{where}: (1 of 1|2 of 2) .*: row-0 \(31 tokens\)"):
        report(*(rows(*part) for part in lengths), data=data)


@pytest.mark.parametrize(
    "tables",
    [
        {"rollout": {"env_name": "documents"}},  # the task app makes its opening
        {"rollout": {"env_name": "dialogue", "policy_name": "mine"}},  # it may ask for something else
        {"multi_turn": {"enable": True, "statelm_enabled": True}},  # the prompt has tools
    ],
)
def test_prompts_that_the_trainer_does_not_know_exactly_are_not_measured(tables: dict[str, Any]):
    assert FirstPrompts.of(planner(rows(1), rows(1), **tables)) is None


def test_rows_are_measured_in_batches_between_which_a_stop_is_heeded():
    prompts = FirstPrompts.of(planner([Row(f"{n}", "x") for n in range(2500)], rows(1)))
    assert prompts is not None
    told: list[tuple[int, int]] = []
    prompts.report(find_long, lambda *stage: told.append(stage))
    assert told == [(0, 2501), (1000, 2501), (2000, 2501), (2500, 2501)]
