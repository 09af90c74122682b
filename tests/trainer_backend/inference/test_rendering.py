import copy
import random
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from trainer_backend.core.prompt_lengths import LongPrompt
from trainer_backend.errors import BadChatRequest
from trainer_backend.inference.rendering import ChatRenderer
from trainer_backend.models.folder import load_tokenizer
from trainer_backend.models.tokenizer import CHAT_TEMPLATE_KWARGS_KEY
from trainer_backend.tool_formats.turnwise import parse_turnwise

USER = {"role": "user", "content": "wood 2 tree"}


def called(arguments: object) -> dict[str, object]:
    function = {"name": "interact_many", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }


def test_a_prompt_costs_one_token_of_template_on_each_side(tokenizer: PreTrainedTokenizerFast):
    renderer = ChatRenderer(tokenizer)
    text = renderer.prompt_text([USER], [])
    assert text == "<|user|>wood 2 tree<|assistant|>"
    assert renderer.decode(renderer.encode(text)) == text
    assert len(renderer.encode(text)) == len(renderer.encode("wood 2 tree")) + 2


def test_a_call_is_written_as_the_parser_reads_it(tokenizer, tools):
    renderer = ChatRenderer(tokenizer)
    message = called('{"actions": ["do", "sleep"]}')
    (whole,) = renderer.prompt_texts([[USER, message]], tools, add_generation_prompt=False)
    answer = whole.removeprefix(renderer.prompt_text([USER], tools))
    assert answer == "<|call|> do sleep<|end|>"
    assert len(renderer.encode(answer)) == 4, "an action is one token, a call costs two more"
    (call,) = parse_turnwise(answer.removesuffix("<|end|>"), tools).tool_calls
    assert call.arguments == '{"actions": ["do", "sleep"]}'


GENERAL = 'interact_many {"way": ["up"]}'


def taking(**schema: object) -> dict[str, object]:
    return {"parameters": {"properties": {"way": schema}}}


@pytest.mark.parametrize(
    ("function", "arguments", "written"),
    [
        (taking(type="string", enum=["up", "turn left"]), '{"way": "turn left"}', "turn left"),
        (taking(type="string", enum=["up"]), '{"way": ["up"]}', GENERAL),
        (taking(type="string"), '{"way": "up"}', 'interact_many {"way": "up"}'),
        (taking(type="array", items={"enum": ["up"]}), '{"way": "up"}', 'interact_many {"way": "up"}'),
        (taking(type="array"), '{"way": ["up"]}', GENERAL),
        ({"parameters": {"type": "object", "properties": {}}}, '{"way": ["up"]}', GENERAL),
        ({"parameters": None}, '{"way": ["up"]}', GENERAL),
        ({}, '{"way": ["up"]}', GENERAL),
        (None, '{"way": ["up"]}', GENERAL),  # no tools at all
    ],
)
def test_a_single_item_stands_alone_and_whatever_else_keeps_its_json(tokenizer, function, arguments, written):
    function = None if function is None else {"name": "interact_many", **function}
    tools = [] if function is None else [{"type": "function", "function": function}]
    (text,) = ChatRenderer(tokenizer).prompt_texts([[called(arguments)]], tools, add_generation_prompt=False)
    assert text == f"<|assistant|><|call|> {written}<|end|>"
    (call,) = parse_turnwise(f"<|call|> {written}", tools).tool_calls
    assert (call.name, call.arguments) == ("interact_many", arguments)


def test_arguments_that_are_no_json_object_stay_as_they_were_written(tokenizer: PreTrainedTokenizerFast):
    renderer = ChatRenderer(tokenizer)
    for raw in ('{"actions": ', "[1]", "[" * 100_000):
        assert raw in renderer.prompt_text([called(raw)], [])


def test_content_may_be_null_or_a_list_of_texts(tokenizer: PreTrainedTokenizerFast):
    renderer = ChatRenderer(tokenizer)
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert renderer.prompt_text([parts], []) == "<|user|>ab<|assistant|>"
    assert renderer.prompt_text([{"role": "user", "content": None}], []) == "<|user|><|assistant|>"


def test_a_row_with_a_message_of_another_form_is_a_bad_request_too(tokenizer: PreTrainedTokenizerFast):
    for message in ({"role": "user", "content": 3}, {"role": "assistant", "tool_calls": ["x"]}):
        with pytest.raises(BadChatRequest):
            ChatRenderer(tokenizer).prompt_text([message], [])


def test_settings_of_a_template_are_the_models_and_only_those_may_be_asked_for(tokenizer):
    own = copy.deepcopy(tokenizer)
    own.init_kwargs[CHAT_TEMPLATE_KWARGS_KEY] = {"enable_thinking": False}
    renderer = ChatRenderer(own)
    renderer.refuse_other_settings({})
    renderer.refuse_other_settings({"enable_thinking": False})
    for other in ({"enable_thinking": True}, {"enable_thinking": False, "thinking_budget": 5}):
        with pytest.raises(BadChatRequest, match=r"is told, which is \{'ena"):
            renderer.refuse_other_settings(other)


@pytest.mark.parametrize("family", ["preset", "qwen3", "mistral"])
def test_a_text_is_never_said_to_have_more_tokens_than_it_has(tokenizer, model_folders, family):
    renderer = ChatRenderer(tokenizer if family == "preset" else load_tokenizer(model_folders[family]))
    draw = random.Random(0)
    pieces = ["wood ", " ", "\n", "a", "é", "\N{GRINNING FACE}", "<|end|>", "12345", "place_table", "-!?"]
    for _ in range(100):
        text = "".join(draw.choice(pieces) * draw.randint(1, 40) for _ in range(draw.randint(1, 30)))
        tokens = len(renderer.encode(text))
        assert renderer.surely_more_than(tokens, text) is None
        for most in (1, tokens // 20 + 1, tokens // 3 + 1):
            told = renderer.surely_more_than(most, text)
            assert told is None or most < told <= tokens
    assert renderer.surely_more_than(10, "wood 2 tree " * 1000) is not None


def test_the_prompts_that_are_too_long_are_found_at_the_very_token_and_unreadable_ones_passed_over(tokenizer):
    renderer = ChatRenderer(tokenizer)
    texts = ["wood", "wood 2 tree" * 9, "wood " * 90_000]
    prompts: list[list[dict[str, Any]]] = [[{"role": "user", "content": text}] for text in texts]
    _, count, most_of_all = (len(renderer.encode(renderer.prompt_text(prompt, []))) for prompt in prompts)
    for most in (count - 1, count):
        *exact, bound = renderer.find_long([prompts[0], [{"role": 7}], *prompts[1:]], most)
        assert exact == ([LongPrompt(2, count)] if most < count else [])
        assert (bound.place, bound.is_bound) == (3, True) and most < bound.tokens <= most_of_all
