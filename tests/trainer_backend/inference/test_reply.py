"""The parts of a chat completion's body, without an engine."""

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from trainer_backend.inference.actor import Generation, SampledToken
from trainer_backend.inference.asgi import json_response
from trainer_backend.inference.rendering import ChatRenderer
from trainer_backend.inference.reply import (
    Choice,
    choice_body,
    logprob_entries,
    rollout_body,
    split_stop,
    usage_body,
)


def generation(count: int = 1, *, reused: int = 0, stop_string: str | None = None) -> Generation:
    return Generation(
        token_ids=(5,) * count, logprobs=(-0.5,) * count, finish_reason="stop", versions=((0, 1),),
        stop_string=stop_string, prompt_tokens_reused=reused,
    )  # fmt: skip


@pytest.mark.parametrize("raw_text", ["", "<|call|> do sleep"])
def test_the_raw_text_stands_in_the_choice_where_it_is_asked_for(raw_text: str):
    choice = Choice(0, generation(), {"role": "assistant"}, raw_text, "")
    assert rollout_body(choice, reused=0)["raw_text"] == raw_text
    assert "raw_text" not in choice_body(choice)


def test_usage_counts_the_prompt_once_and_the_tokens_of_all_choices():
    # Three choices of one prompt: the first found 64 tokens, the others copied its 99.
    generations = [generation(3, reused=64), generation(1, reused=99), generation(4, reused=99)]
    assert usage_body([1] * 100, generations) == {
        "prompt_tokens": 100, "completion_tokens": 8, "total_tokens": 108,
        "prompt_tokens_details": {"cached_tokens": 64},
    }  # fmt: skip


def test_a_stop_token_is_cut_off_the_text_and_a_stop_string_is_not(tokenizer: PreTrainedTokenizerFast):
    renderer = ChatRenderer(tokenizer)
    ids = tuple(renderer.encode("wood tree<|end|>"))
    by_token = Generation(ids, (0.0,) * len(ids), "stop", ((0, 0),))
    by_string = Generation(ids[:-1], (0.0,) * (len(ids) - 1), "stop", ((0, 0),), stop_string="tree")
    by_length = Generation(ids[:-1], (0.0,) * (len(ids) - 1), "length", ((0, 0),))
    assert split_stop(by_token, renderer) == ("wood tree", "<|end|>")
    assert split_stop(by_string, renderer) == split_stop(by_length, renderer) == ("wood tree", "")


def test_the_first_part_of_a_character_has_its_byte(tokenizer: PreTrainedTokenizerFast):
    renderer = ChatRenderer(tokenizer)
    first, *_ = renderer.encode("€")  # E2 82 AC, three tokens
    whole = renderer.encode("wood")[0]
    part, word = logprob_entries(
        [SampledToken(first, -1.0, ((whole, -0.5),)), SampledToken(whole, -2.0)], renderer
    )
    assert part["bytes"] == [0xE2] and part["top_logprobs"][0]["token"] == renderer.decode([whole])
    assert bytes(word["bytes"]).decode() == word["token"] and word["top_logprobs"] == []


@pytest.mark.parametrize("text", ["plain", "\u00e4\U0001f600", "half \ud83d"])
async def test_a_reply_holds_any_text_that_a_model_may_write(text: str):
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await json_response(send, {"text": text, "logprobs": (-0.5, 1e-9)})
    assert json.loads(sent[1]["body"]) == {"text": text, "logprobs": [-0.5, 1e-9]}
    assert dict(sent[0]["headers"])[b"content-length"] == b"%d" % len(sent[1]["body"])
