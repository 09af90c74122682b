"""What keeps two models from being weighed against each other is named, the first difference of it."""

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tests.model_folders import edit_json
from tests.trainer_backend.inference.conftest import ACTIONS, crafter_like_prompt
from trainer_backend.inference.chat_check import first_difference
from trainer_backend.models import train_tokenizer
from trainer_backend.models.folder import load_tokenizer
from trainer_backend.models.tokenizer import CHAT_TEMPLATE_KWARGS_KEY, TOOL_CALL_FORMAT_KEY

Change = Callable[[PreTrainedTokenizerFast], object]


def test_a_tokenizer_speaks_as_itself_also_when_it_was_saved_and_read(tokenizer, tmp_path, model_folders):
    tokenizer.save_pretrained(tmp_path, save_jinja_files=False)
    assert first_difference(tokenizer, load_tokenizer(tmp_path)) is None
    for folder in model_folders.values():
        assert first_difference(load_tokenizer(folder), load_tokenizer(folder)) is None


def test_another_size_is_told_before_any_entry(tokenizer: PreTrainedTokenizerFast):
    texts = [crafter_like_prompt(i) for i in range(50)]
    smaller = train_tokenizer(texts, len(tokenizer) - 7, whole_words=ACTIONS)
    told = f"its vocabulary has {len(tokenizer) - 7} tokens, the actor's {len(tokenizer)}"
    assert first_difference(tokenizer, smaller) == told


def test_the_first_other_entry_is_named(tokenizer: PreTrainedTokenizerFast, tmp_path: Path):
    tokenizer.save_pretrained(tmp_path, save_jinja_files=False)
    file = tmp_path / "tokenizer.json"
    document = json.loads(file.read_text())
    vocabulary = document["model"]["vocab"]
    one, other = (next(text for text, number in vocabulary.items() if number == id_) for id_ in (300, 350))
    vocabulary |= {one: 350, other: 300}
    file.write_text(json.dumps(document))
    assert first_difference(tokenizer, load_tokenizer(tmp_path)) == (
        f"id 300 is {other!r} to it and {one!r} to the actor"
    )


def no_merges(tokenizer: PreTrainedTokenizerFast) -> None:
    """The same entries, of which the longer ones are never made."""
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    document["model"]["merges"] = []
    tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(document))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda it: setattr(it, "eos_token", "<|pad|>"), "its eos_token is '<|pad|>', the actor's '<|end|>'"),
        (
            lambda it: setattr(it, "chat_template", it.chat_template.replace("'<|assistant|>'", "'a'")),
            "its chat template goes on with",
        ),
        (
            lambda it: it.init_kwargs.update({CHAT_TEMPLATE_KWARGS_KEY: {"enable_thinking": True}}),
            "its chat template is told {'enable_thinking': True}, the actor's {}",
        ),
        (
            lambda it: it.init_kwargs.update({TOOL_CALL_FORMAT_KEY: "hermes"}),
            "its tool-call format is 'hermes', the actor's 'turnwise'",
        ),
        (no_merges, "the same text becomes other ids: number"),
    ],
)
def test_what_else_differs_is_named(tokenizer: PreTrainedTokenizerFast, change: Change, told: str):
    other = deepcopy(tokenizer)
    change(other)
    found = first_difference(tokenizer, other)
    assert found is not None and found.startswith(told)


def test_a_token_that_is_special_to_one_alone_is_named(model_folders: Mapping[str, Path], tmp_path: Path):
    own = load_tokenizer(model_folders["qwen3"])
    (token,) = (i for i, added in own.added_tokens_decoder.items() if added.content == "<tool_call>")
    own.save_pretrained(tmp_path, save_jinja_files=False)
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    for added in document["added_tokens"]:
        added["special"] |= added["id"] == token
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    if "added_tokens_decoder" in settings:
        settings["added_tokens_decoder"][str(token)]["special"] = True
    edit_json(tmp_path / "tokenizer_config.json", **settings)
    told = f"id {token} ('<tool_call>') is a special token to it and plain text to the actor"
    assert first_difference(own, load_tokenizer(tmp_path)) == told
