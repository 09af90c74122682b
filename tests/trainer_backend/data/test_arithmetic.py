"""The sums of this repository: the layout of GSM8K, answers that are right, and the committed file."""

import json
import re
from pathlib import Path

import pytest

from trainer_backend import job_parts
from trainer_backend.data.arithmetic import sums
from trainer_backend.data.dataset import read_split
from trainer_backend.data.rows import parse_row
from trainer_backend.job.load import load_job

DATA = Path(__file__).parents[3] / "configs" / "data"


def worked(question: str) -> int:
    """The result, from the words of the question alone."""
    have = int(re.search(r"has (\d+) ", question)[1])
    for sentence in question.split(". ")[1:]:
        if found := re.search(r"finds (\d+) more", sentence):
            have += int(found[1])
        elif found := re.search(r"gives away (\d+)", sentence):
            have -= int(found[1])
        elif "doubles" in sentence or "triples" in sentence:
            have *= 2 if "doubles" in sentence else 3
    return have


def test_every_sum_is_right_asked_once_and_says_its_steps():
    rows = list(sums(500, steps=3, seed=1))
    assert len({row["question"] for row in rows}) == 500
    for row in rows:
        *steps, result = row["answer"].split("\n")
        assert parse_row(row, where="here", default_id="0").row.ground_truth == str(worked(row["question"]))
        assert result == f"#### {worked(row['question'])}"
        assert 1 <= len(steps) <= 3
        for step in steps:
            left, right = step.split(" = ")
            assert eval(left) == int(right) >= 0


def test_the_first_rows_do_not_depend_on_how_many_follow():
    assert list(sums(20, steps=2, seed=0)) == list(sums(50, steps=2, seed=0))[:20]
    assert list(sums(20, steps=2, seed=0)) != list(sums(20, steps=2, seed=1))


def test_more_sums_than_there_are_is_an_error():
    with pytest.raises(ValueError, match="different questions were found, and 2000 are asked for"):
        list(sums(2000, steps=1, seed=0, largest=2))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("arithmetic.jsonl", {"steps": 2, "seed": 0}),
        ("short_sums.jsonl", {"steps": 1, "seed": 1, "largest": 9}),
    ],
)
def test_the_committed_sums_are_those_of_the_generator(name, settings):
    rows = [json.loads(line) for line in (DATA / name).read_text().splitlines()]
    assert rows == list(sums(len(rows), **settings))


def test_the_committed_documents_hold_their_answers():
    for split in ("train", "test"):
        for row in read_split(DATA / "documents", split).rows:
            assert row.document and row.question.endswith("?")
            answers = [row.ground_truth] if isinstance(row.ground_truth, str) else row.ground_truth
            assert any(answer in row.document for answer in answers), row.id
    documents = [
        {row.document for row in read_split(DATA / "documents", split).rows} for split in ("train", "test")
    ]
    assert not documents[0] & documents[1]


@pytest.mark.parametrize("name", ["arithmetic.jsonl", "documents"])
def test_a_job_next_to_them_names_them_by_a_relative_path(name, tmp_path):
    job = tmp_path / "job.toml"
    held_out = "held_out_share = 0.25" if name.endswith("jsonl") else 'evaluation_split = "test"'
    (tmp_path / "data").symlink_to(DATA)
    job.write_text(f'[model]\npreset = "tiny-0.3m"\n[data]\npath = "data/{name}"\n{held_out}\n')
    data = job_parts.data(load_job(job).config)
    assert len(data.training) >= 10 and len(data.evaluation) >= 5
    assert not any("warning" in line for line in data.notes)
