"""What the official `openai` client asks for with an answer, and keys of ours."""

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from shared_schemas.chat import ROLLOUT_HEADER
from shared_schemas.trajectory import Sampling
from tests.trainer_backend.inference.chains import chain_model
from tests.trainer_backend.inference.naive import logprobs_under, naive_generation
from tests.trainer_backend.inference.served import MESSAGES, MODEL, Served, serving
from trainer_backend.inference.rendering import ChatRenderer
from trainer_backend.models import build_preset

LONG = [{"role": "user", "content": "wood stone tree 1 2 3 " * 20}]


@pytest.fixture(scope="module")
def free(tokenizer: PreTrainedTokenizerFast) -> Iterator[Served]:
    """A model that was never trained: it says anything, and never the same for two seeds."""
    with serving(build_preset("tiny-0.3m", tokenizer, seed=1), tokenizer, stop_ids=()) as served:
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
    replies = [ask(free, messages=LONG, n=3, max_tokens=3) for _ in range(2)]
    first, second = (reply.usage for reply in replies)
    assert first.completion_tokens == sum(len(choice.token_ids) for choice in replies[0].choices)
    assert first.total_tokens == first.prompt_tokens + first.completion_tokens
    assert first.prompt_tokens_details.cached_tokens == 0, "the others copied the prompt of the first"
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
    for entry in choice.logprobs.content:
        (top,) = entry.top_logprobs
        assert (top.token, top.logprob) == (entry.token, entry.logprob)


def test_all_choices_have_log_probs_of_their_own_tokens(free: Served, model: PreTrainedModel):
    body = ask(free, messages=LONG, n=4, max_tokens=20, seed=5, extra_body={"return_token_ids": True})
    for choice in body.choices:
        expected = logprobs_under(model, body.prompt_token_ids, choice.token_ids)
        assert choice.token_logprobs == pytest.approx(expected, abs=1e-4)


# Our own keys. `processed_logprobs` is compared with a softmax by hand over the tokens that truncation keeps,
# `common_draws` with single requests.

TRUNCATED = {"top_k": 20, "top_p": 0.8, "temperature": 0.7}


def ask_for(served: Served, **keys: Any) -> tuple[openai.types.chat.chat_completion.Choice, list[int]]:
    """The choice and the prompt's ids."""
    reply = ask(served, seed=5, max_tokens=12, extra_body={"return_token_ids": True, **keys})
    return reply.choices[0], reply.prompt_token_ids


def kept_logprobs(logits: torch.Tensor, *, top_k: int, top_p: float, temperature: float) -> torch.Tensor:
    """[V] log-probs over the top_k likeliest, then over the fewest of them that hold top_p of that mass."""
    probs = (logits.double() / temperature).softmax(dim=-1)
    order = probs.argsort(descending=True)[:top_k]
    shares = probs[order] / probs[order].sum()
    count = int((shares.cumsum(0) - shares < top_p).sum())
    result = torch.full_like(probs, -torch.inf)
    result[order[:count]] = (shares[:count] / shares[:count].sum()).log()
    return result


@torch.inference_mode()
def test_processed_log_probs_are_those_of_the_softmax_over_what_truncation_kept(
    free: Served, model: PreTrainedModel
):
    choice, prompt = ask_for(free, processed_logprobs=True, **TRUNCATED)
    ids = torch.tensor([[*prompt, *choice.token_ids]])
    rows = model(ids).logits[0, len(prompt) - 1 : -1]
    expected = [
        float(kept_logprobs(row, **TRUNCATED)[token])
        for row, token in zip(rows, choice.token_ids, strict=True)
    ]
    assert choice.token_logprobs == pytest.approx(expected, abs=1e-4)
    plain, _ = ask_for(free, **TRUNCATED)
    assert plain.token_ids == choice.token_ids, "only what is told differs, never what is drawn"
    lost = [a - b for a, b in zip(choice.token_logprobs, plain.token_logprobs, strict=True)]
    assert min(lost) > 0.01, "each token was likelier among those that were kept"


async def test_the_engine_counts_the_mass_that_truncation_lost_and_of_no_other_token(start_engine, model):
    engine, prompt = start_engine(), [10, 11, 12, 13]
    samplings = [TRUNCATED, {}, {"temperature": 0.0, "top_k": 3}]
    truncated, *_ = await asyncio.gather(
        *(
            engine.generate(prompt, Sampling(seed=3, max_tokens=12, **options), request_id=str(options))
            for options in samplings
        )
    )
    with torch.inference_mode():
        rows = model(torch.tensor([[*prompt, *truncated.token_ids]])).logits[0, len(prompt) - 1 : -1]
    probs = (rows.double() / TRUNCATED["temperature"]).softmax(dim=-1)
    kept = torch.stack([kept_logprobs(row, **TRUNCATED).isfinite() for row in rows])
    assert engine.counters.truncated_tokens == 12
    assert engine.counters.lost_mass == pytest.approx(float((probs * ~kept).sum()), abs=1e-4)
    assert engine.counters.lost_mass > 1.0


def test_without_truncation_processed_log_probs_are_the_plain_ones_to_the_last_bit(free: Served):
    both = [ask_for(free, processed_logprobs=flag)[0].token_logprobs for flag in (False, True)]
    assert both[0] == both[1]


@pytest.mark.parametrize("common", [False, True])
def test_common_draws_follow_from_the_seed_and_not_from_the_prompt(free, model, common):
    choice, prompt = ask_for(free, common_draws=common)
    sampling = Sampling(seed=5, max_tokens=12)
    assert choice.token_ids == naive_generation(model, prompt, sampling, common_draws=common)[0]
    text = free.client.completions.create(
        model=MODEL, prompt=[7, 8, 9], seed=5, max_tokens=12,
        extra_body={"return_token_ids": True, "common_draws": common},
    )  # fmt: skip
    expected, _ = naive_generation(model, [7, 8, 9], sampling, common_draws=common)
    assert text.choices[0].token_ids == expected


ANSWER = " do sleep€ noop move_left"


@pytest.fixture(scope="module")
def chain(tokenizer: PreTrainedTokenizerFast) -> Iterator[Served]:
    model = chain_model(tokenizer, "<|assistant|>", *ANSWER.replace(" ", "\0 ").split("\0")[1:], "<|end|>")
    with serving(model, tokenizer) as served:
        yield served


def ask_greedily(served: Served, **changes: object) -> openai.types.chat.chat_completion.Choice:
    (choice,) = ask(served, temperature=0, **{"max_tokens": 64, **changes}).choices
    return choice


@pytest.mark.parametrize(
    ("stop", "text", "sampled"),
    [
        (" sleep", " do", " do sleep"),
        ("o sl", " d", " do sleep"),  # begins in one token and ends in the next
        (["never", " noop", "€"], " do sleep", " do sleep€"),  # the character is three tokens
        ("<|end|>", ANSWER, f"{ANSWER}<|end|>"),
        (["never", "nie"], ANSWER, f"{ANSWER}<|end|>"),
    ],
)
def test_the_text_ends_before_the_stop_string_and_sampling_with_the_token_that_completes_it(
    chain: Served, tokenizer: PreTrainedTokenizerFast, stop: object, text: str, sampled: str
):
    choice = ask_greedily(chain, stop=stop, logprobs=True)
    assert (choice.message.content, choice.finish_reason, choice.sampling_finish_reason) == (
        text, "stop", "stop",
    )  # fmt: skip
    assert ChatRenderer(tokenizer).decode(choice.token_ids) == sampled
    assert len(choice.token_ids) == len(choice.token_logprobs) == len(choice.logprobs.content)
    told = [byte for entry in choice.logprobs.content for byte in entry.bytes]
    assert bytes(told).decode() == sampled, "a part of a character has its byte"
    assert all(entry.top_logprobs == [] for entry in choice.logprobs.content)


def test_a_length_ends_an_answer_before_a_stop_string_that_comes_later_or_never(chain: Served):
    choice = ask_greedily(chain, stop="never", max_tokens=2)
    assert (choice.message.content, choice.finish_reason) == (" do sleep", "length")
    choice = ask_greedily(chain, stop=" sleep", max_tokens=2)
    assert (choice.message.content, choice.finish_reason) == (" do", "stop")


def test_a_rollout_goes_on_from_what_was_sampled_and_not_from_what_was_cut(chain, tokenizer):
    header, renderer = {ROLLOUT_HEADER: "r"}, ChatRenderer(tokenizer)
    first = ask_greedily(chain, stop=" sleep", extra_headers=header)
    assert (first.message.content, first.raw_text) == (" do", " do sleep")
    answered = [*MESSAGES, {"role": "assistant", "content": " do"}, {"role": "user", "content": "tree 3"}]
    body = ask(chain, messages=answered, extra_headers=header, extra_body={"return_token_ids": True})
    prompt = renderer.decode(body.prompt_token_ids)
    assert " do sleep" in prompt and renderer.prompt_text(MESSAGES, []) + " do sleep" in prompt


def test_each_choice_stops_for_itself(chain: Served):
    reply = ask(chain, temperature=0, n=3, stop=[" noop"])
    assert [choice.message.content for choice in reply.choices] == [" do sleep€"] * 3
