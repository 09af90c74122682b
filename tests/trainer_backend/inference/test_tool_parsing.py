import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from trainer_backend.errors import ModelFolderError
from trainer_backend.inference.chat_check import parse_text, tool_format_in_use
from trainer_backend.models.tokenizer import TOOL_CALL_FORMAT_KEY
from trainer_backend.plugins import TOOL_FORMATS
from trainer_backend.tool_formats.calls import ParsedCall, ParsedReply, ToolParser
from trainer_backend.tool_formats.llama import parse_llama
from trainer_backend.tool_formats.parameters import parse_qwen3_coder
from trainer_backend.tool_formats.tags import parse_hermes, parse_mistral
from trainer_backend.tool_formats.turnwise import ShortForm, parse_turnwise

PARSERS = [parse_text, *(known.parse for known in TOOL_FORMATS.values())]


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


def test_the_short_form_lists_the_items_of_the_only_argument():
    assert parse_turnwise("<|call|> do sleep do", ONE_LIST) == ParsedReply(
        "", (ParsedCall("act", '{"actions": ["do", "sleep", "do"]}'),)
    )


def test_the_short_form_of_a_single_item_is_the_item():
    tools = [tool(direction={"type": "string", "enum": ["up", "turn left"]})]
    calls = (ParsedCall("act", '{"direction": "turn left"}'), ParsedCall("act", '{"direction": "up"}'))
    text = "<|call|> turn left<|call|> up"
    assert parse_turnwise(text, tools) == ParsedReply("", calls)
    general = '<|call|> act {"direction": "turn left"}<|call|> act {"direction": "up"}'
    assert parse_turnwise(general, tools) == ParsedReply("", calls)


def test_an_unknown_item_is_left_for_the_environment_to_refuse():
    (call,) = parse_turnwise("thinking<|call|> fly", ONE_LIST).tool_calls
    assert json.loads(call.arguments) == {"actions": ["fly"]}


def test_the_general_form_names_the_tool_and_gives_json():
    text = 'so<|call|> find {"query": "a b"}<|call|> act {"actions": ["do"]}'
    assert parse_turnwise(text, [*ONE_LIST, tool(query={"type": "string"})]) == ParsedReply(
        "so", (ParsedCall("find", '{"query": "a b"}'), ParsedCall("act", '{"actions": ["do"]}'))
    )


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
        (
            parse_llama,
            '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}',
            "a second tool call",
        ),
        (parse_mistral, "[TOOL_CALLS] []", "the list of calls is empty"),
        (parse_mistral, '[TOOL_CALLS] [{"name": "a"', "cannot be read"),
        (parse_mistral, '[TOOL_CALLS] [{"name": "a"}]', 'expected {"name"'),
        (parse_mistral, "[TOOL_CALLS]a{}", "or a name and [ARGS]"),
        (parse_mistral, "[TOOL_CALLS]a[ARGS][1]", 'expected {"name"'),
        (parse_mistral, "[TOOL_CALLS]a[ARGS]{}[TOOL_CALLS]", "tool call 2"),
        (parse_qwen3_coder, "<tool_call>{}</tool_call>", "expected <function="),
        (parse_qwen3_coder, "<tool_call><function=a", "> is missing"),
        (parse_qwen3_coder, "<tool_call><function=a><parameter=x>1</function>", "</parameter> is missing"),
        (parse_qwen3_coder, "<tool_call><function=a></function>", "expected </tool_call>"),
        (parse_turnwise, "<|call|>", "it names nothing"),
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
    assert parse_text("<tool_call>{}</tool_call>", ONE_LIST).tool_calls == ()


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


pieces = st.sampled_from([
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


arguments = st.dictionaries(st.text(max_size=5), st.text(max_size=5) | st.integers() | st.none(), max_size=3)
calls = st.lists(st.tuples(st.text(min_size=1, max_size=8), arguments), min_size=1, max_size=3)


@given(calls)
def test_written_hermes_calls_are_read_back(written: list[tuple[str, dict[str, object]]]):
    text = "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': args})}\n</tool_call>"
        for name, args in written
    )
    read = parse_hermes(text, []).tool_calls
    assert [(call.name, json.loads(call.arguments)) for call in read] == written


def test_the_tokenizer_says_which_format_it_is(tokenizer: PreTrainedTokenizerFast):
    assert tool_format_in_use(tokenizer).parse is parse_turnwise

    def with_settings(template: str, **settings: str) -> PreTrainedTokenizerFast:
        other = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, **settings)
        other.chat_template = template
        return other

    assert tool_format_in_use(with_settings("... <tool_call> ...")).parse is parse_hermes
    assert tool_format_in_use(with_settings("{{ messages }}")).parse is parse_text
    with pytest.raises(ModelFolderError, match="Did you mean 'hermes'"):
        tool_format_in_use(with_settings("", **{TOOL_CALL_FORMAT_KEY: "hermse"}))
