"""Dialogues of any shape through the templates of three families: what was sampled is trained, once."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from shared_schemas.trajectory import ObservationData, PolicyLogprobs, Sampling, StepData
from tests.model_folders import chat_template
from trainer_backend.core.segments import Segment, build_segments
from trainer_backend.errors import BadChatRequest
from trainer_backend.inference.answers import Answer, hash_message
from trainer_backend.inference.conversations import Conversations, Prompt, Turn
from trainer_backend.inference.engine import stop_token_ids
from trainer_backend.inference.rendering import ChatRenderer
from trainer_backend.inference.reply import assistant_message
from trainer_backend.inference.tool_format import tool_format_in_use
from trainer_backend.models.folder import load_tokenizer

# Template, whose tokenizer, the stop tokens of a call and of text, and whether the template goes on from
# every answer of a plain dialogue.
TEMPLATES = {
    "llama": ("llama", "<|eot_id|>", "<|eot_id|>", True),
    "qwen3": ("qwen3", "<|im_end|>", "<|im_end|>", True),
    "qwen3_coder": ("qwen3", "<|im_end|>", "<|im_end|>", True),
    "mistral": ("mistral", "</s>", "</s>", False),
    "mistral_args": ("mistral", "</s>", "</s>", False),
    "mistral_plain": ("mistral", "</s>", "</s>", False),
    "harmony": ("qwen3", "<|call|>", "<|return|>", False),
    "gemma4": ("qwen3", "<|tool_response>", "<turn|>", True),
    "glm": ("qwen3", "<|observation|>", "<|user|>", False),
    "lfm2": ("qwen3", "<|im_end|>", "<|im_end|>", True),
    "qwen3_5": ("qwen3", "<|im_end|>", "<|im_end|>", False),
    "deepseek": ("qwen3", "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>", True),  # noqa: RUF001
}
CALLS = {
    "llama": '{"name": "f",  "parameters": {"x": %d}}',
    "qwen3": '<tool_call>{"name":"f",  "arguments":{"x":%d}}</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=x>\n%d\n</parameter>\n</function>\n</tool_call>",
    "mistral": '[TOOL_CALLS] [{"name":"f", "arguments":{"x": %d}}]',
    "mistral_args": '[TOOL_CALLS]f[ARGS]{"x":  %d}',
    "mistral_plain": "f(%d)",
    "harmony": '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x":  %d}',
    "gemma4": "<|tool_call>call:f{x: %d}<tool_call|>",
    "glm": "\n<tool_call>f<arg_key>x</arg_key><arg_value>%d</arg_value></tool_call>",
    "lfm2": "<|tool_call_start|>[f(x = %d)]<|tool_call_end|>",
    "qwen3_5": "<tool_call><function=f><parameter=x>%d</parameter></function></tool_call>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"  # noqa: RUF001
    '{"x":%d}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',  # noqa: RUF001
}
# The model's reasoning before a call. What the template shows of it is dropped behind the next question.
THOUGHTS = {
    "qwen3": "<think>\nhm\n</think>\n\n",
    "harmony": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant",
    "gemma4": "<|channel>thought\nhm\n<channel|>",
    "glm": "\n<think>hm</think>",
    "lfm2": "<think>hm</think>",
    "qwen3_5": "hm \n</think>\n\n",
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "d",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
        },
    }
]


@dataclass
class Played:
    """A dialogue with a scripted model: prompts and turns as the gateway makes them, steps as they arrive."""

    renderer: ChatRenderer
    stops: tuple[str, str]
    memory: Conversations = field(default_factory=lambda: Conversations(most=2))
    messages: list[dict[str, Any]] = field(default_factory=lambda: [{"role": "user", "content": "wood 2"}])
    prompts: list[Prompt] = field(default_factory=list)
    sampled: list[list[int]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    steps: list[StepData] = field(default_factory=list)

    def prompt(self) -> Prompt:
        return self.memory.prompt("r", self.messages, TOOLS, self.renderer)

    def turn(self, raw: str, *, cut: bool = False) -> None:
        """The model says `raw`, a character a token; `cut`: it was ended by its length."""
        prompt = self.prompt()
        parse = tool_format_in_use(self.renderer.tokenizer).parse
        stop = "" if cut else self.stops[0 if parse(raw, TOOLS).tool_calls else 1]
        ids = [token for character in raw for token in sampled_ids(character, self.renderer)]
        ids += self.renderer.encode(stop)[-1:] if stop else []
        raw = self.renderer.decode(ids[:-1] if stop else ids)
        message = assistant_message(parse(raw, TOOLS), prompt_ids=prompt.ids, token_ids=ids)
        # A client sends back what OpenAI's API knows.
        reasoning = message.pop("reasoning_content", "")
        answer = Answer(len(self.messages), hash_message(message), raw, stop, reasoning=reasoning)
        self.turns.append(Turn.of(prompt, answer, ids, self.renderer))
        self.memory.remember("r", self.turns[-1])
        self.messages.append(json.loads(json.dumps(message)))
        self.prompts.append(prompt)
        self.sampled.append(ids)
        self.steps.append(step(len(self.steps) + 1, prompt, ids))

    def answered(self, text: str) -> None:
        """The tool or the user answers the last message."""
        calls = self.messages[-1].get("tool_calls") or ()
        self.messages += [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls]
        if not calls:
            self.messages.append({"role": "user", "content": text})

    def segments(self) -> list[Segment]:
        return build_segments(self.steps, rollout_id="r")


def sampled_ids(character: str, renderer: ChatRenderer) -> list[int]:
    """Ids of a character behind another one, so that no family puts a space before it."""
    front = renderer.encode("x")
    return renderer.encode(f"x{character}")[len(front) :] or renderer.encode(character)


def step(turn: int, prompt: Prompt, ids: list[int]) -> StepData:
    return StepData(
        turn=turn,
        observation_data=ObservationData(),
        action_taken={"type": "text"},
        policy_name="openai",
        sampling=Sampling(),
        policy_logprobs=PolicyLogprobs(
            prompt_ids_reused=prompt.reused,
            prompt_token_ids=tuple(prompt.ids[prompt.reused :]),
            token_ids=tuple(ids),
            logprobs=(-0.5,) * len(ids),
            finish_reason="stop",
            versions=((0, 0),),
        ),
    )


@pytest.fixture(scope="module")
def tokenizers(model_folders: Mapping[str, Path]) -> dict[str, PreTrainedTokenizerFast]:
    found = {}
    for name, (family, *stops, _) in TEMPLATES.items():
        found[name] = load_tokenizer(model_folders[family])
        found[name].add_special_tokens({"additional_special_tokens": list(stops)})
        if name in ("harmony", "deepseek"):  # what ends other answers stands in no tokenizer_config.json
            found[name].eos_token = stops[-1]
        found[name].chat_template = chat_template(name)
    return found


TEXTS = st.sampled_from(["go", " wood ", "tree\n", "a  b", "<think>\nhm\n</think>\n\nwood", "1 + 1 = 2"])
WORDS = st.fixed_dictionaries(
    {"thinks": st.booleans(), "call": st.booleans(), "text": TEXTS, "cut": st.booleans()}
)
EDITS = st.one_of(st.none(), st.integers(0, 20))
TURNS = st.lists(st.tuples(WORDS, EDITS), min_size=2, max_size=6)


def play(played: Played, name: str, turns: list[tuple[dict[str, Any], int | None]]) -> list[int]:
    """Which decisions came right behind an edit that changed something, from 0."""
    edits = []
    for number, (words, edit) in enumerate(turns):
        thought = THOUGHTS.get(name, "") if words["thinks"] else ""
        played.turn(thought + (CALLS[name] % number if words["call"] else words["text"]), cut=words["cut"])
        played.answered(f"tree {number}")
        # From here on the last message is new: an edit of it is none.
        if edit is not None:
            index = edit % (len(played.messages) - 1)
            message = played.messages[index]
            if message["content"] not in ("[deleted]", None):
                played.messages[index] = {**message, "content": "[deleted]"}
                edits.append(number + 1)
    return [edit for edit in edits if edit < len(turns)]


@pytest.mark.parametrize("name", TEMPLATES)
@given(turns=TURNS)
@settings(max_examples=20, deadline=None)
def test_every_prompt_is_spelled_and_every_sampled_token_trained_once_on_its_view(name, turns, tokenizers):
    renderer = ChatRenderer(tokenizers[name])
    played = Played(renderer, TEMPLATES[name][1:3])
    try:
        edits = play(played, name, turns)
    except BadChatRequest:
        assert name.startswith("mistral"), "its templates refuse some orders of messages"
        return
    spelled: list[int] = []
    for prompt, ids in zip(played.prompts, played.sampled, strict=True):
        assert list(prompt.ids[: prompt.reused]) == spelled[: prompt.reused]
        assert renderer.decode(prompt.ids) == prompt.text
        assert prompt.extends == (0 < prompt.reused == len(spelled))
        spelled = [*prompt.ids, *ids]
    segments = played.segments()
    breaks = [number for number, prompt in enumerate(played.prompts) if prompt.break_cause]
    assert len(segments) == 1 + len(breaks)
    trained = [
        (t, token)
        for s in segments
        for t, token in zip(s.decision, s.token_ids[s.sampled_positions], strict=True)
    ]
    assert trained == [(t, token) for t, ids in enumerate(played.sampled) for token in ids]
    for segment in segments:  # on the view that it was sampled from: the whole prompt stands before it
        for t in set(segment.decision):
            first = segment.sampled_positions[segment.decision == t][0]
            assert list(segment.token_ids[:first]) == list(played.prompts[t].ids)
    if TEMPLATES[name][3]:
        unedited = [n for n in breaks if n not in edits]
        assert set(edits) <= set(breaks), "an edit is another prompt"
        assert all(played.prompts[n].break_cause == "reasoning" for n in unedited)


@pytest.mark.parametrize("name", [name for name, (*_, extends) in TEMPLATES.items() if extends])
def test_a_dialogue_that_is_not_edited_is_one_segment(name: str, tokenizers: dict[str, Any]):
    played = Played(ChatRenderer(tokenizers[name]), TEMPLATES[name][1:3])
    words = [{"thinks": False, "call": t % 2 == 0, "text": f" wood  {t}\n", "cut": t == 3} for t in range(12)]
    assert play(played, name, [(said, None) for said in words]) == []
    assert len(played.segments()) == 1
    assert [prompt.reused for prompt in played.prompts[1:]] == [
        len(prompt.ids) + len(ids)
        for prompt, ids in zip(played.prompts[:-1], played.sampled[:-1], strict=True)
    ]


@pytest.mark.parametrize("name", THOUGHTS)
def test_reasoning_stays_among_tool_calls_and_is_dropped_behind_the_next_question(name, tokenizers):
    played = Played(ChatRenderer(tokenizers[name]), TEMPLATES[name][1:3])
    for number in range(3):
        played.turn(THOUGHTS[name] + CALLS[name] % number)
        played.answered("next")
    answer = "<|channel|>final<|message|>wood" if name == "harmony" else "wood"
    played.turn(THOUGHTS[name] + answer)
    played.answered("more")
    played.turn(THOUGHTS[name] + CALLS[name] % 4)
    played.answered("next")
    played.turn("tree")
    # The tool's answers leave the thoughts; the user's next question takes all of them away, once.
    assert [prompt.break_cause for prompt in played.prompts] == [None] * 4 + ["reasoning", None]
    assert len(played.segments()) == 2 and "hm" not in played.prompts[4].text


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_the_model_has_to_write_ends_with_its_stop_token(name: str, tokenizers: dict[str, Any]):
    renderer = ChatRenderer(tokenizers[name])
    question = [{"role": "user", "content": "wood 2"}]
    call = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    answers = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "assistant", "content": "wood"},
    ]
    if name == "mistral_plain":
        answers = answers[1:]
    for answer, stop in zip(answers, TEMPLATES[name][3 - len(answers) : 3], strict=True):
        assert renderer.answer_text(question, answer, TOOLS).endswith(stop)
        assert renderer.encode(stop)[-1] in stop_token_ids(None, tokenizers[name])


def test_deepseek_drops_reasoning_behind_every_answer(tokenizers: dict[str, Any]):
    played = Played(ChatRenderer(tokenizers["deepseek"]), TEMPLATES["deepseek"][1:3])
    for number in range(3):
        played.turn("hm</think>" + CALLS["deepseek"] % number)
        played.answered("next")
    assert [prompt.break_cause for prompt in played.prompts] == [None, "reasoning", "reasoning"]


def test_a_template_that_moves_the_tools_cannot_go_on_and_that_is_told_each_time(tokenizers: dict[str, Any]):
    played = Played(ChatRenderer(tokenizers["mistral"]), ("</s>", "</s>"))
    for number in range(4):
        played.turn("wood")
        played.answered(f"next {number}")
    assert [prompt.break_cause for prompt in played.prompts] == [None, "template", "template", "template"]
    assert len(played.segments()) == 4


def test_a_space_that_the_template_puts_before_an_answer_breaks_no_prefix(tokenizers: dict[str, Any]):
    played = Played(ChatRenderer(tokenizers["mistral_plain"]), ("</s>", "</s>"))
    for number in range(4):
        played.turn("wood", cut=number == 2)  # the template writes " wood", and the model wrote no space
        played.answered(f"next {number}")
    assert len(played.segments()) == 1 and "wood</s>" in played.prompts[3].text
