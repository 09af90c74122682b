import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from trainer_backend.errors import ModelFolderError
from trainer_backend.models import (
    PRESETS,
    build_preset,
    load_model_folder,
    save_model_folder,
    train_tokenizer,
)
from trainer_backend.models.tokenizer import SPECIAL_TOKENS

torch.set_num_threads(1)

ACTIONS = (
    "noop", "move_left", "move_right", "move_up", "move_down", "do", "sleep", "place_stone", "place_table",
    "place_furnace", "place_plant", "make_wood_pickaxe", "make_stone_pickaxe", "make_iron_pickaxe",
    "make_wood_sword", "make_stone_sword", "make_iron_sword",
)  # fmt: skip
TEXTS = [f"hp {i % 10} wood {i % 7} stone {i % 5}\ntree 2,{i % 4} zombie" for i in range(60)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(TEXTS, 1024, whole_words=ACTIONS)


def test_every_action_and_every_frequent_word_is_one_token(tokenizer: PreTrainedTokenizerFast):
    for word in [*ACTIONS, "wood", "stone", "zombie"]:
        assert len(tokenizer.encode(f" {word}")) == 1, word
    assert len(tokenizer.encode("<|call|> move_left do<|end|>")) == 4
    assert len(tokenizer) <= 1024


def test_every_special_token_is_one_token_and_never_part_of_a_merge():
    tokenizer = train_tokenizer(["<|user|>wood 1<|end|>"] * 50, 400)
    for special in SPECIAL_TOKENS:
        assert len(tokenizer.encode(special)) == 1
    merged = [token for token in tokenizer.get_vocab() if "<|" in token]
    assert sorted(merged) == sorted(SPECIAL_TOKENS)


@given(st.text())
def test_any_text_decodes_to_exactly_what_was_encoded(text: str):
    backend = TOKENIZER.backend_tokenizer
    assert (
        backend.decode(backend.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text
    )


TOKENIZER = train_tokenizer(TEXTS, 400)


def test_training_is_deterministic(tokenizer: PreTrainedTokenizerFast):
    again = train_tokenizer(TEXTS, 1024, whole_words=ACTIONS)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_a_vocabulary_too_small_for_the_whole_words_is_an_error_that_names_them():
    with pytest.raises(ModelFolderError, match=r"a vocabulary of 270 splits .*move_left"):
        train_tokenizer(TEXTS, 270, whole_words=ACTIONS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_millions_of_parameters_of_its_name(name: str, tokenizer: PreTrainedTokenizerFast):
    with torch.device("meta"):
        parameters = sum(p.numel() for p in build_preset(name, tokenizer).parameters())
    millions = float(name.rpartition("-")[2].removesuffix("m"))
    assert 0.8 * millions < parameters / 1e6 < 1.2 * millions


def test_the_weights_of_a_preset_depend_on_its_seed_alone(tokenizer: PreTrainedTokenizerFast):
    before = torch.random.get_rng_state()
    first, same, other = (build_preset("tiny-0.3m", tokenizer, seed=n).state_dict() for n in (3, 3, 4))
    assert all(torch.equal(first[key], same[key]) for key in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert torch.equal(torch.random.get_rng_state(), before), "the caller's random numbers are not touched"


def test_the_first_logits_of_a_preset_spread_as_far_at_any_width(tokenizer: PreTrainedTokenizerFast):
    # a state after its norm has length sqrt(width), so a logit deviates by sqrt(width) * the weights' own
    narrow, wide = (build_preset(name, tokenizer) for name in ("tiny-0.8m", "small-26m"))
    assert narrow.config.initializer_range == 0.06
    assert wide.config.initializer_range == pytest.approx(0.06 * (128 / 512) ** 0.5)
    ids = torch.tensor([tokenizer.encode("hp 9 wood 2 stone 1")])
    with torch.no_grad():
        spreads = [float(model(ids).logits.std()) for model in (narrow, wide)]
    assert spreads[0] == pytest.approx(spreads[1], rel=0.1)


def test_the_heads_of_a_preset_are_as_wide_as_the_model_and_vllm_on_a_cpu_has_attention_for_them():
    # get_supported_head_sizes of vllm/v1/attention/backends/cpu_attn.py, 0.32.0
    supported = {32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512}
    assert {preset.head_dim for preset in PRESETS.values()} <= supported
    assert all(preset.heads * preset.head_dim == preset.width for preset in PRESETS.values())


def test_an_unknown_preset_gets_a_suggestion(tokenizer: PreTrainedTokenizerFast):
    with pytest.raises(ModelFolderError, match=r"Did you mean 'tiny-0\.3m'"):
        build_preset("tiny-0.3", tokenizer)


def test_a_saved_folder_gives_the_same_model_tokenizer_and_template(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
):
    model = build_preset("tiny-0.3m", tokenizer, seed=2)
    save_model_folder(tmp_path, model, tokenizer)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast", "a class that transformers 4 knows"
    loaded, loaded_tokenizer = load_model_folder(tmp_path)
    ids = torch.tensor([tokenizer.encode("wood 1 stone 2")])
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert not loaded.training
    assert loaded_tokenizer.chat_template == tokenizer.chat_template
    assert loaded_tokenizer.init_kwargs["turnwise_tool_call_format"] == "turnwise"
    assert loaded.generation_config.eos_token_id == tokenizer.eos_token_id


def test_a_folder_that_cannot_be_loaded_says_why(tokenizer: PreTrainedTokenizerFast, tmp_path: Path):
    with pytest.raises(ModelFolderError, match="no such folder"):
        load_model_folder(tmp_path / "nowhere")
    with pytest.raises(ModelFolderError, match=r"no config\.json"):
        load_model_folder(tmp_path)
    build_preset("tiny-0.3m", TOKENIZER).config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ModelFolderError, match="the model cannot be loaded"):
        load_model_folder(tmp_path)
