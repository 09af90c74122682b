"""One table of jobs and what they are told, refusals.txt; each rule between keys is broken in it.

A block is a job in TOML, without a [model] if it doesn't matter, and the lines that it is told, without lists
of all names: `!` refuses, `~` warns. After a change of a rule, write them again and read what has changed:

    python -m tests.trainer_backend.job.test_refusals > /tmp/refusals.txt && mv /tmp/refusals.txt \
        tests/trainer_backend/job/refusals.txt
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli
from pydantic import ValidationError

from trainer_backend.errors import JobError
from trainer_backend.job.load import parse_job
from trainer_backend.job.rule import field_at
from trainer_backend.job.rules import _wrong_answers, all_rules
from trainer_backend.job.schema import JobConfig
from trainer_backend.job.task_app_rules import TASK_APP_RULES

TABLE = Path(__file__).with_name("refusals.txt")
BLOCKS = TABLE.read_text(encoding="utf-8").strip().split("\n\n")


def job_in(block: str) -> dict[str, Any]:
    lines = [line for line in block.splitlines() if not line.startswith(("!", "~"))]
    return {"model": {"preset": "tiny-0.3m"}, **tomli.loads("\n".join(lines))}


def told(block: str) -> Iterator[str]:
    try:
        yield from (f"~ {warning}" for warning in parse_job(job_in(block), where="job.toml").warnings)
    except JobError as error:
        for line in str(error).splitlines():
            yield "! " + re.sub(r"(\? Known:) .*", r"\1 ...", line.removeprefix("job.toml: "))


def test_a_job_is_told_what_the_table_says():
    wrong = {}
    for block in BLOCKS:
        lines = [line for line in block.splitlines() if line.startswith(("!", "~"))]
        if lines != (ours := [*told(block)]):
            wrong[block] = ours
    assert wrong == {}


def test_every_rule_names_keys_that_exist_and_is_broken_by_a_job_of_the_table():
    for rule in (*all_rules(), *TASK_APP_RULES):
        assert all(field_at(key) for key in rule.keys)
    kept = [*all_rules()]
    for block in BLOCKS:
        try:
            config = JobConfig.model_validate(job_in(block))
            kept = [rule for rule in kept if not any(rule.findings(config))]
        except (ValidationError, JobError):  # of a field alone, or an unknown name
            continue
    # A schedule of a plug-in alone can break the other one: tests/trainer_backend/test_own_schedules.py.
    assert [rule.sentence for rule in kept] == [_wrong_answers]


if __name__ == "__main__":
    for block in BLOCKS:
        lines = [line for line in block.splitlines() if not line.startswith(("!", "~"))]
        print(*lines, *told(block), "", sep="\n")
