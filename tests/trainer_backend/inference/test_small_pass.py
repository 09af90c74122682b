"""A small decoder's pass by one call computes what the decoder computes, and draws what the sampler draws."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.trainer_backend.inference.test_decoder import (
    MODELS,
    assert_near,
    built_kernels,
    by_transformers,
    draw_ids,
    make_model,
)
from trainer_backend.inference import small_pass as small
from trainer_backend.inference.cache import SlotCache
from trainer_backend.inference.decoder import Decoder
from trainer_backend.inference.sampler import RowSettings, sample
from trainer_backend.models.folder import is_out_of_memory

# Adapters are products of their own, and a decoder of other types has no such pass.
COMPUTED = sorted(name for name in MODELS if "adapters" not in name)


def make_pass(model):
    kernels = built_kernels()
    cache = SlotCache(slots=8, max_len=256, shares=True)
    passes = small.small_pass(Decoder(model, max_len=256, cpu=kernels), cache, kernels)
    assert passes is not None
    return passes, cache


def prefill(passes, first_row, starts, rows):
    ids_T = np.array([token for row in rows for token in row])
    counts_B = np.array([len(row) for row in rows])
    passes.prefill(ids_T, first_row=first_row, starts_B=np.array(starts), counts_B=counts_B)


@pytest.mark.parametrize(("name", "threads"), [*product(COMPUTED, [1]), ("qwen3", 3)])
@torch.inference_mode()
def test_rows_of_mixed_lengths_and_those_behind_a_trunk_equal_transformers(name, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    model = make_model(name)
    passes, cache = make_pass(model)
    rows = [draw_ids(150, seed=1), draw_ids(7, seed=2), draw_ids(90, seed=3)]
    prefill(passes, 0, [0, 0, 0], [row[:-1] for row in rows])
    # A fourth row begins as the first one does: both refer to a trunk of 64 tokens from then on.
    rows.append([*rows[0][:70], *draw_ids(20, seed=4)])
    cache.share_row(0, 3, rows[3][:70], room=100)
    assert len(cache.trunks[0]) == len(cache.trunks[3]) == 64
    prefill(passes, 3, [70], [rows[3][70:-1]])
    for _ in range(2):  # two tokens of each row
        last, cached = np.array([row[-1] for row in rows]), np.array([len(row) - 1 for row in rows])
        logits_BV = torch.from_numpy(passes.logits(last, cached))
        for found, row in zip(logits_BV, rows, strict=True):
            assert_near(found, by_transformers(model, row)[-1])
        for row, token in zip(rows, logits_BV.argmax(-1).tolist(), strict=True):
            row.append(token)


@torch.inference_mode()
def test_tokens_and_log_probs_are_those_of_the_sampler():
    passes, _ = make_pass(make_model("llama"))
    ids, cached = np.array(draw_ids(8)), np.zeros(8, np.int64)
    temperatures_B = np.array([1.0, 1.0, 0.0, 0.7, 1.3, 2.0, 0.0, 0.05])
    uniforms = np.random.default_rng(0).random((50, 8))
    uniforms[0] = 0.0
    settings = RowSettings(
        torch.tensor(np.where(temperatures_B == 0.0, 1.0, temperatures_B)).float(),
        torch.tensor(temperatures_B == 0.0),
    )
    for uniforms_B in uniforms:
        logits_BV = torch.from_numpy(passes.logits(ids, cached))
        expected = sample(logits_BV, settings, torch.from_numpy(uniforms_B))
        tokens_B, logprobs_B = passes.step(ids, cached, temperatures_B, uniforms_B)
        assert tokens_B.tolist() == expected.tokens_B.tolist()
        np.testing.assert_allclose(logprobs_B, expected.logprobs_B.numpy(), atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_no_token_of_probability_0_is_drawn():
    model = make_model("llama")
    model.lm_head.weight.data[100:] = 0.0
    model.lm_head.weight.data[:100] = model.model.norm.weight.data.sign() * 1e3  # the last 31 never follow
    passes, _ = make_pass(model)
    for token in range(131):
        (last,), (logprob,) = passes.step(
            np.array([token]), np.array([0]), np.ones(1), np.array([1.0 - 2.0**-53])
        )
        assert np.isfinite(logprob) and logprob > -88.0, last


@torch.inference_mode()
def test_broken_weights_give_log_probs_that_are_no_numbers():
    model = make_model("llama")
    model.model.norm.weight.data[3] = torch.nan
    passes, _ = make_pass(model)
    for temperature in (0.0, 1.0):
        _, (logprob,) = passes.step(np.array([5]), np.array([0]), np.array([temperature]), np.array([0.5]))
        assert np.isnan(logprob)


@torch.inference_mode()
def test_a_pass_without_memory_is_a_shortage_that_the_engine_knows(monkeypatch):
    passes, _ = make_pass(make_model("llama"))
    library = SimpleNamespace(small_pass=lambda *_: 0)
    monkeypatch.setattr(passes._kernels, "_library", library)
    with pytest.raises(RuntimeError) as shortage:
        passes.logits(np.array([5]), np.array([0]))
    assert is_out_of_memory(shortage.value)


def test_long_prompts_are_left_to_torch():
    passes, _ = make_pass(make_model("llama"))  # 4 heads of 16
    for start, count, pays in ((0, 559, True), (0, 560, False), (3000, 100, True), (3100, 100, False)):
        assert passes.pays(np.array([0, start]), np.array([1, count])) == pays


def test_a_model_that_is_large_or_adapted_is_computed_otherwise(monkeypatch):
    kernels, cache = built_kernels(), SlotCache(slots=8, max_len=256)
    adapted = Decoder(make_model("qwen3, adapters"), max_len=256, cpu=kernels)
    plain = Decoder(make_model("qwen3"), max_len=256, cpu=kernels)
    assert small.small_pass(adapted, cache, kernels) is None
    assert small.small_pass(plain, cache, None) is None
    with monkeypatch.context() as patch:
        patch.setattr(small, "_MOST_QUERIES", 1)
        assert small.small_pass(plain, cache, kernels) is None  # two queries for each key
    monkeypatch.setattr(small, "MOST_WEIGHTS", 1000)
    assert small.small_pass(plain, cache, kernels) is None
