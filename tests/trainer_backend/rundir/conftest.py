from pathlib import Path

import pytest

from tests.conftest import tiny_job
from trainer_backend.rundir.layout import RunDirectory, create_run


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return create_run(tiny_job(), tmp_path / "run")
