"""A file of measured advantages goes on with the setting that it was begun with, and with no other."""

from pathlib import Path

import pytest

from trainer_backend.core.truth import TrueAdvantage
from trainer_backend.errors import RunDirectoryError
from trainer_backend.rundir.truth_file import TruthFile, TruthSetting

TRUTH = TrueAdvantage("a", 1, 0.0, 0.5, 0.1, None, 2, 0, 2, 9)
SETTING = TruthSetting(
    run_id="r", iteration=1, checkpoint="iteration_0", digest="d1", gamma=0.9, continuations=2, horizon=None,
    fresh_draws=False, seed=0, rewards={}, play={},
)  # fmt: skip


def begun(path: Path, setting: TruthSetting) -> Path:
    TruthFile.open(path, setting).add(TRUTH)
    return path


def test_other_weights_of_the_same_name_do_not_go_on_with_a_file(tmp_path: Path):
    path = begun(tmp_path / "truth.jsonl", SETTING)
    assert TruthFile.open(path, SETTING).truths == {("a", 1): TRUTH}
    for digest in ("d2", None):
        with pytest.raises(RunDirectoryError, match="was measured with digest"):
            TruthFile.open(path, SETTING.model_copy(update={"digest": digest}))


def test_a_file_of_before_there_were_digests_goes_on_with_any(tmp_path: Path):
    path = begun(tmp_path / "truth.jsonl", SETTING.model_copy(update={"digest": None}))
    assert TruthFile.open(path, SETTING).truths
    with pytest.raises(RunDirectoryError, match="was measured with gamma"):
        TruthFile.open(path, SETTING.model_copy(update={"gamma": 0.8}))
