"""A trainer service, or a store alone, for each test that wants one."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.trainer_backend.jobs.served import Served, serving, settings_for
from trainer_backend.jobs.data_dir import DataDir, open_data_dir
from trainer_backend.store.database import Store, open_store


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(settings_for(tmp_path / "runs")) as found:
        yield found


@pytest.fixture
def data(tmp_path: Path) -> Iterator[DataDir]:
    with open_data_dir(tmp_path / "runs", runs_jobs=True) as found:
        yield found


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = open_store(f"sqlite:///{tmp_path}/store.db")
    yield found
    found.close()
