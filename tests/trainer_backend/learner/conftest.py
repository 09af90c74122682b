import pytest

from tests.trainer_backend.learner.hand_made import tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return tiny_tokenizer()
