"""`stop` over HTTP: the text is cut, the tokens are not."""

from collections.abc import Iterator

import openai
import pytest
from transformers import PreTrainedTokenizerFast

from shared_schemas.chat import ROLLOUT_HEADER
from tests.trainer_backend.inference.chains import chain_model
from tests.trainer_backend.inference.served import MESSAGES, MODEL, Served, serving
from trainer_backend.inference.rendering import ChatRenderer

ANSWER = " do sleep€ noop move_left"


@pytest.fixture(scope="module")
def chain(tokenizer: PreTrainedTokenizerFast) -> Iterator[Served]:
    model = chain_model(tokenizer, "<|assistant|>", *ANSWER.replace(" ", "\0 ").split("\0")[1:], "<|end|>")
    with serving(model, tokenizer) as served:
        yield served


def ask(served: Served, **changes: object) -> openai.types.chat.chat_completion.Choice:
    request = {"model": MODEL, "messages": MESSAGES, "temperature": 0, **changes}
    (choice,) = served.client.chat.completions.create(**request).choices
    return choice


@pytest.mark.parametrize(
    ("stop", "text", "sampled"),
    [
        (" sleep", " do", " do sleep"),
        ("leep", " do s", " do sleep"),
        ("o sl", " d", " do sleep"),  # begins in one token and ends in the next
        (["never", " noop", "€"], " do sleep", " do sleep€"),  # the character is three tokens
        ("p€ n", " do slee", " do sleep€ noop"),
        (" do", "", " do"),
        ("<|end|>", ANSWER, f"{ANSWER}<|end|>"),
    ],
)
def test_the_text_ends_before_the_stop_string_and_sampling_with_the_token_that_completes_it(
    chain: Served, tokenizer: PreTrainedTokenizerFast, stop: object, text: str, sampled: str
):
    choice = ask(chain, stop=stop, logprobs=True)
    assert (choice.message.content, choice.finish_reason, choice.sampling_finish_reason) == (
        text, "stop", "stop",
    )  # fmt: skip
    assert ChatRenderer(tokenizer).decode(choice.token_ids) == sampled
    assert len(choice.token_ids) == len(choice.token_logprobs) == len(choice.logprobs.content)


def test_a_stop_string_that_never_comes_changes_nothing(chain: Served):
    assert ask(chain, stop="never", max_tokens=2).finish_reason == "length"
    assert ask(chain, stop=["never", "nie"]).message.content == ANSWER


def test_a_stop_string_with_the_last_token_allowed_is_a_stop(chain: Served):
    choice = ask(chain, stop=" sleep", max_tokens=2)
    assert (choice.finish_reason, len(choice.token_ids)) == ("stop", 2)


def test_a_rollout_goes_on_from_what_was_sampled_and_not_from_what_was_cut(
    chain: Served, tokenizer: PreTrainedTokenizerFast
):
    header, renderer = {ROLLOUT_HEADER: "r"}, ChatRenderer(tokenizer)
    first = ask(chain, stop=" sleep", extra_headers=header)
    assert (first.message.content, first.raw_text) == (" do", " do sleep")
    answered = [*MESSAGES, {"role": "assistant", "content": " do"}, {"role": "user", "content": "tree 3"}]
    body = chain.client.chat.completions.create(
        model=MODEL, messages=answered, temperature=0, extra_headers=header,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    prompt = renderer.decode(body.prompt_token_ids)
    assert " do sleep" in prompt and renderer.prompt_text(MESSAGES, []) + " do sleep" in prompt


def test_each_choice_stops_for_itself(chain: Served):
    reply = chain.client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, n=3, stop=[" noop"]
    )
    assert [choice.message.content for choice in reply.choices] == [" do sleep€"] * 3
