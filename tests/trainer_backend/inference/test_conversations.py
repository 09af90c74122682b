"""A conversation goes on from the exact ids it had, and only where nothing of it was changed."""

import json
from itertools import pairwise

import pytest
from transformers import PreTrainedTokenizerFast

from trainer_backend.inference.answers import CLOSE, OPEN, Answer, hash_message
from trainer_backend.inference.conversations import Conversations, Prompt, Turn
from trainer_backend.inference.drift import Drift
from trainer_backend.inference.rendering import ChatRenderer
from trainer_backend.inference.reply import assistant_message
from trainer_backend.tool_formats.tags import parse_hermes

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


def turn_after(
    prompt: Prompt, raw: str, renderer: ChatRenderer, *, stop: str = "<|end|>", index: int = 1
) -> Turn:
    # One id a byte: not how the tokenizer would write it, so re-tokenising would show.
    sampled = [renderer.encode(character)[0] for character in raw] + (renderer.encode(stop) if stop else [])
    message = assistant_message(parse_hermes(raw, []), prompt_ids=prompt.ids, token_ids=sampled)
    return Turn.of(prompt, Answer(index, hash_message(message), raw, stop), sampled, renderer)


def get_answer(turn: Turn) -> dict[str, object]:
    parsed = parse_hermes(turn.answers[-1].raw_text, [])
    return assistant_message(parsed, prompt_ids=turn.ids, token_ids=[])


def spoken(
    renderer: ChatRenderer, raws: list[str], *, stop: str = "<|end|>"
) -> tuple[Conversations, list[dict], list[Turn]]:
    """A conversation "r" of these answers, each followed by RESULT."""
    memory, messages, turns = Conversations(most=5), [USER], []
    for raw in raws:
        prompt = memory.prompt("r", messages, [], renderer)
        turns.append(turn_after(prompt, raw, renderer, stop=stop, index=len(messages)))
        memory.remember("r", turns[-1])
        messages += [get_answer(turns[-1]), RESULT]
    return memory, messages, turns


def test_a_continued_conversation_keeps_the_sampled_ids_and_encodes_only_what_is_new(renderer: ChatRenderer):
    memory, messages, (turn,) = spoken(renderer, [RAW])
    prompt = memory.prompt("r", messages, [], renderer)
    assert list(prompt.ids[: prompt.reused]) == list(turn.ids) and prompt.reused == len(turn.ids)
    new = renderer.decode(prompt.ids[prompt.reused :])
    assert new == "\n<|tool|>tree 3<|end|>\n<|assistant|>", "the sampled <|end|> is not written a second time"
    assert renderer.decode(prompt.ids) == prompt.text


def test_an_answer_that_was_cut_by_its_length_is_closed_by_the_template(renderer: ChatRenderer):
    memory, messages, _ = spoken(renderer, ["wood"], stop="")
    prompt = memory.prompt("r", messages, [], renderer)
    assert renderer.decode(prompt.ids[prompt.reused :]).startswith("<|end|>\n<|tool|>")


def test_what_clients_add_to_a_message_does_not_break_the_conversation(renderer: ChatRenderer):
    memory, messages, (turn,) = spoken(renderer, [RAW])
    messages[1] = {**json.loads(json.dumps(messages[1])), "refusal": None, "annotations": []}
    assert memory.prompt("r", messages, [], renderer).reused == len(turn.ids)


@pytest.mark.parametrize(
    ("change", "same_start"),
    [
        (lambda user, answer, result: [user, {**answer, "content": "other"}, result], True),
        (lambda user, answer, result: [user, {**answer, "tool_calls": None}, result], True),
        (lambda user, answer, result: [user, result], False),
        (lambda user, answer, result: [user], False),
        (lambda user, answer, result: [answer], False),
    ],
)
def test_what_was_edited_is_rendered_again_from_the_first_change_on(
    renderer: ChatRenderer, change, same_start: bool
):
    memory, messages, (turn,) = spoken(renderer, [RAW])
    messages = change(*messages)
    prompt = memory.prompt("r", messages, [], renderer)
    assert prompt.text == renderer.prompt_text(messages, []) and not prompt.extends
    assert renderer.decode(prompt.ids) == prompt.text
    assert prompt.reused == (turn.cuts[0][1] if same_start else 0)


def test_reasoning_that_the_template_drops_breaks_the_prefix(renderer: ChatRenderer):
    memory, messages, (turn,) = spoken(renderer, ["hmm</think>wood"])
    prompt = memory.prompt("r", messages, [], renderer)
    assert prompt.break_cause == "reasoning" and "hmm" not in prompt.text
    assert prompt.reused == turn.cuts[0][1], "the question before it is what it was"


def test_the_memory_is_bounded_and_forgets_the_least_recent_first(renderer: ChatRenderer):
    memory = Conversations(most=2)
    turn = turn_after(memory.prompt("a", [USER], [], renderer), RAW, renderer)
    for name in ("a", "b", "a", "c"):
        memory.remember(name, turn)
    longer = [USER, get_answer(turn), RESULT]
    assert [memory.prompt(name, longer, [], renderer).reused > 0 for name in "abc"] == [True, False, True]


def test_from_the_third_turn_on_earlier_answers_are_still_those_that_were_sampled(renderer: ChatRenderer):
    memory, messages, turns = spoken(renderer, [RAW, f"{RAW} ", f" {RAW}", RAW])
    prompt = memory.prompt("r", messages, [], renderer)
    assert prompt.extends and list(prompt.ids[: prompt.reused]) == list(turns[-1].ids)
    assert prompt.text.count(RAW) == 4
    for earlier, later in pairwise(turns):
        assert later.ids[: len(earlier.ids)] == earlier.ids


def test_behind_an_edit_the_conversation_goes_on_again_with_what_was_sampled(renderer: ChatRenderer):
    memory, messages, turns = spoken(renderer, [RAW, RAW, RAW])
    messages[2] = {**RESULT, "content": "[deleted]"}
    prompt = memory.prompt("r", messages, [], renderer)
    # Up to the end of the first answer all is as it was; what follows is another text, in which the second
    # and the third answer still stand as they were sampled.
    assert prompt.break_cause == "edited" and prompt.reused == len(turns[0].ids)
    assert prompt.text.count(RAW) == 3 and "[deleted]" in prompt.text
    turn = turn_after(prompt, RAW, renderer, index=len(messages))
    memory.remember("r", turn)
    assert memory.prompt("r", [*messages, get_answer(turn), RESULT], [], renderer).reused == len(turn.ids)


def test_an_edit_right_behind_an_answer_keeps_that_answer_as_sampled(renderer: ChatRenderer):
    memory, messages, _ = spoken(renderer, [RAW])
    messages[0] = {**USER, "content": "[deleted]"}
    prompt = memory.prompt("r", messages, [], renderer)
    assert prompt.reused == 0 and RAW in prompt.text


# The shape of GLM-4.7's template: prompts begin reasoning; an answer without any has the end mark alone.
BEGINS_REASONING = """\
{%- for m in messages -%}
<|{{ m.role }}|>
{%- if m.role == 'assistant' -%}
{%- if m.reasoning_content -%}<think>{{ m.reasoning_content }}</think>{%- else -%}</think>{%- endif -%}
{%- endif -%}
{{ (m.content.split('</think>')|last) }}
{%- for call in m.tool_calls or [] -%}
<tool_call>{{ {'name': call.function.name, 'arguments': call.function.arguments}|tojson }}</tool_call>
{%- endfor -%}
<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|><think>{%- endif -%}"""


@pytest.mark.parametrize("thought", ["", "hm", " hm\n"])
def test_an_answer_that_ends_the_reasoning_begun_in_the_prompt_is_continued(
    thought: str, renderer: ChatRenderer
):
    renderer.tokenizer.chat_template = BEGINS_REASONING
    own = ChatRenderer(renderer.tokenizer)
    raw = f"{thought}</think>{RAW.removeprefix('go ')}"
    memory, messages, _ = spoken(own, [raw, raw, f"{thought}</think>tree"])
    prompt = memory.prompt("r", messages, [], own)
    assert prompt.text.count(f"<|assistant|><think>{thought}</think>") == 3 and prompt.extends


def test_a_prompt_that_is_asked_for_again_is_whole_and_keeps_its_exact_ids(renderer: ChatRenderer):
    memory, messages, turns = spoken(renderer, [RAW, RAW])
    prompt = memory.prompt("r", messages[:3], [], renderer)
    assert (prompt.reused, prompt.break_cause) == (0, "fresh")
    assert list(prompt.ids) == list(turns[1].ids[: turns[1].cuts[-2][1]])
    assert list(prompt.ids) != renderer.encode(prompt.text), "they were not sampled as they are tokenised"


def test_why_a_prefix_broke_is_told(renderer: ChatRenderer):
    memory, messages, _ = spoken(renderer, [RAW])
    tool = {"type": "function", "function": {"name": "f"}}
    assert memory.prompt("r", messages, [tool], renderer).extends, "this template shows no tools"
    assert memory.prompt("r", [USER], [], renderer).break_cause == "fresh"
    assert memory.prompt("r", [{**USER, "content": "?"}, *messages[1:]], [], renderer).break_cause == "edited"
    assert memory.prompt("r", messages, [], ChatRenderer(renderer.tokenizer)).break_cause == "other_model"
    assert memory.prompt("of nobody", messages, [], renderer).break_cause == "unknown"
    assert memory.prompt("of nobody", [USER], [], renderer).break_cause is None


def test_drift_is_told_apart_by_ids_and_by_text(renderer: ChatRenderer):
    written = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    for raw, text_drifts in ((RAW, True), (written, False), ("wood", False)):
        memory, messages, _ = spoken(renderer, [raw])
        drift = memory.prompt("r", messages, [], renderer).drift
        assert drift == Drift(tokens=True, text=text_drifts), "sampled byte by byte"
        turn = turn_after(memory.prompt("s", [USER], [], renderer), raw, renderer)
        again = Turn.of(
            memory.prompt("s", [USER], [], renderer),
            turn.answers[-1],
            renderer.encode(raw + "<|end|>"),
            renderer,
        )
        memory.remember("s", again)
        assert memory.prompt("s", messages, [], renderer).drift == Drift(tokens=False, text=text_drifts)


def test_characters_that_guard_white_space_may_stand_in_messages(renderer: ChatRenderer):
    memory, messages, _ = spoken(renderer, [" wood "])
    messages[-1] = {**RESULT, "content": f"tree {OPEN}{CLOSE}"}
    prompt = memory.prompt("r", messages, [], renderer)
    assert f"tree {OPEN}{CLOSE}" in prompt.text and renderer.decode(prompt.ids) == prompt.text
