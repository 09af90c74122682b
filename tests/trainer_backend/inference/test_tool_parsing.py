import json
from collections.abc import Callable
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


def test_hermes_calls_are_found_with_text_around_them():
    text = (
        'Two things.\n<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>\nand'
        '<tool_call>{"name": "b", "arguments": {}}</tool_call>'
    )
    assert parse_hermes(text, []) == ParsedReply(
        "Two things.\n\nand", (ParsedCall("a", '{"x": 1}'), ParsedCall("b", "{}"))
    )


def test_a_hermes_argument_may_contain_the_closing_tag():
    arguments = {"text": "</tool_call> and <tool_call>"}
    reply = parse_hermes(f"<tool_call>{json.dumps({'name': 'a', 'arguments': arguments})}</tool_call>", [])
    assert [json.loads(call.arguments) for call in reply.tool_calls] == [arguments]


def test_reasoning_before_a_hermes_call_is_content_and_no_call_of_its_own():
    thought = "<think>\nmaybe <tool_call>{</tool_call>?\n</think>"
    call = '<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>'
    read = ParsedReply(thought, (ParsedCall("a", '{"x": 1}'),))
    assert parse_hermes(f"{thought}\n\n{call}", []) == read
    without_opening = thought.removeprefix("<think>\n")  # it stands in the prompt of some models
    assert parse_hermes(without_opening + call, []).tool_calls == read.tool_calls
    quoted = f"first {call}, or rather\n</think>\n{call}"
    assert parse_hermes(quoted, []).tool_calls == read.tool_calls, "the quoted call was only weighed"


def test_a_call_may_hold_the_end_of_reasoning_as_text():
    text = '<tool_call>{"name": "a", "arguments": {"x": "</think>"}}</tool_call>'
    assert parse_hermes(text, []).tool_calls == (ParsedCall("a", '{"x": "</think>"}'),)


@pytest.mark.parametrize("parse", [parse_hermes, parse_qwen3_coder])
def test_reasoning_that_was_cut_off_is_text_with_the_reason(parse: ToolParser):
    text = '<think>so <tool_call>{"name": "a", "arguments": {}}</tool_call>'
    reply = parse(text, [])
    assert (reply.content, reply.tool_calls) == (text, ()) and "</think>" in (reply.error or "")


def test_a_llama_call_is_the_whole_reply_or_follows_the_python_tag():
    read = (ParsedCall("act", '{"actions": ["do"]}'),)
    spelled = '{"name": "act", "parameters": {"actions": ["do"]}}'
    assert parse_llama(f" {spelled}\n", []) == ParsedReply("", read)
    assert parse_llama(f"Go.<|python_tag|>{spelled}", []) == ParsedReply("Go.", read)
    assert parse_llama(spelled.replace("parameters", "arguments"), []).tool_calls == read
    assert parse_llama(f"Go. {spelled}", []) == ParsedReply(f"Go. {spelled}"), "text that quotes a call"


def test_mistral_calls_are_a_list_or_names_with_arguments():
    read = (ParsedCall("a", '{"x": 1}'), ParsedCall("b", "{}"))
    first, second = (
        '{"name": "a", "arguments": {"x": 1}, "id": "abcdefghi"}',
        '{"name": "b", "arguments": {}}',
    )
    listed = f"[TOOL_CALLS] [{first}, {second}]"
    assert parse_mistral(f"Go.{listed}", []) == ParsedReply("Go.", read)
    assert parse_mistral('[TOOL_CALLS]a[ARGS]{"x": 1}[TOOL_CALLS]b[CALL_ID]abcdefghi[ARGS]{}', []) == (
        ParsedReply("", read)
    )


def as_text(value: object) -> str:
    """As GLM's and Qwen's templates print an argument."""
    return value if isinstance(value, str) else json.dumps(value)


def glm_call(name: str, arguments: dict[str, Any]) -> str:
    pairs = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{as_text(value)}</arg_value>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{pairs}</tool_call>"


def write_coder_call(name: str, arguments: dict[str, Any]) -> str:
    return coder_call(**{key: as_text(value) for key, value in arguments.items()}).replace("=act", f"={name}")


def lfm2_call(name: str, arguments: dict[str, Any]) -> str:
    written = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return f"<|tool_call_start|>[{name}({written})]<|tool_call_end|>"


def gemma_value(value: object, quote: str = '<|"|>') -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma_value(item, quote)}" for key, item in value.items()) + "}"
    return (
        f"[{','.join(gemma_value(item, quote) for item in value)}]"
        if isinstance(value, list)
        else json.dumps(value)
    )


def deepseek_call(name: str, arguments: dict[str, Any]) -> str:
    begin, separator, end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
    call = f"{begin}{name}{separator}{json.dumps(arguments)}{end}"
    return f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"  # noqa: RUF001


def write_object(name: str, arguments: dict[str, Any]) -> str:
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


# How a model writes a call in each format, its reasoning, and how many calls a message holds.
WRITERS: dict[str, tuple[Callable[[str, dict[str, Any]], str], str, int]] = {
    "harmony": (
        lambda name, arguments: (
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(arguments)}"
        ),
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant",
        1,
    ),
    "gemma4": (
        lambda name, arguments: f"<|tool_call>call:{name}{gemma_value(arguments)}<tool_call|>",
        "<|channel>thought\nhm\n<channel|>",
        2,
    ),
    "function_gemma": (
        lambda name, arguments: (
            f"<start_function_call>call:{name}{gemma_value(arguments, '<escape>')}<end_function_call>"
        ),
        "",
        2,
    ),
    "mistral": (
        lambda name, arguments: f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}",
        "[THINK]hm[/THINK]",
        2,
    ),
    "deepseek": (deepseek_call, "hm</think>", 2),
    "lfm2": (lfm2_call, "<think>hm</think>", 2),
    "nemotron2": (
        lambda name, arguments: f"<TOOLCALL>[{write_object(name, arguments)}]</TOOLCALL>",
        "hm</think>",
        2,
    ),
    "granite3": (lambda name, arguments: f"<|tool_call|>[{write_object(name, arguments)}]", "", 2),
    "qwen3_coder": (write_coder_call, "hm\n</think>\n\n", 2),
    "glm": (glm_call, "\n<think>hm</think>\n", 2),
    "hermes": (
        lambda name, arguments: f"<tool_call>\n{write_object(name, arguments)}\n</tool_call>",
        "<think>\nhm\n</think>\n\n",
        2,
    ),
    "llama": (
        lambda name, arguments: json.dumps({"name": name, "parameters": arguments}),
        "<|python_tag|>",
        1,
    ),
}
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


@pytest.mark.parametrize("name", WRITERS)
def test_arguments_of_every_type_are_read_in_each_format(name: str):
    write, _, _ = WRITERS[name]
    (call,) = TOOL_FORMATS[name].parse(write("act", ARGUMENTS), TYPED).tool_calls
    assert (call.name, json.loads(call.arguments)) == ("act", ARGUMENTS)


@pytest.mark.parametrize("name", WRITERS)
def test_an_unknown_tool_without_arguments_is_left_for_the_environment_to_refuse(name: str):
    reply = TOOL_FORMATS[name].parse(WRITERS[name][0]("a.b-c_1", {}), TYPED)
    assert (reply.tool_calls, reply.error) == ((ParsedCall("a.b-c_1", "{}"),), None)


@pytest.mark.parametrize("name", WRITERS)
def test_reasoning_and_text_stand_before_a_call_and_two_calls_are_read_where_a_message_holds_them(name: str):
    write, thought, most = WRITERS[name]
    text = {"harmony": "<|channel|>commentary<|message|>Go.<|end|><|start|>assistant", "llama": ""}.get(
        name, "Go."
    )
    first, second = write("act", {"x": 1}), write("b", {})
    reply = TOOL_FORMATS[name].parse(thought + text + first, [])
    assert reply.tool_calls == (ParsedCall("act", '{"x": 1}'),)
    said = reply.reasoning + reply.content
    assert "Go." in said or name == "llama"
    assert "hm" in said or "hm" not in thought
    both = TOOL_FORMATS[name].parse(thought + first + ("; " if name == "llama" else "") + second, [])
    if most == 2:
        assert both.tool_calls == (*reply.tool_calls, ParsedCall("b", "{}"))
    else:
        assert (both.tool_calls, both.error is None) == ((), False)


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        ("<|channel|>final<|message|>tree \n<|return|>", "tree \n", ""),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b", "b", "a"),
        ("<|channel|>commentary to=assistant<|message|>b", "b", ""),
        ("<|channel|>analysis<|message|>a<|end|><|channel|>analysis<|message|>b<|end|>c", "c", "a\nb"),
    ],
)
def test_the_channels_of_harmony_are_content_or_reasoning(text: str, content: str, reasoning: str):
    assert parse_harmony(text, []) == ParsedReply(content, reasoning=reasoning)


def test_the_recipient_of_a_harmony_call_may_stand_before_its_channel():
    read = (ParsedCall("f", '{"x": 1}'),)
    written = ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>'
    assert parse_harmony(written, []).tool_calls == read
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    assert parse_harmony(thought + written, []) == ParsedReply("", read, reasoning="hm")


def test_content_of_a_harmony_reply_never_holds_its_tokens_since_the_template_would_refuse_them():
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    reply = parse_harmony(thought + '<|channel|>commentary to=functions.f<|message|>{"x"<|call|>', [])
    assert (reply.content, reply.reasoning) == ('{"x"', "hm") and "tool call 1 cannot be read" in reply.error


def test_glm_calls_need_no_newlines():
    text = "<tool_call>act<arg_key>n</arg_key><arg_value>1</arg_value></tool_call>"
    assert parse_glm(text, []).tool_calls == (ParsedCall("act", '{"n": 1}'),)


def test_lfm2_calls_stand_in_one_list_alone_or_in_json():
    read = (ParsedCall("a", '{"x": 1}'), ParsedCall("b", "{}"))
    for body in ("[a(x=1), b()]", '[{"name": "a", "arguments": {"x": 1}}, {"name": "b", "arguments": {}}]'):
        assert parse_lfm2(f"<|tool_call_start|>{body}<|tool_call_end|>", []).tool_calls == read
    assert parse_lfm2("<|tool_call_start|>a(x=1)<|tool_call_end|>", []).tool_calls == read[:1]
    quoted = r"""<|tool_call_start|>[a(x='it\'s \u20ac <|tool_call_end|>', y="\d")]<|tool_call_end|>"""
    (call,) = parse_lfm2(quoted, []).tool_calls
    assert json.loads(call.arguments) == {"x": "it's € <|tool_call_end|>", "y": r"\d"}


def test_deepseek_r1_writes_arguments_as_a_block():
    begin, separator, end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
    call = f'{begin}function{separator}act\n```json\n{{"x": 1}}\n```{end}'
    text = f"<｜tool▁calls▁begin｜>{call}\n{call}<｜tool▁calls▁end｜>"  # noqa: RUF001
    assert parse_deepseek(text, []).tool_calls == (ParsedCall("act", '{"x": 1}'),) * 2


def coder_call(**arguments: str) -> str:
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function=act>\n{written}</function>\n</tool_call>"


def test_a_qwen3_coder_value_is_json_unless_its_tool_says_text():
    tools = [tool(actions=LIST, word={"type": "string"}, sure={"type": "boolean"})]
    text = "Go." + coder_call(actions='["do"]', word="12", sure="True", other="a\nb", half='{"x"')
    reply = parse_qwen3_coder(text, tools)
    assert reply.content == "Go."
    assert [json.loads(call.arguments) for call in reply.tool_calls] == [
        {"actions": ["do"], "word": "12", "sure": True, "other": "a\nb", "half": '{"x"'}
    ]


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
def test_a_call_of_a_preset_is_the_only_argument_or_names_the_tool_and_gives_json(
    text: str, tools: list[dict[str, object]], reply: tuple[ParsedCall, ...]
):
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
def test_no_text_makes_a_parser_raise_and_every_call_is_json_that_utf8_can_carry(
    text: str, tools: list[dict[str, object]]
):
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
