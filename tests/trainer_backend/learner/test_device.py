"""Which device and precision a job gets, and what a missing GPU is told as."""

import re
import sys
from functools import partial
from types import ModuleType

import pytest
import torch

from trainer_backend.errors import JobError
from trainer_backend.learner.attention import (
    BlockMask,
    ByLength,
    OneRow,
    _varlen_parameters,
    attention_for,
)
from trainer_backend.learner.device import Found, Placement, cuda_refusal, place
from trainer_backend.learner.memory_plan import slower_ways

NOTHING = Found(cuda=None, mps=False)
OLD_CUDA = Found(cuda=(7, 5), mps=False)
NEW_CUDA = Found(cuda=(9, 0), mps=False)
APPLE = Found(cuda=None, mps=True)
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by "
    "downloading and installing a new version"
)
OLD_DRIVER = Found(cuda=None, mps=False, why_no_cuda=TOO_OLD)
NO_DRIVER = "Found no NVIDIA driver on your system"


# With a torch as new as it has to be, but for what is named.
notes_for = partial(
    slower_ways, head_dim=128, model_type="qwen3", no_kernels=None, wide_products=True, wide_sums=True
)


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


@pytest.mark.parametrize(
    ("name", "found", "says"),
    [
        ("mps", NEW_CUDA, "sees cuda"),
        ("cuda", NOTHING, "sees no GPU.*auto"),
        ("cuda", OLD_DRIVER, r"sees no GPU: .* too old \(found version 11040\)\. .*auto"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused_with_what_torch_sees(name: str, found: Found, says: str):
    with pytest.raises(JobError, match=rf"model.device is '{name}', but torch .* {says}"):
        place(name, found)


@pytest.mark.parametrize(
    ("why", "is_told"),
    [
        (TOO_OLD, True),
        ("CUDA driver initialization failed, you might not have a CUDA gpu", True),
        (NO_DRIVER, False),
        ("No CUDA GPUs are available", False),
        (None, False),
    ],
)
def test_auto_tells_of_a_driver_that_it_passes_over_and_of_no_other_reason(why: str | None, is_told: bool):
    placement = place("auto", Found(cuda=None, mps=False, why_no_cuda=why))
    assert placement.device.type == "cpu"
    notes = notes_for(placement)
    assert len(notes) == is_told
    assert all(
        re.search(rf"runs on cpu.* is 'auto'.* no GPU: {re.escape(str(why))}$", note) for note in notes
    )
    assert notes_for(place("cpu", OLD_DRIVER)) == (), "who names the CPU gets it"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            RuntimeError(f"{TOO_OLD}.\nException raised from device_count_impl at CUDAFunctions.cpp:1"),
            TOO_OLD,
        ),
        (AssertionError("libcudart functions unavailable."), "libcudart functions unavailable"),
    ],
)
def test_the_reason_is_the_line_that_torch_says_when_cuda_starts(error: Exception, reason: str):
    def start() -> None:
        raise error

    assert cuda_refusal(start) == reason
    assert cuda_refusal(lambda: None) is None


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch was built with CUDA")
def test_a_torch_without_cuda_has_no_reason_of_a_driver():
    assert Found.by_torch().why_no_cuda is None


@pytest.mark.parametrize(
    ("name", "found", "head_dim", "kind"),
    [
        ("cuda", NEW_CUDA, 128, OneRow),
        ("cuda", NEW_CUDA, 100, BlockMask),
        ("cuda", NEW_CUDA, 264, BlockMask),
        ("cuda", OLD_CUDA, 128, BlockMask),
        ("mps", APPLE, 128, BlockMask),
        ("cpu", NOTHING, 100, ByLength),
    ],
)
def test_attention_of_variable_length_is_for_cuda_in_bfloat16_with_heads_that_it_takes(
    name: str, found: Found, head_dim: int, kind: type
):
    assert isinstance(attention_for(place(name, found), head_dim=head_dim), kind)


OLD_TORCH = {"wide_products": False, "wide_sums": False}
FAILED = "RuntimeError: Failed to find C compiler"
SQUARE = r"grow with the square of training\.row_tokens"


@pytest.mark.parametrize(
    ("name", "found", "keys", "told"),
    [
        ("cuda", NEW_CUDA, {"model_type": "llama"}, []),
        ("cpu", NOTHING, {"head_dim": 100, "model_type": "mistral", **OLD_TORCH}, []),
        ("mps", APPLE, {}, [f"masked: mps has no kernel.*{SQUARE}"]),
        ("cuda", NEW_CUDA, {"head_dim": 100}, [f"masked: .*; this model's is 100.*{SQUARE}"]),
        ("cuda", OLD_CUDA, OLD_TORCH, [f"GPUs before Ampere lack.*{SQUARE}"]),  # float32 is not rounded
        ("cuda", NEW_CUDA, OLD_TORCH, [r"cannot sum products of bfloat16 in float32, 2\.8 can"]),
        ("cuda", NEW_CUDA, {"wide_sums": False}, [r"second buffer, 4 bytes .*, 2\.10 can"]),
        (
            "cuda", NEW_CUDA, {"model_type": "qwen2", "no_kernels": FAILED},
            [f"{FAILED}.*TRITON_CACHE_DIR", "by torch's operators"],
        ),
        ("cpu", NOTHING, {"model_type": "gemma3"}, ["run through transformers.*qwen3.*'gemma3'"]),
    ],
)  # fmt: skip
def test_a_slower_way_is_told_with_its_reason_and_what_it_costs(
    name: str, found: Found, keys: dict, told: list[str]
):
    notes = notes_for(place(name, found), **keys)
    assert len(notes) == len(told)
    assert all(re.search(pattern, note) for pattern, note in zip(told, notes, strict=True))


def varlen_without_windows(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """As torch 2.10 has it."""


@pytest.mark.parametrize("is_there", [False, True], ids=["no module", "one without windows"])
def test_a_torch_without_attention_of_variable_length_is_told(
    monkeypatch: pytest.MonkeyPatch, is_there: bool
):
    module = ModuleType("varlen")
    module.varlen_attn = varlen_without_windows
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module if is_there else None)
    _varlen_parameters.cache_clear()
    try:
        (note,) = notes_for(place("cuda", NEW_CUDA))
    finally:
        _varlen_parameters.cache_clear()
    assert re.search(rf"masked: torch \S+ has no varlen_attn .*; 2\.11 has\. .*{SQUARE}", note)


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
