from pathlib import Path

import pytest

from trainer_backend.store.database import open_store


@pytest.fixture
def store(tmp_path: Path):
    found = open_store(f"sqlite:///{tmp_path}/store.db")
    yield found
    found.close()
