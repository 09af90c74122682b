"""RUN/data.parquet: what a resume says of rows that changed since the run began."""

import pytest

from tests.conftest import tiny_job
from tests.trainer_backend.data.folders import jsonl
from trainer_backend.errors import DataError
from trainer_backend.job.rollout_table import DataTable
from trainer_backend.rundir.data_record import (
    continue_with_data,
    describe_changes,
    describe_mismatch,
    read_record,
    read_run_data,
)
from trainer_backend.rundir.layout import create_run

ROWS = [{"id": name, "question": f"{name}?", "answer": "#### 4"} for name in "abcd"]
HELD_OUT = [{"id": name, "question": f"{name}?", "answer": "#### 4"} for name in "xyz"]


@pytest.fixture
def run(tmp_path):
    return create_run(tiny_job(), tmp_path / "run")


def job_on(folder, rows, held_out=HELD_OUT, **keys):
    table = DataTable(
        path=jsonl(folder / "rows.jsonl", rows),
        evaluation_path=jsonl(folder / "held_out.jsonl", held_out),
        **keys,
    )
    return tiny_job().model_copy(update={"data": table})


@pytest.mark.parametrize(
    ("rows", "held_out", "changes"),
    [
        (ROWS, HELD_OUT, ""),
        (ROWS[::-1], HELD_OUT[::-1], ""),
        (ROWS[1:], HELD_OUT, "1 training row is gone: a (FOLDER/rows.jsonl: line 1)"),
        (
            [*ROWS, {**ROWS[0], "id": "new"}],
            HELD_OUT,
            "1 training row is new: new (FOLDER/rows.jsonl: line 5)",
        ),
        (
            [{**ROWS[0], "answer": "#### 5"}, *ROWS[1:]],
            HELD_OUT,
            "1 training row is changed under the same id: a (FOLDER/rows.jsonl: line 1)",
        ),
        (
            ROWS[2:],
            [*HELD_OUT, *ROWS[:2]],
            "2 held-out rows are on the other side of the split: a (FOLDER/held_out.jsonl: line 4), "
            "b (FOLDER/held_out.jsonl: line 5); 2 of 5 held-out rows ask what the run trained on",
        ),
        (  # under another id the same question
            ROWS,
            [*HELD_OUT, {**ROWS[0], "id": "other"}],
            "1 held-out row is new: other (FOLDER/held_out.jsonl: line 4); "
            "1 of 4 held-out rows ask what the run trained on",
        ),
    ],
)
def test_what_changed_is_told_and_refused_unless_it_is_accepted(run, tmp_path, rows, held_out, changes):
    continue_with_data(run, job_on(tmp_path, ROWS), accept_changes=False)
    job = job_on(tmp_path, rows, held_out)
    changes = changes.replace("FOLDER", str(tmp_path))
    assert describe_changes(run, job, read_run_data(run, job)) == changes
    if changes:
        with pytest.raises(DataError) as refused:
            continue_with_data(run, job, accept_changes=False)
        assert f"since the run began, {changes}. Restore the data" in str(refused.value)
    data = continue_with_data(run, job, accept_changes=True)
    assert (changes in data.notes[-1]) is bool(changes) or not changes
    # Accepted rows are those of the run from then on.
    continue_with_data(run, job, accept_changes=False)


def test_the_order_of_rows_counts_where_training_follows_it(run, tmp_path):
    continue_with_data(run, job_on(tmp_path, ROWS, shuffle=False), accept_changes=False)
    with pytest.raises(DataError, match=r"the order of the rows changed, and data\.shuffle is false"):
        continue_with_data(run, job_on(tmp_path, ROWS[::-1], shuffle=False), accept_changes=False)


def test_rows_of_two_runs_are_compared_by_id_where_their_content_is_equal(tmp_path):
    def record(name, rows, held_out):
        run = create_run(tiny_job(), tmp_path / name)
        continue_with_data(run, job_on(tmp_path, rows, held_out), accept_changes=False)
        return read_record(run)

    first = record("first", ROWS, HELD_OUT)
    assert describe_mismatch(first, record("less", ROWS, HELD_OUT[1:])) == []
    other = record("other", HELD_OUT[:2], [{**HELD_OUT[2], "answer": "#### 5"}])
    assert (
        describe_mismatch(first, other)
        == describe_mismatch(other, first)
        == [
            "1 held-out rows of the same id have different content",
            "one run trained on what 2 held-out rows of the other ask",
        ]
    )


def test_a_run_from_before_records_were_kept_goes_on_with_positions_as_ids(run, tmp_path):
    nameless = [{"question": row["question"], "answer": row["answer"]} for row in ROWS]
    job = job_on(tmp_path, nameless)
    (run.rollouts / "iteration_1.parquet").touch()  # it has played, and there is no record
    for accept_changes in (True, False, False):
        data = continue_with_data(run, job, accept_changes=accept_changes)
        assert [row.id for row in data.training] == [f"train/{n}" for n in range(4)]
    with pytest.raises(DataError, match="changed under the same id: train/0"):
        continue_with_data(run, job_on(tmp_path, nameless[1:]), accept_changes=False)
