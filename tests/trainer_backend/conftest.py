from collections.abc import Iterator
from contextlib import ExitStack
from unittest.mock import patch

import pytest

from tests.trainer_backend.store.postgres import Postgres
from trainer_backend.operator_plugins import _BY_FILE, _load_packages_once
from trainer_backend.plugins import OPEN_BOARDS


@pytest.fixture
def own_boards() -> Iterator[None]:
    """No other test meets the plug-ins that a test adds."""
    with ExitStack() as stack:
        for board in (*OPEN_BOARDS.values(), _BY_FILE):
            stack.enter_context(patch.dict(board))
        yield
    _load_packages_once.cache_clear()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """One server for all tests of a process, which may kill it and start it again."""
    server = Postgres()
    yield server
    server.close()
