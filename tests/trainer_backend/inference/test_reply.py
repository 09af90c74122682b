"""The body of a chat completion, without an engine."""

import pytest

from trainer_backend.inference.protocol import Generation
from trainer_backend.inference.reply import Answer, completion_body


@pytest.mark.parametrize("raw_text", [None, "", "<|call|> do sleep"])
def test_the_raw_text_of_a_rollout_stands_in_the_choice_and_is_left_out_for_others(raw_text):
    generation = Generation(token_ids=(5,), logprobs=(-0.5,), finish_reason="stop", versions=((0, 1),))
    answer = Answer("c", "job/actor", 0, [1, 2], generation, {"role": "assistant"}, raw_text)
    (choice,) = completion_body(answer, prompt_ids_reused=None, logprobs_content=None)["choices"]
    assert choice.get("raw_text") == raw_text
    assert ("raw_text" in choice) == (raw_text is not None)
