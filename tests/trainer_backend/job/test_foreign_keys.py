"""Names of other systems lead to ours; refusals.txt has jobs with some of them."""

import re
from pathlib import Path

import pytest

from trainer_backend.errors import JobError
from trainer_backend.job.docs import table_model
from trainer_backend.job.foreign_keys import FOREIGN_TABLES, NEW_NAMES, SYSTEMS, find_our_key
from trainer_backend.job.load import load_job
from trainer_backend.job.schema import JobConfig

OURS = {table: set(table_model(field).model_fields) for table, field in JobConfig.model_fields.items()}
TARGETS = [
    *((f"{system}: {name}", ours) for system, names in SYSTEMS.items() for name, ours in names.items()),
    *((f"[{table}]", place) for table, place in FOREIGN_TABLES.items() if place),
]


def test_every_name_leads_to_a_key_that_a_job_has():
    for name, target in TARGETS:
        places = re.findall(r"\[([a-z_.]+)\]|\b([a-z_]+\.[a-z_.]+)|^([a-z]+)$", target)
        assert places, (name, target)
        for place in map("".join, places):
            table, _, key = place.partition(".")
            assert table in OURS and (not key or key.partition(".")[0] in OURS[table]), (name, place)


def test_a_name_has_one_meaning_and_is_found_in_the_tables_of_its_system():
    names = [name for names in SYSTEMS.values() for name in names]
    assert len(names) == len(set(names))
    own = {f"{table}.{key}" for table, keys in OURS.items() for key in keys}
    # A launcher's config of a policy or environment is free, and read by the task app.
    assert not own & set(names) - set(NEW_NAMES)
    assert find_our_key("actor_rollout_ref.rollout.n") == find_our_key("rollout.n") == "training.group_size"
    assert find_our_key("rollout.nn") is None


@pytest.mark.parametrize("override", ["algorithm.adv_estimator=grpo", "warmup={}", "model.path=/a/b"])
def test_an_override_in_the_place_of_a_file_is_refused_with_the_option(override: str):
    with pytest.raises(JobError, match=re.escape(f"no such file. Did you mean --set '{override}'?")):
        load_job(Path(override))
