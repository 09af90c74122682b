"""Damage to a checkpoint's files is noticed, and who is told of it learns how to go on."""

from pathlib import Path

import pytest

from trainer_backend.errors import CheckpointError
from trainer_backend.rundir.checkpoint_paths import STATE_FILE
from trainer_backend.rundir.digests import FILE, collect_digests, find_damage, refuse_damaged

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
