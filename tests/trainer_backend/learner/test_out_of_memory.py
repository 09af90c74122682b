"""Running out of memory: what it says, what it leaves, and that the learner can go on."""

from pathlib import Path

import pytest
import torch

from tests.trainer_backend.learner.hand_made import make_episodes, make_learner
from trainer_backend.errors import OutOfMemory
from trainer_backend.parts import Progress

MORE_THAN_THERE_IS = 2**50


class Shortage:
    """A layer that needs too much from its `call`-th forward pass on, counted from 1."""

    def __init__(self, learner, call: int, error: type[Exception] | None = None) -> None:
        self._call, self._error, self._calls = call, error, 0
        self._hook = learner.model.model.layers[0].mlp.register_forward_hook(self._ask)

    def _ask(self, *_: object) -> None:
        self._calls += 1
        if self._calls >= self._call:
            if self._error is not None:
                raise self._error("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 8 GiB.")
            torch.empty(MORE_THAN_THERE_IS)

    def ends(self) -> None:
        self._hook.remove()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (None, f"asked for {MORE_THAN_THERE_IS * 4} bytes more"),
        (torch.OutOfMemoryError, "asked for 20.00 GiB more"),
    ],
    ids=["cpu", "cuda"],
)
@pytest.mark.parametrize(("call", "steps"), [(1, 0), (2, 0), (3, 1)], ids=["score", "first", "second"])
def test_it_names_the_knobs_and_says_how_many_steps_were_taken(tokenizer, error, told, call: int, steps: int):
    learner = make_learner(tokenizer, training__batch_decisions=1)  # the second step's segment is scored
    episodes = make_episodes(learner, [1.0, -1.0])
    Shortage(learner, call, error)
    with pytest.raises(OutOfMemory, match=told) as caught:
        learner.update(episodes, iteration=1)
    for knob in ("micro_batch_tokens", "gradient_checkpointing", "[lora]", "max_running"):
        assert knob in str(caught.value)
    assert caught.value.steps_taken == steps
    assert caught.value.__cause__.__traceback__ is None, "its frames would hold on to the memory"


def test_knobs_that_are_turned_already_are_not_named(tokenizer):
    turned = {"training__gradient_checkpointing": True, "training__optimizer_offload": True, "lora__rank": 2}
    learner = make_learner(tokenizer, **turned)
    episodes = make_episodes(learner, [1.0, -1.0])
    Shortage(learner, 1)
    with pytest.raises(OutOfMemory) as caught:
        learner.update(episodes, iteration=1)
    for knob in ("gradient_checkpointing", "[lora]", "optimizer_offload"):
        assert knob not in str(caught.value)


def test_the_weights_are_whole_and_can_be_saved_and_trained_on(tokenizer, tmp_path: Path):
    learner, spared = make_learner(tokenizer), make_learner(tokenizer)
    episodes = make_episodes(learner, [1.0, -1.0])
    shortage = Shortage(learner, 1)
    with pytest.raises(OutOfMemory):
        learner.update(episodes, iteration=1)
    learner.save(tmp_path / "iteration_0", Progress())
    assert all(weight.grad is None for weight in learner.model.parameters())
    shortage.ends()
    for one in (learner, spared):
        one.update(episodes, iteration=1)
    other = spared.weights()
    assert all(torch.equal(tensor, other[name]) for name, tensor in learner.weights().items())


def test_other_errors_of_torch_stay_what_they_are(tokenizer):
    learner = make_learner(tokenizer)
    episodes = make_episodes(learner, [1.0, -1.0])
    Shortage(learner, 1, ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        learner.update(episodes, iteration=1)
