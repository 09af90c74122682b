import sys
from pathlib import Path

import pytest

from tests.task_app.interactions import users


@pytest.fixture(autouse=True)
def clean_book():
    users.BOOK.clear()
    users.ENTERED.clear()
    users.LET_GO.clear()
    yield
    users.LET_GO.set()  # no thread stays blocked


@pytest.fixture
def path_of_this_folder(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    yield
    sys.modules.pop("published_gsm8k", None)
