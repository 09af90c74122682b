"""A preset with its tokenizer, and an engine on it: built once, small, on one thread."""

import os

# Before torch: spinning OpenMP threads make it many times slower beside another busy process.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.trainer_backend.inference.served import make_keys
from trainer_backend.inference.engine import LocalEngine
from trainer_backend.inference.keys import EngineKeys
from trainer_backend.models import build_preset, train_tokenizer

torch.set_num_threads(1)

ACTIONS = ("noop", "move_left", "move_right", "move_up", "move_down", "do", "sleep", "place_table")
WORDS = (
    "hp", "food", "water", "rest", "wood", "stone", "coal", "iron", "sapling", "facing", "grass", "sand",
    "tree", "cow", "zombie", "left", "right",
)  # fmt: skip


def crafter_like_prompt(seed: int, words: int = 20) -> str:
    draw = random.Random(seed)
    return " ".join(f"{draw.choice(WORDS)} {draw.randint(0, 9)}" for _ in range(words))


@pytest.fixture(scope="session")
def tools() -> list[dict[str, object]]:
    actions = {"type": "array", "items": {"type": "string", "enum": list(ACTIONS)}, "minItems": 1}
    parameters = {"type": "object", "properties": {"actions": actions}, "required": ["actions"]}
    function = {"name": "interact_many", "description": "act", "parameters": parameters}
    return [{"type": "function", "function": function}]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer([crafter_like_prompt(i) for i in range(50)], 512, whole_words=ACTIONS)


@pytest.fixture(scope="session")
def model(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """For reading only: engines get models of their own."""
    return build_preset("tiny-0.3m", tokenizer, seed=1)


@pytest.fixture
def start_engine(tokenizer: PreTrainedTokenizerFast) -> Iterator[Callable[..., LocalEngine]]:
    """Starts engines on fresh copies of `model` (or a given one) and stops them after the test."""
    engines: list[LocalEngine] = []

    def start(
        own: PreTrainedModel | None = None, *, stop_ids: tuple[int, ...] = (), **settings: object
    ) -> LocalEngine:
        served = own or build_preset("tiny-0.3m", tokenizer, seed=1)
        keys = {name: settings.pop(name) for name in EngineKeys.model_fields if name in settings}
        engine = LocalEngine(served, stop_ids=stop_ids, keys=make_keys(served, **keys), **settings)
        engine.start()
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.stop()
