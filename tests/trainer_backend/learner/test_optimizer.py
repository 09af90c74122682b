"""AdamW with moments in main memory takes the same steps; what a learner without memory says and keeps."""

from pathlib import Path

import pytest
import torch

from tests.trainer_backend.learner.hand_made import are_equal, make_episodes, make_learner
from trainer_backend.errors import OutOfMemory
from trainer_backend.learner.checkpoints import restore_progress
from trainer_backend.learner.fit import less_memory
from trainer_backend.learner.optimizer import OffloadedAdamW
from trainer_backend.parts import Progress

ADVANTAGES = [1.0, -0.5, 0.25]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_offloaded_steps_are_those_of_adamw(tokenizer, weight_decay: float):
    kept = make_learner(tokenizer, training__weight_decay=weight_decay)
    moved = make_learner(tokenizer, training__weight_decay=weight_decay, training__optimizer_offload=True)
    assert isinstance(moved._optimizer, OffloadedAdamW)
    for iteration in (1, 2, 3):
        for learner in (kept, moved):
            learner.update(make_episodes(learner, ADVANTAGES), iteration=iteration)
    assert are_equal(kept.weights(), moved.weights())


@pytest.mark.parametrize("offloads_first", [False, True])
def test_a_run_may_be_resumed_with_the_moments_in_the_other_place(
    tokenizer, offloads_first: bool, tmp_path: Path
):
    first = make_learner(tokenizer, training__optimizer_offload=offloads_first)
    first.update(make_episodes(first, ADVANTAGES), iteration=1)
    first.save(tmp_path / "iteration_1", Progress(1, 1, 2))
    second = make_learner(tokenizer, training__optimizer_offload=not offloads_first)
    second.model.load_state_dict(first.model.state_dict())
    assert restore_progress(tmp_path / "iteration_1", second._optimizer) == Progress(1, 1, 2)
    for learner in (first, second):
        learner.update(make_episodes(learner, ADVANTAGES), iteration=2)
    assert are_equal(first.weights(), second.weights())


@pytest.mark.parametrize("offload", [False, True])
def test_a_gradient_as_large_as_epsilon_moves_a_weight_by_half_the_rate(tokenizer, offload: bool):
    keys = {"training__adam_epsilon": 1e-6, "training__critic": "own", "training__optimizer_offload": offload}
    learner = make_learner(tokenizer, algorithm__advantage="gae", **keys)
    critic = learner._own_critic()._optimizer
    assert [one.param_groups[0]["eps"] for one in (learner._optimizer, critic)] == [1e-6, 1e-6]
    weights = [weight for weight in learner.model.parameters() if weight.requires_grad]
    before = [weight.detach().clone() for weight in weights]
    for weight in weights:
        weight.grad = torch.full_like(weight, 1e-6)
    learner._optimizer.step()
    rate = learner._optimizer.param_groups[0]["lr"]
    for weight, old in zip(weights, before, strict=True):
        torch.testing.assert_close(weight.detach(), old - rate / 2, rtol=0, atol=2e-6)


def test_weights_without_a_gradient_are_left_alone():
    touched, untouched = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = OffloadedAdamW([touched, untouched], lr=0.1, weight_decay=0.5)
    touched.grad = torch.ones(2)
    optimizer.step()
    assert untouched.tolist() == [1.0, 1.0]
    # One step of AdamW: decay by lr * 0.5, then lr towards minus the gradient's sign.
    torch.testing.assert_close(touched.detach(), torch.tensor([0.85, 0.85]))


def test_a_step_in_parts_is_the_step_of_the_whole():
    torch.manual_seed(0)
    values = torch.randn(5, 9)
    whole, cut = (torch.nn.Parameter(values.clone()) for _ in range(2))
    one = torch.optim.AdamW([whole], lr=0.01, weight_decay=0.1, fused=True)
    parts = OffloadedAdamW([cut], lr=0.01, weight_decay=0.1)
    for _ in range(3):
        whole.grad = torch.randn(5, 9)
        cut.grad = whole.grad.clone()
        one.step()
        with torch.no_grad():
            for part in parts._parts(cut, parts.param_groups[0], most=16):
                part.take_step(part.weight, part.gradient)
        parts.state[cut]["step"] += 1
    torch.testing.assert_close(cut, whole, rtol=0, atol=1e-7)
    for name in ("exp_avg", "exp_avg_sq", "step"):
        torch.testing.assert_close(parts.state[cut][name], one.state[whole][name], rtol=1e-6, atol=1e-9)


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
def test_it_says_what_was_asked_for_what_needs_less_and_how_many_steps_were_taken(
    tokenizer, error, told, call: int, steps: int
):
    learner = make_learner(tokenizer, training__batch_decisions=1)  # the second step's segment is scored
    episodes = make_episodes(learner, [1.0, -1.0])
    Shortage(learner, call, error)
    with pytest.raises(OutOfMemory, match=told) as caught:
        learner.update(episodes, iteration=1)
    assert caught.value.hint == less_memory(learner.config)
    assert caught.value.steps_taken == steps
    assert caught.value.__cause__.__traceback__ is None, "its frames would hold on to the memory"


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
    assert are_equal(learner.weights(), spared.weights())


def test_other_errors_of_torch_stay_what_they_are(tokenizer):
    learner = make_learner(tokenizer)
    episodes = make_episodes(learner, [1.0, -1.0])
    Shortage(learner, 1, ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        learner.update(episodes, iteration=1)
