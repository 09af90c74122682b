import asyncio
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shared_schemas.trajectory import Sampling
from tests.trainer_backend.inference.naive import make_settings
from trainer_backend.inference.actor import Extras
from trainer_backend.inference.batch import drawing_device
from trainer_backend.inference.request import Request
from trainer_backend.inference.row_columns import Columns
from trainer_backend.inference.sampler import (
    AT_ONCE,
    BLOCK,
    RowSettings,
    inverse_cdf,
    likeliest,
    read_options,
    sample,
    stream_key,
    truncation_mask,
    uniforms,
)


def splitmix64(seed: int, steps: int) -> int:
    """The published generator, in plain integers."""
    mask = 2**64 - 1
    state = (seed + steps * 0x9E3779B97F4A7C15) & mask
    z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def drawn(logits: Tensor, uniform: float, **options: float) -> tuple[int, float]:
    processed = bool(options.pop("processed", False))
    settings = make_settings([Sampling.model_validate(options)], processed=processed)
    token, logprob, _ = sample(logits[None], settings, torch.tensor([uniform], dtype=torch.float64))
    return int(token), float(logprob)


def test_the_streams_are_those_of_splitmix64():
    # 1234567 gives 6457827717110365317 first: the known answer of the reference implementation
    assert splitmix64(1234567, 1) == 6457827717110365317
    keys = np.array([1234567, 0, 2**64 - 1], dtype=np.uint64)
    counters = np.array([0, 5, 99], dtype=np.uint64)
    expected = [(splitmix64(int(k), int(c) + 1) >> 11) / 2**53 for k, c in zip(keys, counters, strict=True)]
    assert uniforms(keys, counters).tolist() == expected


def test_a_stream_depends_on_the_seed_and_on_the_prompt():
    assert len({stream_key(s, p) for s in (0, 1, 2**63) for p in ([1], [1, 2], [2, 1])}) == 9
    assert stream_key(-1, [1]) == stream_key(2**128 - 1, [1])


def test_a_token_is_drawn_where_the_cumulated_probability_exceeds_the_uniform():
    probs = torch.tensor([[0.25, 0.0, 0.5, 0.25, 0.0]])
    draws = {0.0: 0, 0.24: 0, 0.25: 2, 0.74: 2, 0.75: 3, 0.999: 3, 1.0 - 2**-53: 3}
    for uniform, token in draws.items():
        assert int(inverse_cdf(probs, torch.tensor([uniform], dtype=torch.float64))) == token


def test_draws_over_many_blocks_are_those_of_one_cumulative_sum():
    # 2000 tokens are 31 blocks and a part of one; a third of them has probability 0, and so has a whole block
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(2000, generator=generator).mul(3).softmax(0)
    probs[torch.rand(2000, generator=generator) < 0.3] = 0.0
    probs[5 * BLOCK : 6 * BLOCK] = 0.0
    numbers = torch.from_numpy(
        uniforms(np.full(20_000, 9, dtype=np.uint64), np.arange(20_000, dtype=np.uint64))
    )
    tokens = inverse_cdf(probs.expand(20_000, -1), numbers)
    cdf = probs.double().cumsum(0)
    below, above = cdf[tokens] - probs.double()[tokens], cdf[tokens]
    # float32 sums of blocks move the borders between tokens by less than a millionth
    assert (below - 1e-6 <= numbers * cdf[-1]).all() and (numbers * cdf[-1] <= above + 1e-6).all()
    assert (probs[tokens] > 0).all()


@pytest.mark.parametrize("vocabulary", [BLOCK + 1, AT_ONCE - 1, AT_ONCE, AT_ONCE + 1, AT_ONCE + BLOCK])
def test_no_number_draws_a_token_of_probability_zero_whatever_the_rounding(vocabulary: int):
    # Around each token of probability 0 the cumulative sum stands still; thirds are rounded in every sum.
    probs = torch.zeros(3, vocabulary)
    probs[0, ::3], probs[1, vocabulary - 2], probs[2, : vocabulary // 2] = 1 / 3, 1e-30, 0.1
    for uniform in (0.0, 1 / 3, 0.5, 2 / 3, 1.0 - 2**-53):
        tokens = inverse_cdf(probs, torch.full((3,), uniform, dtype=torch.float64))
        assert (probs.gather(1, tokens[:, None]) > 0).all()
        assert int(tokens[1]) == vocabulary - 2


def test_a_row_draws_the_same_with_any_others():
    logits = torch.randn(64, 300, generator=torch.Generator().manual_seed(0))
    numbers = torch.from_numpy(uniforms(np.arange(64, dtype=np.uint64), np.zeros(64, dtype=np.uint64)))
    together = sample(logits, make_settings([Sampling(temperature=0.7)] * 64), numbers)
    for row in (0, 17, 63):
        others = [Sampling(top_p=0.5), Sampling(temperature=0.7), Sampling(temperature=0.0)]
        rows = [1, row, 2]
        beside = sample(logits[rows], make_settings(others), numbers[rows])
        assert torch.equal(beside.tokens_B[1], together.tokens_B[row])
        assert torch.equal(beside.logprobs_B[1], together.logprobs_B[row])


def test_the_likeliest_tokens_have_the_log_probs_of_sampled_ones_however_unlikely():
    logits = torch.tensor([[0.0, 200.0, -5.0]])
    ((first, *others),) = likeliest(logits, RowSettings(), counts=[3])
    assert first == (1, 0.0)
    assert others == [(0, -200.0), (2, -205.0)], "exp(-200) is 0 in float32"


def test_temperature_zero_takes_the_likeliest_token_with_its_untempered_logprob():
    logits = torch.tensor([0.0, 2.0, 1.0])
    assert drawn(logits, 0.0, temperature=0.0) == (1, pytest.approx(float(torch.log_softmax(logits, 0)[1])))


def test_the_logprob_is_that_of_the_tempered_distribution_before_truncation():
    logits = torch.tensor([0.0, 2.0, 1.0, -1.0])
    token, logprob = drawn(logits, 0.9, temperature=2.0, top_k=2, top_p=0.99)
    assert token == 2  # of tokens 1 and 2, with masses 0.62 and 0.38 among themselves
    assert logprob == pytest.approx(float(torch.log_softmax(logits / 2.0, 0)[2]))


def make_mask(probs: Tensor, samplings: list[Sampling]) -> Tensor:
    options = torch.tensor([read_options(sampling) for sampling in samplings])
    truncation = RowSettings.of(options, torch.zeros(len(options))).truncation
    return truncation_mask(probs, truncation)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [True, True, True, True]),
        ({"top_k": 2}, [True, False, True, False]),
        ({"top_p": 0.49}, [True, False, False, False]),  # the likeliest alone has more
        ({"top_p": 0.51}, [True, False, True, False]),
        ({"top_p": 1e-9}, [True, False, False, False]),  # one always stays
        ({"min_p": 0.3}, [True, True, True, False]),  # of 0.5: at least 0.15
        ({"min_p": 0.31}, [True, False, True, False]),
        ({"min_p": 0.5, "top_p": 0.62}, [True, False, False, False]),  # 0.62 of the 0.8 left
        ({"top_p": 0.9, "top_k": 3}, [True, True, True, False]),  # 0.9 of the 0.95 that top_k left is 0.855
    ],
)
def test_truncation_keeps_the_smallest_set_that_reaches_the_mass(options: dict[str, Any], kept: list[bool]):
    probs = torch.tensor([[0.5, 0.15, 0.3, 0.05]])
    assert make_mask(probs, [Sampling(**options)]).tolist() == [kept]


def test_truncation_of_a_large_vocabulary_keeps_what_sums_in_float64_would():
    draw = torch.Generator().manual_seed(0)
    probs = (3 * torch.randn(40, 1000, generator=draw)).softmax(-1)
    top_ps, top_ks = 0.05 + 0.95 * torch.rand(40, generator=draw), torch.tensor([0, 3, 200, 900] * 10)
    samplings = [Sampling(top_p=p, top_k=k) for p, k in zip(top_ps.tolist(), top_ks.tolist(), strict=True)]
    for row, mask in enumerate(make_mask(probs, samplings)):
        found = probs[row].double().sort(descending=True)
        kept = found.values[: int(top_ks[row]) or None]
        before = kept.cumsum(0) - kept
        expected = found.indices[: len(kept)][before < top_ps[row].double() * kept.sum()]
        assert set(mask.nonzero()[:, 0].tolist()) == set(expected.tolist())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_show_as_a_nan_logprob(bad: float):
    token, logprob = drawn(torch.tensor([0.0, bad, 1.0]), 0.99)
    assert 0 <= token < 3 and logprob != logprob


def test_tokens_are_drawn_where_float64_is():
    names = ("cpu", "cuda", "mps")
    assert [drawing_device(torch.device(name)).type for name in names] == ["cpu", "cuda", "cpu"]


def test_a_processed_log_prob_is_that_of_what_was_drawn_from():
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    # top_k 2 keeps 0.5 and 0.25: renormalised 2/3 and 1/3; before it, 1/2 and 1/4
    assert drawn(logits, 0.9, top_k=2)[1] == pytest.approx(np.log(1 / 4))
    assert drawn(logits, 0.9, top_k=2, processed=1) == (1, pytest.approx(np.log(1 / 3)))
    assert drawn(logits, 0.1, top_k=2, processed=1) == (0, pytest.approx(np.log(2 / 3)))
    # top_p 0.8 needs three tokens, of mass 0.9
    assert drawn(logits, 0.9, top_p=0.8, processed=1) == (2, pytest.approx(np.log(0.15 / 0.9)))
    # at temperature 1/2 the shares are squared: 0.25 and 0.0625 of the two that are kept
    found = drawn(logits, 0.9, temperature=0.5, top_k=2, processed=1)
    assert found == (1, pytest.approx(np.log(0.0625 / 0.3125)))
    # one that is certain has log-prob 0, greedy the one of the plain softmax
    assert drawn(logits, 0.9, top_k=1, processed=1) == (0, pytest.approx(0.0, abs=1e-7))
    assert drawn(logits, 0.9, temperature=0.0, top_k=1, processed=1) == (0, pytest.approx(np.log(0.5)))


def test_a_row_keeps_its_options_where_rows_are_added_and_moved():
    columns, loop = Columns(), asyncio.new_event_loop()
    samplings = [Sampling(top_k=row, temperature=row % 3) for row in range(70)]
    for row, sampling in enumerate(samplings):
        extras = Extras(processed=row > 1)
        columns.set(row, Request(str(row), [1], sampling, loop, loop.create_future(), extras))
    loop.close()
    columns.move(69, 5)
    assert columns.options[5].tolist() == columns.options[69].tolist() == list(read_options(samplings[69]))
    assert columns.options[65].tolist() == list(read_options(samplings[65]))
    # Row 0 has no option, and row 3 is greedy: there is nothing to truncate.
    assert columns.truncated[:5].tolist() == [False, True, True, False, True]
    assert columns.processed[:5].tolist() == [False, False, True, False, True]


WITH_TRITON = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed: make test-kernel"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def by_kernel(logits: Tensor, temperatures: Tensor, greedy: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    from trainer_backend.inference.sampler_kernel import draw_tokens

    settings = RowSettings(temperatures.to(DEVICE), greedy.to(DEVICE))
    found = draw_tokens(logits.to(DEVICE), settings, numbers.to(DEVICE))
    return found.tokens_B.cpu(), found.logprobs_B.cpu()


@WITH_TRITON
@pytest.mark.parametrize("vocabulary", [5, BLOCK, 4096, 9001])
def test_the_kernels_draw_what_torch_draws(vocabulary: int):
    draw = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(24, vocabulary, generator=draw)
    logits[3, 1:] = float("-inf")  # one token alone is possible
    numbers = torch.rand(24, generator=draw, dtype=torch.float64)
    numbers[:2] = torch.tensor([0.0, 1.0 - 2.0**-53])
    temperatures = torch.where(torch.arange(24) % 3 == 0, 1.0, 0.7)
    greedy = torch.arange(24) % 6 == 0
    expected = sample(logits, RowSettings(temperatures, greedy), numbers)
    tokens, logprobs = by_kernel(logits, temperatures, greedy, numbers)
    assert tokens.tolist() == expected.tokens_B.tolist()
    torch.testing.assert_close(logprobs, expected.logprobs_B, rtol=1e-5, atol=1e-5)


@WITH_TRITON
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of numpy, interpreted
def test_the_kernels_never_draw_an_impossible_token_and_tell_what_is_not_finite():
    logits = torch.full((4, 9001), float("-inf"))
    logits[:2, 4100], logits[:2, 8999] = 1.0, 1.0  # in the second chunk and in the third
    logits[2:] = 0.0
    logits[2, 8000], logits[3, 8000] = float("nan"), float("inf")
    numbers = torch.tensor([0.0, 1.0 - 2.0**-53, 0.5, 0.5], dtype=torch.float64)
    ones = torch.ones(4)
    tokens, logprobs = by_kernel(logits, ones, ones < 0, numbers)
    assert tokens[:2].tolist() == [4100, 8999]
    torch.testing.assert_close(logprobs[:2], torch.tensor([0.5, 0.5]).log())
    assert logprobs[2:].isnan().all()
    # Nothing but NaN in rows that take the likeliest: the next step looks their tokens up.
    tokens, logprobs = by_kernel(torch.full((4, 9001), float("nan")), ones, ones > 0, numbers)
    assert ((tokens >= 0) & (tokens < 9001)).all() and logprobs.isnan().all()
