"""Damage to a checkpoint, or other weights of a fixed policy, are noticed, and it is told how to go on."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.trainer_backend.rundir.disk import full_disk
from trainer_backend.errors import CheckpointError, JobError, RunDirectoryError
from trainer_backend.rundir.checkpoint_paths import STATE_FILE
from trainer_backend.rundir.digests import FILE, collect_digests, find_damage, refuse_damaged
from trainer_backend.rundir.fixed_record import FixedWeights, RemoteModel, begin_record, continue_record
from trainer_backend.rundir.layout import FIXED_RECORD, RunDirectory

NAMES = ["model.safetensors", "training_state/optimizer.safetensors", STATE_FILE]


def checkpoint(run: Path, iteration: int) -> Path:
    folder = run / "checkpoints" / f"iteration_{iteration}"
    with collect_digests(folder) as digests:
        for name in NAMES:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(range(256)) * 40)
            digests.take()
        digests.write()
    return folder


def flip(path: Path, byte: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(byte)
        (value,) = file.read(1)
        file.seek(byte)
        file.write(bytes([value ^ 1 << bit]))


def test_one_flipped_bit_anywhere_is_damage_and_flipped_back_it_is_none(tmp_path: Path):
    folder = checkpoint(tmp_path, 4)
    assert find_damage(folder) is None
    for name in NAMES:
        for byte, bit in ((0, 0), (5000, 7), (10239, 3)):
            flip(folder / name, byte, bit)
            told = find_damage(folder)
            assert told is not None and told.startswith(f"{name} has the crc32 ")
            flip(folder / name, byte, bit)
    assert find_damage(folder) is None


def test_a_file_is_digested_piece_by_piece_to_its_end(tmp_path: Path):
    path = tmp_path / "iteration_1" / "model.safetensors"
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(2**26 + 10)  # a piece and a bit, without taking room on the disk
    with collect_digests(path.parent) as digests:
        digests.write()
    assert find_damage(path.parent) is None
    flip(path, 2**26 + 9)
    assert find_damage(path.parent) is not None


def test_what_is_cut_short_or_gone_is_damage(tmp_path: Path):
    folder = checkpoint(tmp_path, 4)
    (folder / "a user's note").write_text("is none")
    assert find_damage(folder) is None
    (folder / NAMES[1]).write_bytes(b"")
    assert find_damage(folder) is not None
    (folder / NAMES[1]).unlink()
    assert find_damage(folder) == f"{NAMES[1]} is missing"
    (folder / FILE).write_text('{"piece_bytes": 1')
    assert str(find_damage(folder)).startswith(f"{FILE} cannot be read")
    (folder / FILE).unlink()
    assert find_damage(folder) == f"{FILE} is missing"


def test_a_damaged_checkpoint_names_the_newest_older_one_that_is_whole_and_the_way_on(tmp_path: Path):
    folders = {iteration: checkpoint(tmp_path, iteration) for iteration in (0, 2, 10, 12)}
    for iteration in (10, 12):
        flip(folders[iteration] / "model.safetensors", 77)
    with pytest.raises(CheckpointError) as caught:
        refuse_damaged(folders[12])
    message = str(caught.value)
    assert message.startswith(f"{folders[12]}: the checkpoint is damaged: model.safetensors has the crc32 ")
    assert "iteration_2 is whole." in message
    assert f"`mv {folders[12]} {folders[12]}_damaged`" in message
    assert f"`turnwise train --resume {tmp_path}`, which does again what came after iteration 2." in message
    flip(folders[0] / STATE_FILE, 0)
    with pytest.raises(CheckpointError, match="No older one is whole: put a copy of it back"):
        refuse_damaged(folders[0])


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


def test_a_record_that_is_as_it_was_is_not_written_again(run: RunDirectory):
    begin_record(run, {"fixed": OLD})
    with full_disk():
        continue_record(run, {"fixed": OLD})


def test_gateways_that_check_together_each_find_and_add_theirs(run: RunDirectory):
    names = [f"policy_{number}" for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda name: continue_record(run, {name: OLD}), names)) == [[]] * 40
    assert sorted(recorded(run)) == sorted(names)
