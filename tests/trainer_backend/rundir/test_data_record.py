"""RUN/data.parquet: what a resume says of rows that changed since the run began."""

import pytest

from tests.conftest import tiny_job
from tests.trainer_backend.data.folders import jsonl
from trainer_backend.errors import DataError
from trainer_backend.job.rollout_table import DataTable
from trainer_backend.job_parts import data_of_run
from trainer_backend.rundir.data_record import (
    accept_rows,
    describe_mismatch,
    find_differences,
    find_other_rows,
    read_record,
    record_rows,
)
from trainer_backend.rundir.layout import create_run

ROWS = [{"id": name, "question": f"{name}?", "answer": "#### 4"} for name in "abcd"]
HELD_OUT = [{"id": name, "question": f"{name}?", "answer": "#### 4"} for name in "xyz"]


def job_on(folder, rows, held_out=HELD_OUT, **keys):
    table = DataTable(
        path=jsonl(folder / "rows.jsonl", rows),
        evaluation_path=jsonl(folder / "held_out.jsonl", held_out),
        **keys,
    )
    return tiny_job().model_copy(update={"data": table})


def start(run, job, *, accept_changes=False, plays=True):
    """Start or continue a run; its record is written where it plays."""
    data, record = data_of_run(job, run)
    data = accept_rows(record, job.data, data, accept_changes=accept_changes)
    if plays:
        record_rows(run, record, data, 1)
        (run.rollouts / "iteration_1.parquet").touch()
    return data


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
    start(run, job_on(tmp_path, ROWS))
    job = job_on(tmp_path, rows, held_out)
    changes = changes.replace("FOLDER", str(tmp_path))
    if changes:
        data, record = data_of_run(job, run)
        for refuses in (lambda: start(run, job), lambda: accept_rows(record, job.data, data)):
            with pytest.raises(DataError) as refused:
                refuses()
            assert f"since the run began, {changes}. Restore the data" in str(refused.value)
        assert changes in start(run, job, accept_changes=True).notes[-1]
    start(run, job)  # accepted rows are those of the run from then on
    data, record = data_of_run(job, run)
    assert find_differences(record, job.data, data)[0] == ""


def test_an_accepted_row_that_was_trained_on_is_never_again_a_held_out_one_unnoticed(run, tmp_path):
    start(run, job_on(tmp_path, ROWS))
    moved = job_on(tmp_path, ROWS[2:], [*HELD_OUT, *ROWS[:2]])
    start(run, moved, accept_changes=True)
    leak = "2 of 5 held-out rows ask what the run trained on"
    for _ in range(2):
        assert start(run, moved).notes[-1] == f"warning: {leak}"
        assert read_record(run).describe_leaks() == leak
    assert [read_record(run).find_replaced(iteration) for iteration in (1, 2)] == [{"a", "b"}, set()]
    # They leave, and one comes back under another id: what the run once saw stays known.
    start(run, job_on(tmp_path, ROWS[2:]), accept_changes=True)
    assert read_record(run).describe_leaks() == ""
    back = job_on(tmp_path, ROWS[2:], [*HELD_OUT, {**ROWS[0], "id": "back"}])
    notes = start(run, back, accept_changes=True).notes
    assert "1 of 4 held-out rows ask what the run trained on" in notes[-1]
    assert {item.row.id for item in read_record(run).earlier} == {"a", "b"}
    # A row on both sides counts too.
    twice = job_on(tmp_path, ROWS[2:], [*HELD_OUT, {**ROWS[2], "id": "twice"}])
    start(run, twice, accept_changes=True)
    assert read_record(run).describe_leaks() == "1 of 4 held-out rows ask what the run trained on"


def test_rows_of_a_start_that_played_nothing_bind_no_later_one(run, tmp_path):
    start(run, job_on(tmp_path, ROWS[:2]), plays=False)
    start(run, job_on(tmp_path, ROWS))
    start(run, job_on(tmp_path, ROWS[1:]), accept_changes=True, plays=False)
    with pytest.raises(DataError, match="1 training row is gone"):
        start(run, job_on(tmp_path, ROWS[1:]))
    # Where the record was written and nothing was played, it does not count.
    other = create_run(tiny_job(), tmp_path / "other")
    data, record = data_of_run(job_on(tmp_path, ROWS[:2]), other)
    record_rows(other, record, data, 0)
    start(other, job_on(tmp_path, ROWS))


def test_the_order_of_rows_counts_where_training_follows_it(run, tmp_path):
    start(run, job_on(tmp_path, ROWS, shuffle=False))
    with pytest.raises(DataError, match=r"the order of the rows changed, and data\.shuffle is false"):
        start(run, job_on(tmp_path, ROWS[::-1], shuffle=False))


def test_rows_of_two_runs_are_compared_by_id_where_their_content_is_equal(tmp_path):
    def record(name, rows, held_out):
        run = create_run(tiny_job(), tmp_path / name)
        start(run, job_on(tmp_path, rows, held_out))
        return read_record(run)

    first = record("first", ROWS, HELD_OUT)
    assert describe_mismatch(first, record("less", ROWS, HELD_OUT[1:])) == []
    other = record("other", HELD_OUT[:2], [{**HELD_OUT[2], "answer": "#### 5"}])
    assert find_other_rows(first, other) == find_other_rows(other, first) == {"z"}
    told = [
        "1 held-out rows of one id have different content, and are not paired",
        "one run trained on what 2 held-out rows of the other ask",
    ]
    assert describe_mismatch(first, other) == describe_mismatch(other, first) == told


def test_a_run_from_before_records_were_kept_goes_on_with_positions_as_ids(run, tmp_path):
    nameless = [{"question": row["question"], "answer": row["answer"]} for row in ROWS]
    job = job_on(tmp_path, nameless)
    (run.rollouts / "iteration_1.parquet").touch()  # it has played, and there is no record
    for accept_changes in (True, False, False):
        data = start(run, job, accept_changes=accept_changes)
        assert [row.id for row in data.training] == [f"train/{n}" for n in range(4)]
    with pytest.raises(DataError, match="changed under the same id: train/0"):
        start(run, job_on(tmp_path, nameless[1:]))


def test_rows_of_a_column_id_are_compared_with_those_of_a_run_from_before_records_were_kept(run, tmp_path):
    (run.rollouts / "iteration_1.parquet").touch()
    job, new = job_on(tmp_path, ROWS), create_run(tiny_job(), tmp_path / "new")
    start(run, job), start(new, job)
    assert describe_mismatch(read_record(run), read_record(new)) == []
