"""Which device and precision a job gets, and what a missing GPU is told as."""

import re

import pytest
import torch

from trainer_backend.errors import JobError
from trainer_backend.learner.attention import BlockMask, ByLength, OneRow, attention_for, varlen_is_here
from trainer_backend.learner.capacity import slower_ways
from trainer_backend.learner.device import Found, Placement, place

NOTHING = Found(cuda=None, mps=False)
OLD_CUDA = Found(cuda=(7, 5), mps=False)
NEW_CUDA = Found(cuda=(9, 0), mps=False)
APPLE = Found(cuda=None, mps=True)


@pytest.mark.parametrize(
    ("name", "found", "device", "low"),
    [
        ("auto", NOTHING, "cpu", None),
        ("auto", APPLE, "mps", None),
        ("auto", NEW_CUDA, "cuda", torch.bfloat16),
        ("auto", Found(cuda=(8, 0), mps=True), "cuda", torch.bfloat16),
        ("cpu", NEW_CUDA, "cpu", None),
        ("cuda", OLD_CUDA, "cuda", None),  # no bfloat16 in its tensor cores
        ("mps", APPLE, "mps", None),
    ],
)
def test_auto_takes_cuda_then_mps_then_cpu_and_bfloat16_is_for_gpus_that_have_it(name, found, device, low):
    placement = place(name, found)
    assert (placement.device.type, placement.low) == (device, low)


@pytest.mark.parametrize("name", ["cuda", "mps"])
def test_a_gpu_that_is_not_there_is_refused_with_what_torch_sees(name):
    with pytest.raises(JobError, match=rf"model.device is '{name}', but torch .* sees no GPU.*auto"):
        place(name, NOTHING)


def test_the_wrong_kind_of_gpu_is_named():
    with pytest.raises(JobError, match=r"model.device is 'mps', but torch .* sees cuda"):
        place("mps", NEW_CUDA)


def test_attention_of_variable_length_is_for_cuda_in_bfloat16():
    assert varlen_is_here(), "the newest torch that we allow has it"
    assert isinstance(attention_for(place("cuda", NEW_CUDA), head_dim=128), OneRow)
    assert isinstance(attention_for(place("cpu", NOTHING), head_dim=128), ByLength)
    for name, found in (("cuda", OLD_CUDA), ("mps", APPLE)):
        assert isinstance(attention_for(place(name, found), head_dim=128), BlockMask)


@pytest.mark.parametrize("head_dim", [100, 264])
def test_heads_that_the_kernel_does_not_take_are_masked(head_dim: int):
    assert isinstance(attention_for(place("cuda", NEW_CUDA), head_dim=head_dim), BlockMask)


@pytest.mark.parametrize(
    ("placement", "head_dim", "told"),
    [
        (place("cuda", OLD_CUDA), 128, "masked: this GPU is older than Ampere"),
        (place("mps", APPLE), 128, "masked: mps has no kernel"),
        (
            place("cuda", NEW_CUDA),
            100,
            "masked: its kernel takes heads of 8, 16, ... 256 numbers, .* have 100",
        ),
    ],
)
def test_a_slower_way_is_told_with_its_reason_and_what_it_costs(placement, head_dim: int, told: str):
    (note,) = slower_ways(placement, head_dim=head_dim, model_type="qwen3", by_kernels=True)
    assert re.search(told, note)
    assert "grow with the square of training.row_tokens" in note


def test_nothing_is_told_where_nothing_is_slower():
    assert slower_ways(place("cuda", NEW_CUDA), head_dim=128, model_type="llama", by_kernels=True) == ()
    assert slower_ways(place("cpu", NOTHING), head_dim=100, model_type="mistral", by_kernels=False) == ()


def test_layers_without_kernels_on_a_gpu_that_could_have_them_are_told():
    (note,) = slower_ways(place("cuda", NEW_CUDA), head_dim=128, model_type="qwen2", by_kernels=False)
    assert "by torch's operators" in note and "Triton" in note


def test_a_model_that_the_own_forward_pass_does_not_know_is_told():
    (note,) = slower_ways(place("cpu", NOTHING), head_dim=64, model_type="gemma3", by_kernels=False)
    assert "run through transformers" in note and "'gemma3'" in note and "qwen3" in note


def test_a_rounded_weight_is_not_kept_for_another_product():
    weight, states = torch.nn.Parameter(torch.eye(4)), torch.ones(2, 4, requires_grad=True)
    kept: list[torch.Tensor] = []
    with (
        Placement(torch.device("cpu"), torch.bfloat16).autocast(),
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor), lambda _: states),
    ):
        _ = torch.nn.functional.linear(states, weight), torch.nn.functional.linear(states, weight)
    rounded = [tensor.data_ptr() for tensor in kept if tensor.shape[0] == 4]
    assert len(rounded) == len(set(rounded)) == 2
