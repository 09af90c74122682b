"""Which device and precision a job gets, and what a missing GPU is told as."""

import re
import sys
from collections.abc import Callable, Iterator
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
    varlen_is_here,
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
        ("cuda", NOTHING, "sees no GPU.*auto"),
        ("mps", NOTHING, "sees no GPU.*auto"),
        ("mps", NEW_CUDA, "sees cuda"),
        (
            "cuda",
            OLD_DRIVER,
            r"sees no GPU: The NVIDIA driver on your system is too old \(found version 11040\)\. .*auto",
        ),
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
    if is_told:
        assert "runs on cpu" in notes[0] and "'auto'" in notes[0] and notes[0].endswith(f"no GPU: {why}")
    assert notes_for(place("cpu", OLD_DRIVER)) == (), "who names the CPU gets it"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            RuntimeError(f"{TOO_OLD}.\nException raised from device_count_impl at CUDAFunctions.cpp:1"),
            TOO_OLD,
        ),
        (RuntimeError(f"{NO_DRIVER}."), NO_DRIVER),
        (AssertionError("libcudart functions unavailable. Is it a broken build?"), None),
    ],
)
def test_the_reason_is_what_torch_says_when_cuda_starts(error: Exception, reason: str | None):
    def start() -> None:
        raise error

    assert cuda_refusal(start) == (reason or str(error))
    assert cuda_refusal(lambda: None) is None


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch was built with CUDA")
def test_a_torch_without_cuda_has_no_reason_of_a_driver():
    assert Found.by_torch().why_no_cuda is None


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
        (place("cuda", OLD_CUDA), 128, "GPUs before Ampere lack"),
        (place("mps", APPLE), 128, "masked: mps has no kernel"),
        (place("cuda", NEW_CUDA), 100, "masked: its kernel takes .*; this model's is 100"),
    ],
)
def test_a_slower_way_is_told_with_its_reason_and_what_it_costs(placement, head_dim: int, told: str):
    (note,) = notes_for(placement, head_dim=head_dim)
    assert re.search(told, note)
    assert "grow with the square of training.row_tokens" in note


def test_nothing_is_told_where_nothing_is_slower():
    assert notes_for(place("cuda", NEW_CUDA), model_type="llama") == ()
    old = {"wide_products": False, "wide_sums": False}
    assert notes_for(place("cpu", NOTHING), head_dim=100, model_type="mistral", **old) == ()


def varlen_without_windows(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """As torch 2.10 has it."""


@pytest.fixture
def this_torch_has(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[ModuleType | None], None]]:
    """Puts another module in the place of that of `varlen_attn`; None: there is none."""

    def put(module: ModuleType | None) -> None:
        monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
        _varlen_parameters.cache_clear()

    yield put
    _varlen_parameters.cache_clear()


@pytest.mark.parametrize("is_there", [False, True], ids=["no module", "one without windows"])
def test_a_torch_without_attention_of_variable_length_is_told(this_torch_has, is_there: bool):
    module = ModuleType("varlen")
    module.varlen_attn = varlen_without_windows
    this_torch_has(module if is_there else None)
    (note,) = notes_for(place("cuda", NEW_CUDA))
    assert re.search(r"masked: torch \S+ has no varlen_attn .*; 2\.11 has\. .*training\.row_tokens", note)


@pytest.mark.parametrize(
    ("wide_products", "wide_sums", "told"),
    [
        (False, False, [r"torch \S+ cannot sum products of bfloat16 in float32, 2\.8 can"]),
        (True, False, [r"second buffer, 4 bytes .*torch \S+ cannot add such products in place, 2\.10 can"]),
        (True, True, []),
    ],
    ids=["2.7", "2.9", "2.10"],
)
def test_a_torch_without_wide_products_is_told_where_there_is_bfloat16(wide_products, wide_sums, told):
    has = {"wide_products": wide_products, "wide_sums": wide_sums}
    notes = notes_for(place("cuda", NEW_CUDA), **has)
    assert len(notes) == len(told)
    assert all(re.search(pattern, note) for pattern, note in zip(told, notes, strict=True))
    (other,) = notes_for(place("cuda", OLD_CUDA), **has)  # in float32 nothing is rounded
    assert "attention of updates is masked" in other


def test_layers_without_kernels_on_a_gpu_that_could_have_them_are_told():
    why = "RuntimeError: Failed to find C compiler"
    sampling, update = notes_for(place("cuda", NEW_CUDA), model_type="qwen2", no_kernels=why)
    assert why in sampling and "TRITON_CACHE_DIR" in sampling and "by torch's operators" in update


def test_a_model_that_the_own_forward_pass_does_not_know_is_told():
    (note,) = notes_for(place("cpu", NOTHING), head_dim=64, model_type="gemma3")
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
