"""Folders laid out as those of Qwen3, Llama 3.2 and Mistral 7B: what comes out of them is what they hold.

And what a fixed policy needs of its folder: the digest of its weights, and no rows that the actor lacks.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.conftest import tiny_job
from tests.model_folders import FAMILIES, PADDING_ROWS
from trainer_backend import learner_parts
from trainer_backend.inference.engine import stop_token_ids
from trainer_backend.inference.rendering import ChatRenderer
from trainer_backend.job.tables import ModelTable
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.learner.loading import load_named
from trainer_backend.models.folder import (
    drop_rows_beyond,
    embedding_rows,
    fingerprint,
    load_model_folder,
    save_model_folder,
)
from trainer_backend.parts import Progress

torch.set_num_threads(1)

NAMES = [family.name for family in FAMILIES]
Loaded = Mapping[str, tuple[PreTrainedModel, PreTrainedTokenizerFast]]


@pytest.fixture(scope="module")
def loaded(model_folders: Mapping[str, Path]) -> Loaded:
    """For reading only."""
    return {name: load_named(ModelTable(path=model_folders[name])) for name in NAMES}


@pytest.mark.parametrize("family", NAMES)
def test_bfloat16_weights_become_a_master_copy_in_float32(
    family: str, loaded: Loaded, model_folders: Mapping[str, Path]
):
    model, _ = loaded[family]
    on_disk: dict[str, torch.Tensor] = {}
    for file in model_folders[family].glob("*.safetensors"):
        on_disk.update(load_file(file))
    state = model.state_dict()
    assert all(tensor.dtype == torch.bfloat16 for tensor in on_disk.values())
    assert all(torch.equal(state[name], tensor.float()) for name, tensor in on_disk.items())
    assert not model.training
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (family != "mistral"), "tied or not"


@pytest.mark.parametrize(
    ("family", "ends"),
    [
        ("qwen3", ["<|im_end|>", "<|endoftext|>"]),
        ("llama", ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]),
        ("mistral", ["</s>"]),
    ],
)
def test_every_end_token_of_the_generation_config_ends_a_reply(family: str, ends: list[str], loaded: Loaded):
    model, tokenizer = loaded[family]
    found = set(stop_token_ids(model.generation_config, tokenizer))
    assert found == set(tokenizer.convert_tokens_to_ids(ends))


@pytest.mark.parametrize("family", NAMES)
def test_a_checkpoint_gives_back_model_tokenizer_and_templates(
    family: str, model_folders: Mapping[str, Path], tmp_path: Path
):
    job = tiny_job(model__preset=None, model__path=str(model_folders[family]))
    learner = LocalLearner.fresh(learner_parts.learner_config(job), [])
    learner.save(tmp_path / "iteration_1", Progress(iteration=1))
    again, progress = LocalLearner.resumed(learner_parts.learner_config(job), tmp_path / "iteration_1")
    assert progress.iteration == 1
    assert all(torch.equal(tensor, again.weights()[name]) for name, tensor in learner.weights().items())
    assert again.tokenizer.chat_template == learner.tokenizer.chat_template
    text = "hp9 wood0\n<unk> \N{SNOWMAN}"
    assert ChatRenderer(again.tokenizer).encode(text) == ChatRenderer(learner.tokenizer).encode(text)


def test_what_the_job_says_of_the_chat_stands_in_its_checkpoints_too(
    model_folders: Mapping[str, Path], tmp_path: Path
):
    asked = [{"role": "user", "content": "wood"}]
    job = tiny_job(
        model__preset=None,
        model__path=str(model_folders["qwen3"]),
        model__tool_call_format="hermes",
        model__chat_template_kwargs={"enable_thinking": False},
    )
    LocalLearner.fresh(learner_parts.learner_config(job), []).save(tmp_path / "iteration_1", Progress())
    without = tiny_job(model__preset=None, model__path=str(model_folders["qwen3"]))
    again, _ = LocalLearner.resumed(learner_parts.learner_config(without), tmp_path / "iteration_1")
    assert ChatRenderer(again.tokenizer).prompt_text(asked, []).endswith("<think>\n\n</think>\n\n")
    settings = json.loads((tmp_path / "iteration_1/tokenizer_config.json").read_text())
    assert settings["turnwise_tool_call_format"] == "hermes"


def test_an_id_that_only_the_embedding_knows_is_shown_and_never_makes_a_broken_call_whole(loaded: Loaded):
    model, tokenizer = loaded["qwen3"]
    unknown = len(tokenizer)
    assert embedding_rows(model) == unknown + PADDING_ROWS
    renderer = ChatRenderer(tokenizer)
    ids = renderer.encode("<tool_call>wood")
    assert renderer.decode([unknown, *ids, unknown + 3, unknown + 4, *ids]) == (
        "\ufffd<tool_call>wood\ufffd\ufffd<tool_call>wood"
    )


def test_a_tokenizer_that_was_saved_with_a_length_cuts_nothing(
    model_folders: Mapping[str, Path], tmp_path: Path
):
    folder = tmp_path / "model"
    shutil.copytree(model_folders["llama"], folder)
    path = folder / "tokenizer.json"
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps({**json.loads(path.read_text()), "truncation": cut}))
    _, tokenizer = load_named(ModelTable(path=folder))
    text = "wood " * 20
    renderer = ChatRenderer(tokenizer)
    assert renderer.decode(renderer.encode(text)) == text


@pytest.mark.parametrize("text", [" do", "do", "  do", "\N{SNOWMAN} do", "\n do", ""])
@pytest.mark.parametrize("family", NAMES)
def test_a_reply_keeps_the_space_that_it_begins_with(family: str, text: str, loaded: Loaded):
    renderer = ChatRenderer(loaded[family][1])
    before = renderer.encode("[/INST]" if family == "mistral" else "wood")
    whole = renderer.encode(("[/INST]" if family == "mistral" else "wood") + text)
    assert whole[: len(before)] == before
    assert renderer.decode(whole[len(before) :]) == text


def two_layers(first: torch.Tensor, second: torch.Tensor) -> nn.Module:
    model = nn.Module()
    model.first, model.second = nn.Parameter(first), nn.Parameter(second)
    return model


def test_a_fingerprint_tells_values_names_shapes_and_types_apart():
    one, two = torch.arange(6.0), torch.ones(2)
    models = [
        two_layers(one, two),
        two_layers(two, one),
        two_layers(one.view(2, 3), two),
        two_layers(one.bfloat16(), two),
        two_layers(one + torch.tensor([0.0, 0, 0, 0, 0, 2**-21]), two),
    ]
    assert len({fingerprint(model) for model in models}) == len(models)
    assert fingerprint(models[0]) == fingerprint(two_layers(torch.arange(6.0), torch.ones(2)))


def test_a_buffer_that_is_saved_with_the_weights_is_one_of_them():
    def model(value: float, *, persistent: bool) -> nn.Module:
        made = two_layers(torch.ones(2), torch.ones(2))
        made.register_buffer("scale", torch.tensor(value), persistent=persistent)
        return made

    assert fingerprint(model(1.0, persistent=True)) != fingerprint(model(2.0, persistent=True))
    # computed from the config again, with other rounding on each machine
    assert fingerprint(model(1.0, persistent=False)) == fingerprint(model(2.0, persistent=False))


def test_a_fingerprint_is_that_of_the_weights_and_not_of_their_files(
    model_folders: Mapping[str, Path], tmp_path: Path
):
    model, tokenizer = load_model_folder(model_folders["qwen3"])
    save_model_folder(tmp_path / "again", model, tokenizer)
    assert fingerprint(load_model_folder(tmp_path / "again")[0]) == fingerprint(model)
    shutil.copytree(model_folders["qwen3"], tmp_path / "copy")
    assert fingerprint(load_model_folder(tmp_path / "copy")[0]) == fingerprint(model)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])  # tied embedding, and not
def test_rows_that_are_dropped_change_no_logit_of_the_others(model_folders: Mapping[str, Path], family: str):
    model, _ = load_model_folder(model_folders[family])
    rows = embedding_rows(model)
    kept = rows - PADDING_ROWS
    ids = torch.arange(8)[None]
    with torch.inference_mode():
        before = model(ids).logits
        assert drop_rows_beyond(model, kept) == PADDING_ROWS
        after = model(ids).logits
    assert embedding_rows(model) == after.shape[-1] == kept
    torch.testing.assert_close(after, before[..., :kept], rtol=0, atol=0)
    assert (drop_rows_beyond(model, kept), drop_rows_beyond(model, rows)) == (0, 0)
    assert embedding_rows(model) == kept, "a smaller model keeps its rows"
