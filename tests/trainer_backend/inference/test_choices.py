"""`n`, `seed`, `logprobs`, `usage`, `stop`: what the official `openai` client asks for with an answer."""

import math
from collections.abc import Iterator

import openai
import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from shared_schemas.chat import ROLLOUT_HEADER
from tests.trainer_backend.inference.chains import chain_model
from tests.trainer_backend.inference.naive import logprobs_under
from tests.trainer_backend.inference.served import MESSAGES, MODEL, Served, serving
from trainer_backend.inference.rendering import ChatRenderer
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
        expected = logprobs_under(model, body.prompt_token_ids, choice.token_ids)
        assert choice.token_logprobs == pytest.approx(expected, abs=1e-4)


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


def test_a_stop_string_that_never_comes_changes_nothing(chain: Served):
    assert ask_greedily(chain, stop="never", max_tokens=2).finish_reason == "length"
    assert ask_greedily(chain, stop=["never", "nie"]).message.content == ANSWER


def test_a_stop_string_with_the_last_token_allowed_is_a_stop(chain: Served):
    choice = ask_greedily(chain, stop=" sleep", max_tokens=2)
    assert (choice.finish_reason, len(choice.token_ids)) == ("stop", 2)


def test_a_rollout_goes_on_from_what_was_sampled_and_not_from_what_was_cut(
    chain: Served, tokenizer: PreTrainedTokenizerFast
):
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
