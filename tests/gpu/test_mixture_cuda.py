"""An update from samples of several policies on a CUDA device: that of a CPU, up to bfloat16."""

import pytest
import torch

from tests.gpu.test_learner_cuda import DEVICE, ROUNDED, gradient, relative
from tests.trainer_backend.learner.hand_made import tiny_tokenizer
from tests.trainer_backend.learner.test_mixture_update import CASES, MIXED, make_episodes, mixed_learner

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
    reason="no CUDA device with bfloat16 here",
)


@pytest.mark.parametrize(("kind", "level"), CASES)
def test_a_mixed_step_with_a_critic_is_that_of_a_cpu(kind, level):
    tokenizer = tiny_tokenizer()
    fixed = {"objective": kind, "behaviour_weight_level": level, "train_value_head": True}
    gpu, cpu = (
        mixed_learner(tokenizer, fixed=fixed, model__device=device, algorithm__advantage="gae")
        for device in (DEVICE, "cpu")
    )
    episodes = make_episodes(cpu, MIXED, shift=0.1, values=[0.5, -0.5])
    found, expected = (learner.update(episodes, iteration=1) for learner in (gpu, cpu))
    assert relative(gradient(gpu), gradient(cpu)) < 0.15
    for name in ("mixture/fixed/weight_mean", "mixture/fixed/ratio_mean", "mixture/ess", "value/loss"):
        assert found[name] == pytest.approx(expected[name], abs=5 * ROUNDED), name
