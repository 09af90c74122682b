from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer_backend.pages.shown import Shown


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[Shown]:
    found = Shown(tmp_path)
    yield found
    found.store.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    """For tests that change nothing that another one looks at."""
    found = Shown(tmp_path_factory.mktemp("pages"))
    yield found
    found.store.close()
