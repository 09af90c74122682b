"""A run goes on with the weights that its fixed policies had, or not at all."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.trainer_backend.rundir.disk import full_disk
from trainer_backend.errors import JobError, RunDirectoryError
from trainer_backend.rundir.fixed_record import FixedWeights, RemoteModel, begin_record, continue_record
from trainer_backend.rundir.layout import FIXED_RECORD, RunDirectory

OLD, NEW = FixedWeights("/runs/a/iteration_20", "11" * 32), FixedWeights("/runs/a/iteration_40", "22" * 32)


def recorded(run: RunDirectory) -> dict[str, dict[str, str]]:
    return json.loads((run.path / FIXED_RECORD).read_text())


def test_the_same_weights_may_lie_elsewhere_and_others_are_refused_with_both(run: RunDirectory):
    begin_record(run, {"fixed": OLD})
    continue_record(run, {"fixed": FixedWeights("/moved", OLD.sha256)})
    assert recorded(run) == {"fixed": {"folder": "/moved", "sha256": OLD.sha256}}
    with pytest.raises(JobError, match=r"^\[rollout_only\] 'fixed': the run has samples") as caught:
        continue_record(run, {"fixed": NEW})
    assert all(word in str(caught.value) for word in (OLD.sha256, "/moved", NEW.sha256, NEW.folder))
    assert recorded(run)["fixed"]["sha256"] == OLD.sha256


def test_a_model_at_a_server_may_move_which_is_told_and_another_one_is_refused(run: RunDirectory):
    there = RemoteModel("vendor/large", "http://a:1/v1")
    begin_record(run, {"far": there})
    assert recorded(run) == {"far": {"model": "vendor/large", "url": "http://a:1/v1"}}
    assert continue_record(run, {"far": there}) == []
    (line,) = continue_record(run, {"far": RemoteModel("vendor/large", "http://b:1/v1")})
    assert "'far'" in line and "at http://b:1/v1; the run has samples of it at another URL" in line
    for other in (RemoteModel("vendor/small", "http://b:1/v1"), NEW):
        with pytest.raises(
            JobError, match="the run has samples of the model 'vendor/large' at http://b:1/v1"
        ):
            continue_record(run, {"far": other})


def test_a_policy_may_come_and_go_and_is_then_still_what_it_was(run: RunDirectory):
    begin_record(run, {"one": OLD})
    continue_record(run, {"other": NEW})
    assert set(recorded(run)) == {"one", "other"}
    with pytest.raises(JobError, match="'one'"):
        continue_record(run, {"one": NEW, "other": NEW})


def test_a_run_that_begins_again_has_no_past_and_one_without_fixed_policies_no_record(run: RunDirectory):
    begin_record(run, {"fixed": OLD})
    begin_record(run, {"fixed": NEW})
    continue_record(run, {"fixed": NEW})
    begin_record(run, {})
    continue_record(run, {})
    assert not (run.path / FIXED_RECORD).exists()


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"fixed": 1}', '{"fixed": {"sha256": "1"}}', '{"fixed": {"url": "u"}}']
)
def test_a_record_that_was_damaged_is_told(run: RunDirectory, text: str):
    (run.path / FIXED_RECORD).write_text(text)
    with pytest.raises(RunDirectoryError, match=rf"{FIXED_RECORD} cannot be read"):
        continue_record(run, {"fixed": OLD})


def test_a_directory_with_nothing_but_a_record_was_not_used(run: RunDirectory):
    begin_record(run, {"fixed": OLD})
    assert run.remove_if_unused(with_log=True)


def test_a_record_that_is_as_it_was_is_not_written_again_and_a_full_disk_leaves_it(run: RunDirectory):
    begin_record(run, {"fixed": OLD})
    with full_disk():
        continue_record(run, {"fixed": OLD})
    with full_disk(), pytest.raises(RunDirectoryError, match="cannot be written"):
        continue_record(run, {"fixed": OLD, "other": NEW})
    assert recorded(run).keys() == {"fixed"}


def test_gateways_that_check_together_each_find_and_add_theirs(run: RunDirectory):
    names = [f"policy_{number}" for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda name: continue_record(run, {name: OLD}), names)) == [[]] * 40
    assert sorted(recorded(run)) == sorted(names)
