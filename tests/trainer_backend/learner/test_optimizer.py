"""AdamW with its moments in main memory takes the same steps, and its state is interchangeable."""

from pathlib import Path

import pytest
import torch

from tests.trainer_backend.learner.hand_made import make_episodes, make_learner
from trainer_backend.learner.checkpoints import restore_progress
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
    other = moved.weights()
    assert all(torch.equal(tensor, other[name]) for name, tensor in kept.weights().items())


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
    other = second.weights()
    assert all(torch.equal(tensor, other[name]) for name, tensor in first.weights().items())


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
