import pytest

from tests.task_app.interactions import users


@pytest.fixture(autouse=True)
def clean_book():
    users.BOOK.clear()
    users.ENTERED.clear()
    users.LET_GO.clear()
    yield
    users.LET_GO.set()  # no thread stays blocked
