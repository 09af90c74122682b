"""Rows that refer to one trunk sample as rows do that hold all their tokens."""

import random
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from transformers import PreTrainedTokenizerFast

from shared_schemas.trajectory import Sampling
from tests.trainer_backend.inference.test_prefix_reuse import make_prompt
from trainer_backend.inference.batch import RunningBatch, first_of_siblings
from trainer_backend.inference.keys import EngineKeys
from trainer_backend.inference.request import Request
from trainer_backend.inference.trunks import most_rows
from trainer_backend.learner.attention import ByLength
from trainer_backend.models import build_preset, part_attention


class Side:
    """A batch, with the requests that join it."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, shares: bool, kept: int = 3) -> None:
        self.model = build_preset("tiny-0.3m", tokenizer, seed=1)
        self.batch = RunningBatch(self.model, slots=6, max_len=512, kept_prefixes=kept)
        self.batch.cache.shares = shares
        self.most_that_share = 0

    @torch.inference_mode()
    def join(self, prompts: list[list[int]], seed: int) -> None:
        none: Any = None
        requests = [
            Request(str(n), prompt, Sampling(seed=seed + n, max_tokens=100), none, none)
            for n, prompt in enumerate(prompts)
        ]
        for wave in first_of_siblings(requests, self.batch.prefixes):
            self.batch.join(wave)

    @torch.inference_mode()
    def step(self) -> tuple[list[int], list[float]]:
        self.most_that_share = max(self.most_that_share, len(self.batch.cache.trunks))
        sampled = self.batch.step()
        for request, token, logprob in zip(sampled.requests, sampled.ids, sampled.logprobs, strict=True):
            request.take(token, logprob)
        return sampled.ids, sampled.logprobs

    @torch.inference_mode()
    def drop(self, row: int) -> None:
        self.batch.drop(row)

    @torch.inference_mode()
    def swap(self, factor: float) -> None:
        for weight in self.model.parameters():
            weight.mul_(factor)
        self.batch.take_weights()


def drawn_prompts(draw: random.Random, most: int) -> list[list[int]]:
    """Of a small tree: their common fronts are short, long, of a few lengths, and none."""
    return [
        [
            *make_prompt(300, seed=draw.randrange(2))[: draw.choice([97, 130, 133, 290])],
            *make_prompt(tail, seed=tail),
        ]
        for tail in draw.choices([1, 5, 40, 41], k=draw.randint(1, most))
    ]


@pytest.mark.parametrize("seed", range(3))
def test_logprobs_do_not_change_as_rows_join_and_leave_and_weights_and_prefixes_go(tokenizer, seed):
    draw = random.Random(seed)
    plain, shared = sides = [Side(tokenizer, shares=shares) for shares in (False, True)]
    for turn in range(25):
        free = plain.batch.free_slots
        prompts = drawn_prompts(draw, free) if free else []
        leaving = draw.randrange(6)
        swaps, evicts = draw.random() < 0.1, draw.random() < 0.2
        for side in sides:
            side.join(prompts, seed=100 * turn)
            if swaps:
                side.swap(1.02)
            if evicts:
                side.batch.prefixes.drop_oldest()
        for _ in range(2):
            (tokens, logprobs), (same, alike) = (side.step() for side in sides)
            assert same == tokens
            assert alike == pytest.approx(logprobs, abs=1e-5)
        for side in sides:
            if leaving < len(side.batch.rows):
                side.drop(leaving)
    assert plain.most_that_share == 0
    assert shared.most_that_share >= 3


def test_siblings_refer_to_one_trunk_and_a_deterministic_engine_shares_nothing(tokenizer):
    keys, siblings = EngineKeys(deterministic=True), [[*make_prompt(140, seed=0), n] for n in range(4)]
    side, alone = Side(tokenizer, shares=True), Side(tokenizer, shares=True, kept=keys.prefix_slots)
    side.join(siblings, seed=0)
    alone.join(siblings, seed=0)
    trunks = side.batch.cache.trunks
    assert sorted(trunks) == [0, 1, 2, 3] and len(set(trunks.values())) == 1
    assert len(trunks[0]) == 128, "whole blocks of the 140 tokens"
    assert alone.batch.cache.trunks == {} and keys.slots == 1


@torch.inference_mode()
def test_all_trunks_have_as_many_tokens_as_the_memory_plan_counts_and_other_rows_hold_theirs(tokenizer):
    sides = [Side(tokenizer, shares=shares) for shares in (False, True)]
    shared = sides[1]
    # Of 6 slots two rows of 512 tokens: two trunks of 384 fit, three do not.
    assert most_rows(6) == 2
    for side in sides:
        side.join([[*make_prompt(400, seed=n // 2), n] for n in range(6)], seed=0)
    trunks = shared.batch.cache.trunks
    assert [len(trunk) for trunk in set(trunks.values())] == [384, 384] and len(trunks) == 4
    (tokens, logprobs), (same, alike) = (side.step() for side in sides)
    assert same == tokens and alike == pytest.approx(logprobs, abs=1e-5)
    # One that no new row may refer to lives on in its rows, and counts until they end.
    shared.batch.cache.forget_trunks()
    known = shared.batch.cache._known
    assert not known.has_room(384) and known.has_room(256)
    trunks.clear()
    assert known.has_room(1024) and not known.has_room(1025)


@pytest.mark.parametrize("operator", [None, torch.ops.aten.mm])
def test_a_torch_without_the_private_operators_shares_nothing_and_says_so(tokenizer, monkeypatch, operator):
    monkeypatch.setattr(part_attention, "_BACKWARD", operator)
    part_attention.why_no_parts.cache_clear()
    try:
        with capture_logs() as lines:
            batch = RunningBatch(build_preset("tiny-0.3m", tokenizer, seed=1), slots=6, max_len=512)
        assert not batch.cache.shares and not ByLength().takes_tries
    finally:
        part_attention.why_no_parts.cache_clear()
    assert [line["event"] for line in lines] == ["engine_shares_no_trunks"]
    assert "_flash_attention_for_cpu_backward(grad_out, query" in lines[0]["reason"]
