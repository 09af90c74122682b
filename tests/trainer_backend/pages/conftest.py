from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer_backend.pages.shown import Shown


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[Shown]:
    found = Shown(tmp_path)
    yield found
    found.store.close()
