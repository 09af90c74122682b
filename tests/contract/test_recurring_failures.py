"""A job that fails by itself: its process ends with the code of one that is not started again in vain."""

from pathlib import Path

import pytest

from tests.conftest import tiny_job, train_job
from trainer_backend.errors import JobTeachesNothing
from trainer_backend.rundir.layout import open_run
from trainer_backend.rundir.state import REFUSED, choose_exit_code, read_state


def test_prompts_that_are_too_long_are_no_outage(tmp_path: Path):
    short = {"warmup__episodes": 2, "warmup__epochs": 1, "evaluation__instances": 1}
    with pytest.raises(JobTeachesNothing) as caught:
        train_job(tiny_job(inference__max_model_len=40, **short), tmp_path / "run")
    assert choose_exit_code(caught.value) == REFUSED
    state = read_state(open_run(tmp_path / "run").path)
    assert state is not None and (state.state, state.code) == ("failed", "job_teaches_nothing")
    assert "1 of 1 rollouts lost: the first prompt does not fit the model" in state.detail
    assert "('crafter', seed " in state.detail and "inference.max_model_len" in state.detail
