"""A conversation goes on from the exact ids it had, and only where nothing of it was changed."""

import json

import pytest
from transformers import PreTrainedTokenizerFast

from trainer_backend.inference.conversations import Conversations, Prompt, Turn
from trainer_backend.inference.rendering import ChatRenderer
from trainer_backend.inference.reply import assistant_message
from trainer_backend.inference.tool_formats.hermes import parse_hermes

USER = {"role": "user", "content": "wood 2 tree"}
RESULT = {"role": "tool", "tool_call_id": "x", "content": "tree 3"}
# Odd spacing: a template that writes the call again would give other text.
RAW = 'go <tool_call>{"name":"f",  "arguments":{"x":1}}</tool_call>'

# The shape of Qwen's template, with its habit of dropping the reasoning of earlier turns.
TEMPLATE = """\
{%- for m in messages -%}
<|{{ m.role }}|>{{ (m.content.split('</think>')|last) }}
{%- for call in m.tool_calls or [] -%}
<tool_call>{{ {'name': call.function.name, 'arguments': call.function.arguments}|tojson }}</tool_call>
{%- endfor -%}
<|end|>{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""


@pytest.fixture
def renderer(tokenizer: PreTrainedTokenizerFast) -> ChatRenderer:
    own = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|end|>")
    own.chat_template = TEMPLATE
    return ChatRenderer(own)


def turn_after(prompt: Prompt, raw: str, renderer: ChatRenderer, *, stop: str = "<|end|>") -> Turn:
    # One id a byte: not how the tokenizer would write it, so re-tokenising would show.
    sampled = [renderer.encode(character)[0] for character in raw] + (renderer.encode(stop) if stop else [])
    message = assistant_message(parse_hermes(raw, []), prompt_ids=prompt.ids, token_ids=sampled)
    return Turn(prompt.text, [*prompt.ids, *sampled], 1, message, raw, stop)


def test_a_continued_conversation_keeps_the_sampled_ids_and_encodes_only_what_is_new(renderer: ChatRenderer):
    memory = Conversations(most=5)
    turn = turn_after(memory.prompt("r", [USER], [], renderer), RAW, renderer)
    memory.remember("r", turn)
    prompt = memory.prompt("r", [USER, dict(turn.message), RESULT], [], renderer)
    assert list(prompt.ids[: prompt.reused]) == list(turn.ids) and prompt.reused == len(turn.ids)
    new = renderer.decode(prompt.ids[prompt.reused :])
    assert new == "\n<|tool|>tree 3<|end|>\n<|assistant|>", "the sampled <|end|> is not written a second time"
    assert renderer.decode(prompt.ids) == prompt.text


def test_an_answer_that_was_cut_by_its_length_is_closed_by_the_template(renderer: ChatRenderer):
    memory = Conversations(most=5)
    turn = turn_after(memory.prompt("r", [USER], [], renderer), "wood", renderer, stop="")
    memory.remember("r", turn)
    prompt = memory.prompt("r", [USER, dict(turn.message), RESULT], [], renderer)
    assert renderer.decode(prompt.ids[prompt.reused :]).startswith("<|end|>\n<|tool|>")


def test_what_clients_add_to_a_message_does_not_break_the_conversation(renderer: ChatRenderer):
    memory = Conversations(most=5)
    turn = turn_after(memory.prompt("r", [USER], [], renderer), RAW, renderer)
    memory.remember("r", turn)
    sent_back = {**json.loads(json.dumps(turn.message)), "refusal": None, "annotations": []}
    assert memory.prompt("r", [USER, sent_back, RESULT], [], renderer).reused == len(turn.ids)


@pytest.mark.parametrize(
    "change",
    [
        lambda user, answer, result: [{**user, "content": "wood 3"}, answer, result],
        lambda user, answer, result: [user, {**answer, "content": "other"}, result],
        lambda user, answer, result: [user, {**answer, "tool_calls": None}, result],
        lambda user, answer, result: [user, result],
        lambda user, answer, result: [user],
        lambda user, answer, result: [answer],
    ],
)
def test_an_edited_conversation_is_rendered_anew(renderer: ChatRenderer, change):
    memory = Conversations(most=5)
    turn = turn_after(memory.prompt("r", [USER], [], renderer), RAW, renderer)
    memory.remember("r", turn)
    messages = change(USER, dict(turn.message), RESULT)
    prompt = memory.prompt("r", messages, [], renderer)
    assert prompt == Prompt(renderer.prompt_text(messages, []), renderer.encode(prompt.text), 0)


def test_reasoning_that_the_template_drops_breaks_the_prefix(renderer: ChatRenderer):
    memory = Conversations(most=5)
    turn = turn_after(memory.prompt("r", [USER], [], renderer), "hmm</think>wood", renderer)
    memory.remember("r", turn)
    prompt = memory.prompt("r", [USER, dict(turn.message), RESULT], [], renderer)
    assert prompt.reused == 0 and "hmm" not in prompt.text


def test_the_memory_is_bounded_and_forgets_the_least_recent_first(renderer: ChatRenderer):
    memory = Conversations(most=2)
    turn = turn_after(memory.prompt("a", [USER], [], renderer), RAW, renderer)
    for name in ("a", "b", "a", "c"):
        memory.remember(name, turn)
    longer = [USER, dict(turn.message), RESULT]
    assert [memory.prompt(name, longer, [], renderer).reused > 0 for name in "abc"] == [True, False, True]
