"""Three families behind the gateway: their templates, their calls, and conversations that go on."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from service_kit.server import Listener, ServerThread
from shared_schemas.chat import ROLLOUT_HEADER
from tests.model_folders import FAMILIES, Family, chat_template
from tests.trainer_backend.inference.naive import ask, logprobs_under
from tests.trainer_backend.inference.served import StandInEngine
from trainer_backend.errors import BadChatRequest
from trainer_backend.inference.actor import FrozenEngine
from trainer_backend.inference.chat_check import describe_chat, refuse_without_tools
from trainer_backend.inference.engine import stop_token_ids
from trainer_backend.inference.gateway_app import create_gateway
from trainer_backend.inference.rendering import ChatRenderer
from trainer_backend.inference.served_policy import ServedPolicy, find_opening
from trainer_backend.inference.tool_format import detect_tool_format
from trainer_backend.job.tables import ModelTable
from trainer_backend.learner.loading import load_named
from trainer_backend.models.folder import load_tokenizer
from trainer_backend.models.tokenizer import TOOL_CALL_FORMAT_KEY
from trainer_backend.plugins import TOOL_FORMATS

torch.set_num_threads(1)

SYSTEM = {"role": "system", "content": "You play."}
USER = {"role": "user", "content": "wood2 tree"}
ARGUMENTS = '{"actions": ["do", "sleep"]}'


def written_by(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], stop: str) -> StandInEngine:
    """An engine that writes these texts, each ended by `stop`, as if the model had sampled them."""
    renderer = ChatRenderer(tokenizer)
    return StandInEngine([renderer.encode(text) + renderer.encode(stop) for text in texts])


@contextmanager
def open_client(engine: FrozenEngine, tokenizer: PreTrainedTokenizerFast) -> Iterator[openai.OpenAI]:
    app = create_gateway({"job/actor": ServedPolicy(engine, tokenizer)}, key="key")
    with (
        ServerThread(app, Listener("127.0.0.1", 0)) as base,
        openai.OpenAI(base_url=f"{base}/v1", api_key="key", max_retries=0, timeout=20) as client,
    ):
        yield client


def called(call_id: str = "call_0") -> dict[str, object]:
    call = {"id": call_id, "type": "function", "function": {"name": "interact_many", "arguments": ARGUMENTS}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.fixture
def tokenizer(family: Family, model_folders: Mapping[str, Path]) -> PreTrainedTokenizerFast:
    return load_tokenizer(model_folders[family.name])


def test_a_prompt_shows_the_tool_and_begins_with_one_first_token(family, tokenizer, tools):
    renderer = ChatRenderer(tokenizer)
    text = renderer.prompt_text([SYSTEM, USER], tools)
    assert "interact_many" in text and "You play." in text and "wood2 tree" in text
    ids = renderer.encode(text)
    assert renderer.decode(ids) == text
    first = tokenizer.bos_token_id
    assert first is None or (ids[0] == first and first not in ids[1:])


@pytest.mark.parametrize("choice", ["auto", "required", "named"])
def test_the_openai_client_gets_a_call_and_goes_on_from_the_exact_ids_also_where_it_is_forced(
    family: Family, tokenizer: PreTrainedTokenizerFast, tools: list[dict[str, object]], choice: str
):
    """A forced call begins in the prompt; the sampled ids are what follows; the next prompt holds both."""
    other = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
    named = {"type": "function", "function": {"name": "interact_many"}}
    renderer = ChatRenderer(tokenizer)
    before, name, after = family.written.partition("interact_many")
    # The model writes the name itself where several tools are allowed.
    opening = {
        "auto": "",
        "required": before.removesuffix('"').rstrip(" "),
        "named": before + name + after[: after.index("{")].rstrip(" "),
    }[choice]
    rest = family.written.removeprefix(opening)
    ask = {"model": "job/actor", "tools": [*tools, other], "extra_headers": {ROLLOUT_HEADER: "r"}}
    with open_client(written_by(tokenizer, [rest, "tree"], family.stop), tokenizer) as client:
        first = client.chat.completions.create(
            messages=[SYSTEM, USER], tool_choice=named if choice == "named" else choice, **ask
        )
        message = first.choices[0].message
        (call,) = message.tool_calls
        assert (call.function.name, call.function.arguments) == ("interact_many", ARGUMENTS)
        # What the template writes before a call is not the model's.
        assert (message.content, first.choices[0].finish_reason) == (None, "tool_calls")
        prompt = renderer.decode(first.prompt_token_ids)
        assert prompt.endswith(opening) and renderer.decode(first.choices[0].token_ids) == rest + family.stop
        assert ("other" in prompt.removesuffix(opening)) == (choice != "named"), "the forced tool alone"
        result = {"role": "tool", "tool_call_id": call.id, "content": "wood3"}
        messages = [SYSTEM, USER, message.model_dump(exclude_none=True), result]
        if choice == "named":
            ask["tools"] = tools
        second = client.chat.completions.create(messages=messages, **ask)
    assert second.choices[0].message.content.strip() == "tree"
    seen = first.prompt_token_ids + first.choices[0].token_ids
    # Mistral's templates write a call with its id and a text with a space before it: neither is what was
    # sampled, so the whole conversation is rendered again.
    assert second.prompt_ids_reused == (0 if family.name == "mistral" else len(seen))
    assert renderer.decode(second.prompt_token_ids).count("wood3") == 1


def test_the_model_writes_a_name_that_would_break_the_call_and_no_call_begins_that_none_would_read(
    model_folders: Mapping[str, Path],
):
    tokenizer = load_tokenizer(model_folders["qwen3"])
    policy = ServedPolicy(StandInEngine(), tokenizer)
    names = ("act", "", "Σ-é.x/y", 'a"b', "a\\b", "a\nb")
    written = [policy.name_to_write([{"function": {"name": name}}]) for name in names]
    assert written == ["act", "", "Σ-é.x/y", None, None, None]
    tokenizer.init_kwargs[TOOL_CALL_FORMAT_KEY] = "mistral"
    assert ServedPolicy(StandInEngine(), tokenizer).call_opening is None


def test_a_forced_call_is_streamed_as_a_call_alone(family, tokenizer, tools):
    rest = family.written.partition("interact_many")[2]
    rest = rest[rest.index("{") - 1 :]
    with open_client(written_by(tokenizer, [rest], family.stop), tokenizer) as client:
        chunks = list(
            client.chat.completions.create(
                model="job/actor", messages=[USER], tools=tools, tool_choice="required", stream=True
            )
        )
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    (call,) = [call for delta in deltas for call in delta.tool_calls or ()]
    assert call.function.arguments == ARGUMENTS
    assert not "".join(delta.content or "" for delta in deltas)


def test_the_bytes_of_single_tokens_are_those_of_the_text(tokenizer: PreTrainedTokenizerFast):
    renderer = ChatRenderer(tokenizer)
    text = "wood €日\N{GRINNING FACE}é\ufffd 2\n"
    ids = renderer.encode(f"x{text}")
    found = [byte for token in ids for byte in renderer.token_bytes(token)]
    assert bytes(found).decode().lstrip() == f"x{text}"


def test_a_reply_of_the_local_engine_is_sampled_decoded_and_ended(family, model_folders, tools, start_engine):
    model, tokenizer = load_named(ModelTable(path=model_folders[family.name]))
    stops = stop_token_ids(model.generation_config, tokenizer)
    with open_client(start_engine(model, stop_ids=stops, max_model_len=512), tokenizer) as client:
        reply = client.chat.completions.create(
            model="job/actor", messages=[SYSTEM, USER], tools=tools, max_tokens=12, seed=3, logprobs=True,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
    (choice,) = reply.choices
    own = logprobs_under(model, reply.prompt_token_ids, choice.token_ids)
    assert choice.token_logprobs == pytest.approx(own, abs=1e-5)
    assert (choice.token_ids[-1] in stops) == (choice.sampling_finish_reason == "stop")


async def test_an_id_without_text_can_be_sampled_and_is_shown(model_folders, start_engine):
    model, tokenizer = load_named(ModelTable(path=model_folders["qwen3"]))
    with torch.no_grad():
        model.model.norm.weight.zero_()  # all logits are 0: every id is as likely
    generation = await ask(start_engine(model, max_model_len=512), [5], seed=5, tokens=200)
    strange = [token for token in generation.token_ids if token >= len(tokenizer)]
    assert strange, "37 of 646 ids are unknown, and 200 were drawn"
    assert ChatRenderer(tokenizer).decode(strange) == "\ufffd" * len(strange)


# By template: whose tokenizer it is tried with, its format, how a forced call begins, and what becomes of
# earlier reasoning.
BEHIND_QUESTION = "is dropped behind the user's next question"
BEHIND_ANSWERS, STAYS = "is dropped behind every answer", "stays in later prompts"
TEMPLATES = {
    "llama": ("llama", "llama", '{"name": "turnwise_probe", "parameters":', BEHIND_ANSWERS),
    "mistral": (
        "mistral", "mistral", '[TOOL_CALLS] [{"name": "turnwise_probe", "arguments":', BEHIND_ANSWERS,
    ),
    "mistral_args": ("mistral", "mistral", "[TOOL_CALLS]turnwise_probe[ARGS]", BEHIND_ANSWERS),
    "qwen3": ("qwen3", "hermes", '<tool_call>\n{"name": "turnwise_probe", "arguments":', BEHIND_QUESTION),
    "qwen3_coder": (
        "qwen3", "qwen3_coder", "<tool_call>\n<function=turnwise_probe>\n", STAYS,
    ),
    "qwen3_5": (
        "qwen3", "qwen3_coder", "</think>\n\n<tool_call>\n<function=turnwise_probe>\n", BEHIND_QUESTION,
    ),
    "harmony": (
        "qwen3", "harmony", " to=functions.turnwise_probe<|channel|>commentary json<|message|>",
        BEHIND_QUESTION,
    ),
    "gemma4": ("qwen3", "gemma4", "<|tool_call>call:turnwise_probe{", BEHIND_QUESTION),
    "glm": ("qwen3", "glm", "<tool_call>turnwise_probe\n", BEHIND_QUESTION),
    "lfm2": ("qwen3", "lfm2", "<|tool_call_start|>[turnwise_probe(", BEHIND_QUESTION),
    "deepseek": (
        "qwen3", "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>turnwise_probe<｜tool▁sep｜>",  # noqa: RUF001
        BEHIND_ANSWERS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_tells_its_format_and_what_becomes_of_reasoning(template, model_folders, tools):
    family, tool_format, opening, kept = TEMPLATES[template]
    tokenizer = load_tokenizer(model_folders[family])
    tokenizer.chat_template = chat_template(template)
    assert detect_tool_format(tokenizer) == tool_format
    refuse_without_tools(tokenizer)
    renderer, known = ChatRenderer(tokenizer), TOOL_FORMATS[tool_format]
    (call,) = known.parse(renderer.answer_text([SYSTEM, USER], called(), tools), tools).tool_calls
    assert (call.name, call.arguments) == ("interact_many", ARGUMENTS)
    found = find_opening(renderer, known)
    assert (found.lead + found.text("turnwise_probe")).lstrip("\n") == opening
    assert describe_chat(tokenizer).startswith(f"tool calls: {tool_format}; reasoning {kept}")


# The shape of SmolLM3's and LFM2's templates: they print no calls of earlier answers.
DROPS_CALLS = """\
{%- if tools -%}<|im_start|>system
{{ tools | tojson }} OPENING<|im_end|>{{- '\\n' }}{%- endif -%}
{%- for m in messages -%}
<|im_start|>{{ m.role }}{{ '\\n' + m.content }}<|im_end|>{{- '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant{{- '\\n' }}{%- endif -%}"""


@pytest.mark.parametrize(
    ("opening", "written"),
    [
        ("<tool_call>", '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'),
        ("<|tool_list_start|>", "<|tool_call_start|>[f(x='é')]<|tool_call_end|>"),
    ],
)
def test_calls_that_a_template_leaves_out_are_written_as_its_format_writes_them(
    opening: str, written: str, model_folders: Mapping[str, Path], tools: list[dict[str, object]]
):
    tokenizer = load_tokenizer(model_folders["qwen3"])
    tokenizer.chat_template = DROPS_CALLS.replace("OPENING", opening)
    refuse_without_tools(tokenizer)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    answer = {"role": "assistant", "content": "Go.", "tool_calls": [call]}
    text = ChatRenderer(tokenizer).prompt_text([USER, answer], tools)
    assert f"assistant\nGo.\n{written}<|im_end|>" in text


def test_reasoning_in_a_channel_is_apart_from_content_and_streamed_at_the_end(model_folders, tools):
    tokenizer = load_tokenizer(model_folders["qwen3"])
    tokenizer.chat_template = chat_template("harmony")
    thought = "<|channel|>analysis<|message|>a tree?<|end|><|start|>assistant<|channel|>"
    call = f"{thought}commentary to=functions.interact_many <|constrain|>json<|message|>{ARGUMENTS}"
    texts = [call, f"{thought}final<|message|>tree"]
    with open_client(written_by(tokenizer, texts, "<|im_end|>"), tokenizer) as client:
        ask = {"model": "job/actor", "tools": tools, "messages": [USER]}
        message = client.chat.completions.create(**ask).choices[0].message
        assert [part.function.arguments for part in message.tool_calls] == [ARGUMENTS]
        assert (message.content, message.reasoning_content) == (None, "a tree?")
        chunks = list(client.chat.completions.create(stream=True, **ask))
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "tree"
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "a tree?"


@pytest.mark.parametrize(
    ("family", "messages", "says"),
    [
        ("mistral", [USER, USER], "conversation roles must alternate"),
        ("mistral", [USER, {"role": "critic", "content": "no"}], "Only user, assistant and tool roles"),
        (
            "llama",
            [USER, {**called(), "tool_calls": [*called()["tool_calls"], *called("x")["tool_calls"]]}],
            "only supports single tool-calls",
        ),
        ("llama", [SYSTEM], "when there is none"),
    ],
)
def test_what_a_family_does_not_take_is_told_in_the_words_of_its_template(
    family, messages, says, model_folders, tools
):
    renderer = ChatRenderer(load_tokenizer(model_folders[family]))
    with pytest.raises(BadChatRequest, match=says) as caught:
        renderer.prompt_text(messages, tools)
    assert caught.value.where == "messages"


def test_call_ids_become_nine_letters_and_digits_alike_in_call_and_result_and_stay_different(
    model_folders, tools
):
    renderer = ChatRenderer(load_tokenizer(model_folders["mistral"]))
    own = "a1B2c3D4e"
    given = [own, "call_8f3a_1", "x" * 9, "\N{SNOWMAN}" * 9, "", *(f"call_{i}" for i in range(20))]
    written = []
    for call_id in given:
        result = {"role": "tool", "tool_call_id": call_id, "content": "wood3"}
        text = renderer.prompt_text([USER, called(call_id), result], tools)
        in_call = json.loads(text.partition("[TOOL_CALLS] ")[2].partition("</s>")[0])[0]["id"]
        in_result = json.loads(text.partition("[TOOL_RESULTS] ")[2].partition("[/TOOL_RESULTS]")[0])
        assert in_result["call_id"] == in_call
        written.append(in_call)
    assert all(len(call_id) == 9 and call_id.isascii() and call_id.isalnum() for call_id in written)
    assert written[0] == own and len(set(written)) == len(given)


def test_an_empty_list_of_calls_is_no_call(model_folders: Mapping[str, Path], tools: list[dict[str, object]]):
    answer = {"role": "assistant", "content": "tree"}
    for family in FAMILIES:
        renderer = ChatRenderer(load_tokenizer(model_folders[family.name]))
        texts = {
            renderer.prompt_text([USER, {**answer, **extra}, USER], tools)
            for extra in ({}, {"tool_calls": None}, {"tool_calls": []})
        }
        assert len(texts) == 1


def test_the_template_is_told_what_the_job_says(model_folders: Mapping[str, Path]):
    table = ModelTable(path=model_folders["llama"], chat_template_kwargs={"date_string": "1 Jan 2030"})
    _, tokenizer = load_named(table)
    assert "Today Date: 1 Jan 2030" in ChatRenderer(tokenizer).prompt_text([USER], [])
