"""A conversation goes on from the exact ids it had, and only where nothing of it was changed."""

import pytest
from transformers import PreTrainedTokenizerFast

from tests.trainer_backend.inference.test_token_exactness import TOOLS, Played
from trainer_backend.inference.answers import CLOSE, OPEN
from trainer_backend.inference.conversations import Conversations, Turn
from trainer_backend.inference.drift import Drift
from trainer_backend.inference.rendering import ChatRenderer

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


def spoken(renderer: ChatRenderer, *raws: str, cut: bool = False) -> Played:
    """A conversation of these answers, each followed by the result of its call or the next question."""
    played = Played(renderer, ("<|end|>", "<|end|>"))
    for raw in raws:
        played.turn(raw, cut=cut)
        played.answered("tree 3")
    return played


def test_a_continued_conversation_keeps_the_sampled_ids_and_encodes_only_what_is_new(renderer: ChatRenderer):
    played = spoken(renderer, RAW)
    prompt, ids = played.prompt(), list(played.turns[0].ids)
    assert prompt.ids[: prompt.reused] == ids and prompt.reused == len(ids)
    new = renderer.decode(prompt.ids[prompt.reused :])
    assert new == "\n<|tool|>tree 3<|end|>\n<|assistant|>", "the sampled <|end|> is not written a second time"
    assert renderer.decode(prompt.ids) == prompt.text


def test_an_answer_that_was_cut_by_its_length_is_closed_by_the_template(renderer: ChatRenderer):
    prompt = spoken(renderer, "wood", cut=True).prompt()
    assert renderer.decode(prompt.ids[prompt.reused :]).startswith("<|end|>\n<|user|>")


def test_what_clients_add_to_a_message_does_not_break_the_conversation(renderer: ChatRenderer):
    played = spoken(renderer, RAW)
    played.messages[1] |= {"refusal": None, "annotations": []}
    assert played.prompt().reused == len(played.turns[0].ids)


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
def test_what_was_edited_is_rendered_again_from_the_first_change_on(renderer, change, same_start):
    played = spoken(renderer, RAW)
    played.messages = change(*played.messages)
    prompt = played.prompt()
    assert prompt.text == renderer.prompt_text(played.messages, []) and not prompt.extends
    assert renderer.decode(prompt.ids) == prompt.text
    assert prompt.reused == (len(played.prompts[0].ids) if same_start else 0)


def test_the_memory_is_bounded_and_forgets_the_least_recent_first(renderer: ChatRenderer):
    played, memory = spoken(renderer, RAW), Conversations(most=2)
    for name in ("a", "b", "a", "c"):
        memory.remember(name, played.turns[0])
    reused = [memory.prompt(name, played.messages, [], renderer).reused for name in "abc"]
    assert [count > 0 for count in reused] == [True, False, True]


def test_behind_an_edit_the_conversation_goes_on_again_with_what_was_sampled(renderer: ChatRenderer):
    played = spoken(renderer, RAW, RAW, RAW)
    played.messages[2] = {**played.messages[2], "content": "[deleted]"}
    prompt = played.prompt()
    # Up to the end of the first answer all is as it was; what follows is another text, in which the second
    # and the third answer still stand as they were sampled.
    assert prompt.break_cause == "edited" and prompt.reused == len(played.turns[0].ids)
    assert prompt.text.count(RAW) == 3 and "[deleted]" in prompt.text
    played.turn(RAW)
    played.answered("tree 3")
    assert played.prompt().reused == len(played.turns[-1].ids)


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
def test_an_answer_that_ends_the_reasoning_begun_in_the_prompt_is_continued(thought, renderer):
    renderer.tokenizer.chat_template = BEGINS_REASONING
    raw = f"{thought}</think>{RAW.removeprefix('go ')}"
    prompt = spoken(ChatRenderer(renderer.tokenizer), raw, raw, f"{thought}</think>tree").prompt()
    assert prompt.text.count(f"<|assistant|><think>{thought}</think>") == 3 and prompt.extends


def test_a_prompt_that_is_asked_for_again_is_whole_and_keeps_its_exact_ids(renderer: ChatRenderer):
    played = spoken(renderer, RAW, RAW)
    del played.messages[3:]
    prompt = played.prompt()
    assert (prompt.reused, prompt.break_cause) == (0, "fresh")
    assert prompt.ids == played.prompts[1].ids
    assert prompt.ids != renderer.encode(prompt.text), "they were not sampled as they are tokenised"


def test_why_a_prefix_broke_is_told(renderer: ChatRenderer):
    played = spoken(renderer, RAW)
    memory, (user, *others) = played.memory, played.messages
    assert memory.prompt("r", [user, *others], [], renderer).extends, "this template shows no tools"
    assert memory.prompt("r", [user], TOOLS, renderer).break_cause == "fresh"
    edited, other = [{**user, "content": "?"}, *others], ChatRenderer(renderer.tokenizer)
    assert memory.prompt("r", edited, TOOLS, renderer).break_cause == "edited"
    assert memory.prompt("r", edited, [], renderer).break_cause == "tools"
    assert memory.prompt("r", [user, *others], TOOLS, other).break_cause == "other_model"
    assert memory.prompt("of nobody", [user, *others], TOOLS, renderer).break_cause == "unknown"
    assert memory.prompt("of nobody", [user], TOOLS, renderer).break_cause is None


def test_drift_is_told_apart_by_ids_and_by_text(renderer: ChatRenderer):
    written = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    for raw, text_drifts in ((RAW, True), (written, False), ("wood", False)):
        played = spoken(renderer, raw)
        assert played.prompt().drift == Drift(tokens=True, text=text_drifts), "sampled byte by byte"
        ids, answer = renderer.encode(raw + "<|end|>"), played.turns[0].answers[-1]
        played.memory.remember("r", Turn.of(played.prompts[0], answer, ids, renderer))
        assert played.prompt().drift == Drift(tokens=False, text=text_drifts)


def test_characters_that_guard_white_space_may_stand_in_messages(renderer: ChatRenderer):
    played = spoken(renderer, " wood ")
    played.messages[-1] |= {"content": f"tree {OPEN}{CLOSE}"}
    prompt = played.prompt()
    assert f"tree {OPEN}{CLOSE}" in prompt.text and renderer.decode(prompt.ids) == prompt.text
