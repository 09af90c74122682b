import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from trainer_backend.errors import ModelFolderError
from trainer_backend.inference.tool_format import TEXT, tool_format_in_use
from trainer_backend.models.tokenizer import TOOL_CALL_FORMAT_KEY
from trainer_backend.plugins import TOOL_FORMATS
from trainer_backend.tool_formats.calls import ParsedCall, ParsedReply, ToolParser
from trainer_backend.tool_formats.harmony import parse_harmony
from trainer_backend.tool_formats.literals import parse_gemma4, parse_lfm2
from trainer_backend.tool_formats.llama import parse_llama
from trainer_backend.tool_formats.parameters import parse_glm, parse_qwen3_coder
from trainer_backend.tool_formats.tags import (
    parse_deepseek,
    parse_granite3,
    parse_hermes,
    parse_mistral,
)
from trainer_backend.tool_formats.turnwise import ShortForm, parse_turnwise

PARSERS = [TEXT.parse, *(known.parse for known in TOOL_FORMATS.values())]


def tool(**properties: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": "act", "parameters": {"properties": properties}}}


LIST = {"type": "array", "items": {"type": "string", "enum": ["do", "sleep"]}}
ONE_LIST = [tool(actions=LIST)]


@pytest.mark.parametrize("parse", [parse_hermes, parse_qwen3_coder])
def test_reasoning_that_was_cut_off_is_text_with_the_reason(parse: ToolParser):
    text = '<think>so <tool_call>{"name": "a", "arguments": {}}</tool_call>'
    reply = parse(text, [])
    assert (reply.content, reply.tool_calls) == (text, ()) and "</think>" in (reply.error or "")


A, B = ParsedCall("a", '{"x": 1}'), ParsedCall("b", "{}")
FIRST, SECOND = '{"name": "a", "arguments": {"x": 1}}', '{"name": "b", "arguments": {}}'
HERMES = f"<tool_call>\n{FIRST}\n</tool_call>"
HELD = '{"text": "</tool_call> and <tool_call>", "end": "</think>"}'
# Reasoning, whose first mark stands in the prompt of some models.
WEIGHED = "maybe <tool_call>{</tool_call>?\n</think>"
SPELLED = FIRST.replace("arguments", "parameters")
CHANNEL, ANALYSIS = "<|channel|>", "<|channel|>analysis<|message|>a<|end|><|start|>assistant"
TO_A = ' to=functions.a<|channel|>commentary json<|message|>{"x": 1}<|call|>'
QUOTED = r"""a(x='it\'s \u20ac <|tool_call_end|>', y="\d")"""
R1 = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n```json\n{"x": 1}\n```<｜tool▁call▁end｜>'  # noqa: RUF001


@pytest.mark.parametrize(
    ("parse", "text", "read"),
    [
        # text around two calls, marks in an argument, a call that reasoning only weighed
        (
            parse_hermes,
            f"Go.\n{HERMES}\nand<tool_call>{SECOND}</tool_call>",
            ParsedReply("Go.\n\nand", (A, B)),
        ),
        (
            parse_hermes,
            f'<tool_call>{{"name": "a", "arguments": {HELD}}}</tool_call>',
            ParsedReply("", (ParsedCall("a", HELD),)),
        ),
        (parse_hermes, f"<think>\n{WEIGHED}\n\n{HERMES}", ParsedReply(f"<think>\n{WEIGHED}", (A,))),
        (parse_hermes, WEIGHED + HERMES, ParsedReply(WEIGHED, (A,))),
        (parse_hermes, f"{HERMES}?\n</think>\n{HERMES}", ParsedReply(f"{HERMES}?\n</think>", (A,))),
        # the whole reply, or what follows the tag; else text that quotes a call
        (parse_llama, f" {SPELLED}\n", ParsedReply("", (A,))),
        (parse_llama, f"Go.<|python_tag|>{SPELLED}", ParsedReply("Go.", (A,))),
        (parse_llama, FIRST, ParsedReply("", (A,))),
        (parse_llama, f"Go. {SPELLED}", ParsedReply(f"Go. {SPELLED}")),
        # a list, or names with arguments
        (
            parse_mistral,
            f'Go.[TOOL_CALLS] [{FIRST[:-1]}, "id": "abcdefghi"}}, {SECOND}]',
            ParsedReply("Go.", (A, B)),
        ),
        (
            parse_mistral,
            '[TOOL_CALLS]a[ARGS]{"x": 1}[TOOL_CALLS]b[CALL_ID]abcdefghi[ARGS]{}',
            ParsedReply("", (A, B)),
        ),
        (parse_harmony, f"{CHANNEL}final<|message|>tree \n<|return|>", ParsedReply("tree \n")),
        (parse_harmony, f"{ANALYSIS}{CHANNEL}final<|message|>b", ParsedReply("b", reasoning="a")),
        (parse_harmony, f"{CHANNEL}commentary to=assistant<|message|>b", ParsedReply("b")),
        (
            parse_harmony,
            "<|channel|>analysis<|message|>a<|end|><|channel|>analysis<|message|>b<|end|>c",
            ParsedReply("c", reasoning="a\nb"),
        ),
        # the recipient may stand before the channel
        (parse_harmony, TO_A, ParsedReply("", (A,))),
        (parse_harmony, ANALYSIS + TO_A, ParsedReply("", (A,), reasoning="a")),
        (
            parse_glm,
            "<tool_call>a<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>",
            ParsedReply("", (A,)),
        ),
        # in one list, alone, or in JSON
        (parse_lfm2, "<|tool_call_start|>[a(x=1), b()]<|tool_call_end|>", ParsedReply("", (A, B))),
        (parse_lfm2, f"<|tool_call_start|>[{FIRST}, {SECOND}]<|tool_call_end|>", ParsedReply("", (A, B))),
        (parse_lfm2, "<|tool_call_start|>a(x=1)<|tool_call_end|>", ParsedReply("", (A,))),
        (
            parse_lfm2,
            f"<|tool_call_start|>[{QUOTED}]<|tool_call_end|>",
            ParsedReply("", (ParsedCall("a", r"""{"x": "it's \u20ac <|tool_call_end|>", "y": "\\d"}"""),)),
        ),
        # as DeepSeek-R1 writes arguments
        (parse_deepseek, f"<｜tool▁calls▁begin｜>{R1}\n{R1}<｜tool▁calls▁end｜>", ParsedReply("", (A, A))),  # noqa: RUF001
    ],
)
def test_what_a_format_allows_is_read_with_the_text_around_it(parse, text, read):
    assert parse(text, []) == read


def as_text(value: object) -> str:
    """As GLM's and Qwen's templates print an argument."""
    return value if isinstance(value, str) else json.dumps(value)


def glm_pairs(arguments: dict[str, Any]) -> str:
    pair = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
    return "".join(pair.format(key, as_text(value)) for key, value in arguments.items())


def coder_parameters(arguments: dict[str, Any]) -> str:
    parameter = "<parameter={}>\n{}\n</parameter>\n"
    return "".join(parameter.format(key, as_text(value)) for key, value in arguments.items())


def lfm2_values(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items())


def gemma_value(value: object, quote: str = '<|"|>') -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma_value(item, quote)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(gemma_value(item, quote) for item in value)}]"
    return json.dumps(value)


plain_json = partial(json.dumps, ensure_ascii=False)
OBJECT = '{"name": "NAME", "arguments": ARGUMENTS}'
# How a model writes arguments in each format, a call with them, its reasoning, and how many calls a message
# holds.
WRITERS: dict[str, tuple[Callable[[dict[str, Any]], str], str, str, int]] = {
    "harmony": (
        json.dumps, "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant", 1,
    ),
    "gemma4": (
        gemma_value, "<|tool_call>call:NAMEARGUMENTS<tool_call|>", "<|channel>thought\nhm\n<channel|>", 2,
    ),
    "function_gemma": (
        partial(gemma_value, quote="<escape>"),
        "<start_function_call>call:NAMEARGUMENTS<end_function_call>", "", 2,
    ),
    "mistral": (json.dumps, "[TOOL_CALLS]NAME[ARGS]ARGUMENTS", "[THINK]hm[/THINK]", 2),
    "deepseek": (
        json.dumps, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS"  # noqa: RUF001
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "hm</think>", 2,  # noqa: RUF001
    ),
    "lfm2": (lfm2_values, "<|tool_call_start|>[NAME(ARGUMENTS)]<|tool_call_end|>", "<think>hm</think>", 2),
    "nemotron2": (plain_json, f"<TOOLCALL>[{OBJECT}]</TOOLCALL>", "hm</think>", 2),
    "granite3": (plain_json, f"<|tool_call|>[{OBJECT}]", "", 2),
    "qwen3_coder": (
        coder_parameters, "<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>",
        "hm\n</think>\n\n", 2,
    ),
    "glm": (glm_pairs, "<tool_call>NAME\nARGUMENTS</tool_call>", "\n<think>hm</think>\n", 2),
    "hermes": (plain_json, f"<tool_call>\n{OBJECT}\n</tool_call>", "<think>\nhm\n</think>\n\n", 2),
    "llama": (json.dumps, OBJECT.replace("arguments", "parameters"), "<|python_tag|>", 1),
}  # fmt: skip


def written(form: str, name: str, arguments: dict[str, Any]) -> str:
    write, call, *_ = WRITERS[form]
    return call.replace("NAME", name).replace("ARGUMENTS", write(arguments))


ARGUMENTS: dict[str, Any] = {
    "text": 'He said "it\'s"\n\\n, €, \N{GRINNING FACE} [x]{y}(z), a=b: c\n\n',
    "number": -3,
    "half": 0.5,
    "sure": True,
    "none": None,
    "digits": "12",
    "nested": {"a": [1, "2", {"b": []}], "c": {}},
}
TYPED = [tool(text={"type": "string"}, digits={"anyOf": [{"type": "string"}, {"type": "null"}]})]


@pytest.mark.parametrize("form", WRITERS)
def test_arguments_of_every_type_or_none_are_read_and_an_unknown_tool_is_left_for_the_environment(form: str):
    parse = TOOL_FORMATS[form].parse
    (call,) = parse(written(form, "act", ARGUMENTS), TYPED).tool_calls
    assert (call.name, json.loads(call.arguments)) == ("act", ARGUMENTS)
    reply = parse(written(form, "a.b-c_1", {}), TYPED)
    assert (reply.tool_calls, reply.error) == ((ParsedCall("a.b-c_1", "{}"),), None)


@pytest.mark.parametrize("form", WRITERS)
def test_reasoning_and_text_stand_before_a_call_and_two_calls_are_read_where_a_message_holds_them(form: str):
    *_, thought, most = WRITERS[form]
    text = {"harmony": "<|channel|>commentary<|message|>Go.<|end|><|start|>assistant", "llama": ""}.get(
        form, "Go."
    )
    first, second = written(form, "a", {"x": 1}), written(form, "b", {})
    reply = TOOL_FORMATS[form].parse(thought + text + first, [])
    assert reply.tool_calls == (A,)
    said = reply.reasoning + reply.content
    assert "Go." in said or form == "llama"
    assert "hm" in said or "hm" not in thought
    both = TOOL_FORMATS[form].parse(thought + first + ("; " if form == "llama" else "") + second, [])
    if most == 2:
        assert both.tool_calls == (A, B)
    else:
        assert (both.tool_calls, both.error is None) == ((), False)


def test_content_of_a_harmony_reply_never_holds_its_tokens_since_the_template_would_refuse_them():
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    reply = parse_harmony(thought + '<|channel|>commentary to=functions.f<|message|>{"x"<|call|>', [])
    assert (reply.content, reply.reasoning) == ('{"x"', "hm") and "tool call 1 cannot be read" in reply.error


def test_a_qwen3_coder_value_is_json_unless_its_tool_says_text():
    tools = [tool(actions=LIST, word={"type": "string"}, sure={"type": "boolean"})]
    texts = {"actions": '["do"]', "word": "12", "sure": "True", "other": "a\nb", "half": '{"x"'}
    reply = parse_qwen3_coder("Go." + written("qwen3_coder", "act", texts), tools)
    (call,) = reply.tool_calls
    assert json.loads(call.arguments) == {**texts, "actions": ["do"], "sure": True}


ONE_ITEM = [tool(direction={"type": "string", "enum": ["up", "turn left"]})]
UP_LEFT = (ParsedCall("act", '{"direction": "turn left"}'), ParsedCall("act", '{"direction": "up"}'))


@pytest.mark.parametrize(
    ("text", "tools", "reply"),
    [
        ("do sleep do", ONE_LIST, (ParsedCall("act", '{"actions": ["do", "sleep", "do"]}'),)),
        ("fly", ONE_LIST, (ParsedCall("act", '{"actions": ["fly"]}'),)),  # the environment refuses it
        ("turn left<|call|> up", ONE_ITEM, UP_LEFT),
        ('act {"direction": "turn left"}<|call|> act {"direction": "up"}', ONE_ITEM, UP_LEFT),
        (
            'find {"query": "a b"}<|call|> act {"actions": ["do"]}',
            [*ONE_LIST, tool(query={"type": "string"})],
            (ParsedCall("find", '{"query": "a b"}'), ParsedCall("act", '{"actions": ["do"]}')),
        ),
    ],
)
def test_a_call_of_a_preset_is_the_only_argument_or_names_the_tool_and_gives_json(text, tools, reply):
    for lead in ("", "so"):
        assert parse_turnwise(f"{lead}<|call|> {text}", tools) == ParsedReply(lead, reply)


@pytest.mark.parametrize(
    ("parse", "text", "says"),
    [
        (parse_hermes, '<tool_call>{"name": "a", "arguments": {}}', "</tool_call> is missing"),
        (parse_hermes, '<tool_call>{"name": "a", "argum', "cannot be read"),
        (parse_hermes, '<tool_call>["a"]</tool_call>', 'expected {"name"'),
        (parse_hermes, '<tool_call>{"name": "a", "arguments": [1]}</tool_call>', 'expected {"name"'),
        (parse_hermes, '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', "NaN is no JSON"),
        (parse_hermes, "<tool_call>" + "[" * 100_000, "cannot be read"),
        (
            parse_hermes,
            '<tool_call>{"name": "a", "arguments": {}}</tool_call><tool_call>x</tool_call>',
            "tool call 2",
        ),
        (parse_llama, '{"name": "a", "param', "cannot be read"),
        (parse_llama, '{"name": "a", "parameters": "x"}', 'expected {"name": text, "parameters": object}'),
        (parse_llama, '{"x": 1}', 'expected {"name"'),
        (parse_llama, "<|python_tag|>print(1)", "cannot be read"),
        (parse_llama, '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}', "second tool call"),
        (parse_mistral, "[TOOL_CALLS] []", "the list of calls is empty"),
        (parse_mistral, '[TOOL_CALLS] [{"name": "a"', "cannot be read"),
        (parse_mistral, '[TOOL_CALLS] [{"name": "a"}]', 'expected {"name"'),
        (parse_mistral, "[TOOL_CALLS]a{}", "or a name and [ARGS]"),
        (parse_mistral, "[TOOL_CALLS]a[ARGS][1]", 'expected {"name"'),
        (parse_mistral, "[TOOL_CALLS]a[ARGS]{}[TOOL_CALLS]", "tool call 2"),
        (parse_qwen3_coder, "<tool_call>{}</tool_call>", "expected <function="),
        (parse_qwen3_coder, "<tool_call><function=a", "> is missing"),
        (parse_qwen3_coder, "<tool_call><function=a><parameter=x>1</function>", "</parameter> is missing"),
        (parse_qwen3_coder, "<tool_call><function=a></function>", "</tool_call> is missing"),
        (parse_hermes, '<tool_call>{"name": "a", "arguments": {"x": 1e999}}</tool_call>', "Out of range"),
        (parse_granite3, "<|tool_call|>[]", "the list of calls is empty"),
        (parse_glm, "<tool_call></tool_call>", "the name of the tool is missing"),
        (parse_glm, "<tool_call>a\n<arg_key>x</arg_key>1</tool_call>", "expected <arg_value>, found '1"),
        (parse_glm, "<tool_call>a\n<arg_key>x</arg_key><arg_value>1", "</arg_value> is missing"),
        (parse_lfm2, "<|tool_call_start|>[a(1)]<|tool_call_end|>", "expected =, found ')"),
        (parse_lfm2, "<|tool_call_start|>[a(x=1]<|tool_call_end|>", "expected ), found ']"),
        (parse_lfm2, "<|tool_call_start|>[a(x='1)]<|tool_call_end|>", "' is missing at the end of a string"),
        (parse_lfm2, "<|tool_call_start|>[a(x=b)]<|tool_call_end|>", "'b' is no value"),
        (parse_lfm2, "<|tool_call_start|>[a(x=1e999)]<|tool_call_end|>", "Out of range"),
        (parse_lfm2, "<|tool_call_start|>[a(x=" + "[" * 100_000, "cannot be read"),
        (parse_lfm2, "<|tool_call_start|>[a(x=1)]", "<|tool_call_end|> is missing"),
        (parse_gemma4, "<|tool_call>act{}<tool_call|>", "expected call:"),
        (parse_gemma4, "<|tool_call>call:act{x:tree}<tool_call|>", "'tree' is no value"),
        (parse_gemma4, '<|tool_call>call:act{x:<|"|>tree}<tool_call|>', '<|"|> is missing'),
        (parse_deepseek, "<｜tool▁calls▁begin｜>act", "expected <｜tool▁call▁begin｜>, found 'act'"),  # noqa: RUF001
        (parse_turnwise, "<|call|>", "the call is empty"),
        (lambda text, _: parse_turnwise(text, []), "<|call|> do sleep", "expected a tool's name and a JSON"),
        (parse_turnwise, '<|call|> act {"actions": ', "cannot be read"),
        (parse_turnwise, "<|call|> do<|call|>", "tool call 2"),
    ],
)
def test_a_call_that_cannot_be_read_is_text_with_the_reason(parse: ToolParser, text: str, says: str):
    reply = parse(text, ONE_LIST)
    assert (reply.content, reply.tool_calls) == (text, ()) and says in (reply.error or "")


def test_text_without_a_call_is_text():
    for parse in PARSERS:
        assert parse(" just text \n", ONE_LIST) == ParsedReply(" just text \n")
    assert TEXT.parse("<tool_call>{}</tool_call>", ONE_LIST).tool_calls == ()


@pytest.mark.parametrize(
    "tools",
    [
        [],
        ONE_LIST * 2,
        [tool(actions=LIST, other=LIST)],
        [tool(actions={"type": "string"})],
        [tool(actions={"type": "array", "items": {"type": "string"}})],
        [{"type": "function"}],
        [{"function": {"name": "a", "parameters": None}}],
        [tool(actions=None)],
    ],
)
def test_the_short_form_needs_one_tool_with_one_argument_of_named_items(tools: list[dict[str, object]]):
    assert ShortForm.of(tools) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<|channel|>analysis<|message|>hm", "ends in its reasoning"),
        ("<|channel|>analysis", "was cut off before <|message|>"),
        ("<|start|>user<|message|>hm<|end|>", "expected a message of the assistant"),
        ("<|channel|>commentary to=functions.f<|message|>[1]", 'expected {"name"'),
        ("<|channel|>commentary to=functions.f<|message|>{} and<|call|>", "'and<|call|>' follows its JSON"),
        ("<|channel|>analysis to=python code<|message|>print(1)", "tool call 1 cannot be read"),
    ],
)
def test_a_harmony_reply_that_cannot_be_read_says_why(text: str, says: str):
    reply = parse_harmony(text, [])
    assert reply.tool_calls == () and says in (reply.error or "")
    assert "<|" not in reply.content + reply.reasoning


pieces = st.sampled_from([
    "<|channel|>", "<|message|>", "commentary to=functions.f", "analysis", "<|end|>", "'", "\\", ",",
    "<|start|>assistant", "<|tool_call>call:f", '<|"|>', "<tool_call|>", "<|channel>thought\n", "<channel|>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call_start|>[f(", "x=", ")", "x:",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",  # noqa: RUF001
    "<|tool_call_end|>",
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<|call|>", "<|python_tag|>", "[TOOL_CALLS]",
    "[ARGS]", "[", "]", "<function=act>", "</function>", "<parameter=actions>", "</parameter>",
    "{", "}", '"\\ud800"', ' {"name": "a", "parameters": {}}', ' {"name": "a", "arguments": {}}', " act ",
    "\n",
])  # fmt: skip


@given(st.lists(pieces | st.text(max_size=5)).map("".join), st.sampled_from([[], ONE_LIST, [{}]]))
def test_no_text_makes_a_parser_raise_and_every_call_is_json_that_utf8_can_carry(text, tools):
    for parse in PARSERS:
        reply = parse(text, tools)
        assert not (reply.tool_calls and reply.error)
        for call in reply.tool_calls:
            assert isinstance(json.loads(call.arguments), dict)
            call.name.encode()
            call.arguments.encode()


def test_the_tokenizer_says_which_format_it_is(tokenizer: PreTrainedTokenizerFast):
    assert tool_format_in_use(tokenizer).parse is parse_turnwise

    def with_settings(template: str, **settings: str) -> PreTrainedTokenizerFast:
        other = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, **settings)
        other.chat_template = template
        return other

    assert tool_format_in_use(with_settings("... <tool_call> ...")).parse is parse_hermes
    assert tool_format_in_use(with_settings("{{ messages }}")).parse is TEXT.parse
    with pytest.raises(ModelFolderError, match="Did you mean 'hermes'"):
        tool_format_in_use(with_settings("", **{TOOL_CALL_FORMAT_KEY: "hermse"}))
