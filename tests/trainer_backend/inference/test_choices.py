"""`n`, `seed`, `logprobs`, `usage`: what the official `openai` client asks for beside one answer."""

import math
from collections.abc import Iterator

import openai
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from shared_schemas.chat import ROLLOUT_HEADER
from tests.trainer_backend.inference.served import MESSAGES, MODEL, Served, serving
from trainer_backend.models import build_preset

LONG = [{"role": "user", "content": "wood stone tree 1 2 3 " * 20}]


@pytest.fixture(scope="module")
def free(tokenizer: PreTrainedTokenizerFast) -> Iterator[Served]:
    """A model that was never trained: it says anything, and never the same for two seeds."""
    with serving(build_preset("tiny-0.3m", tokenizer, seed=1), tokenizer) as served:
        yield served


def ask(served: Served, **changes: object) -> openai.types.chat.ChatCompletion:
    request = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, **changes}
    return served.client.chat.completions.create(**request)


def test_n_choices_are_n_different_samples_and_the_first_is_that_of_the_seed_alone(free: Served):
    several, alone = ask(free, n=5, seed=3), ask(free, seed=3)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3, 4]
    assert len({tuple(choice.token_ids) for choice in several.choices}) == 5
    assert several.choices[0].token_ids == alone.choices[0].token_ids


def test_usage_tells_how_much_of_the_prompt_was_known(free: Served):
    first, second = (ask(free, messages=LONG, n=3, max_tokens=3).usage for _ in range(2))
    assert first.prompt_tokens_details.cached_tokens == 0
    # Each of them has one token fewer cached than its prompt has: the last one is fed to sample.
    assert second.prompt_tokens_details.cached_tokens == second.prompt_tokens - 1 > 96


def test_a_rollout_has_one_answer(free: Served):
    with pytest.raises(openai.BadRequestError, match="a rollout goes on from one answer") as caught:
        ask(free, n=2, extra_headers={ROLLOUT_HEADER: "r"})
    assert caught.value.param == "n"


def test_the_likeliest_tokens_are_told_in_order_and_hold_the_sampled_one_where_it_is_among_them(free: Served):
    (choice,) = ask(free, logprobs=True, top_logprobs=20, seed=2).choices
    for entry, logprob in zip(choice.logprobs.content, choice.token_logprobs, strict=True):
        tops = [top.logprob for top in entry.top_logprobs]
        assert len(tops) == 20 and tops == sorted(tops, reverse=True)
        assert sum(map(math.exp, tops)) < 1.0
        assert entry.logprob == logprob
        assert entry.logprob in tops or entry.logprob < tops[-1]


def test_the_likeliest_token_is_the_greedy_one(free: Served):
    (choice,) = ask(free, logprobs=True, top_logprobs=1, temperature=0).choices
    assert [entry.top_logprobs[0].logprob for entry in choice.logprobs.content] == choice.token_logprobs
    assert [entry.top_logprobs[0].token for entry in choice.logprobs.content] == [
        entry.token for entry in choice.logprobs.content
    ]


def test_logprobs_without_tops_and_none_at_all(free: Served):
    (with_logprobs,) = ask(free, logprobs=True).choices
    assert all(entry.top_logprobs == [] for entry in with_logprobs.logprobs.content)
    assert ask(free, logprobs=False, n=1).choices[0].logprobs is None


def test_all_choices_have_log_probs_of_their_own_tokens(free: Served, model: PreTrainedModel):
    body = ask(free, messages=LONG, n=4, max_tokens=20, seed=5, extra_body={"return_token_ids": True})
    for choice in body.choices:
        ids = [*body.prompt_token_ids, *choice.token_ids]
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, len(body.prompt_token_ids) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(choice.token_ids)[:, None])[:, 0]
        assert choice.token_logprobs == pytest.approx(expected.tolist(), abs=1e-4)
