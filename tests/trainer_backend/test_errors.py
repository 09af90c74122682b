"""How an error reads: a sentence, then what to do about it."""

import pytest

from trainer_backend.errors import JobError


@pytest.mark.parametrize(
    ("detail", "told"),
    [
        ("x is 3", "job.toml: x is 3. Take 2."),
        ("x is 3.", "job.toml: x is 3. Take 2."),
        ("x is 3; did you mean 2?", "job.toml: x is 3; did you mean 2? Take 2."),
    ],
)
def test_a_sentence_ends_before_its_hint_begins(detail: str, told: str):
    assert str(JobError(detail, where="job.toml", hint="Take 2.")) == told


def test_without_a_hint_it_stands_as_it_is():
    assert str(JobError("x is 3")) == "x is 3"
