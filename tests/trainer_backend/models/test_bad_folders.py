"""Folders that are no model to train: each is refused with what was found and what was probably meant."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import tiny_job
from tests.model_folders import edit_json
from trainer_backend import learner_parts
from trainer_backend.errors import CheckpointError, ModelFolderError
from trainer_backend.job.tables import ModelTable
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.learner.loading import load_named
from trainer_backend.parts import Progress

torch.set_num_threads(1)

Change = Callable[[Path], object]


@pytest.fixture
def copied(model_folders: Mapping[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    def copy(family: str) -> Path:
        return Path(shutil.copytree(model_folders[family], tmp_path / family))

    return copy


def refused(folder: Path, says: str) -> None:
    with pytest.raises(ModelFolderError, match=says) as caught:
        load_named(ModelTable(path=folder))
    assert str(folder) in str(caught.value)


def without(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def with_text(name: str, text: str) -> Change:
    return lambda folder: (folder / name).write_text(text)


def with_keys(file: str, **changes: object) -> Change:
    return lambda folder: edit_json(folder / f"{file}.json", **changes)


def pickled(name: str) -> Change:
    return lambda folder: (folder / "model.safetensors").rename(folder / name)


def of_class(name: str, **changes: object) -> Change:
    return with_keys("config", architectures=[name], **changes)


def with_template(template: str | None) -> Change:
    return with_keys("tokenizer_config", chat_template=template)


def with_tokenizer(source: Path, target: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, target / name)


INDEX = "model.safetensors.index.json"
NEEDED = ".*a causal language model .decoder only. is needed"
QUANTISED = {"quantization_config": {"quant_method": "fp8"}}


@pytest.mark.parametrize(
    ("family", "change", "says"),
    [
        # a file that was not copied
        ("qwen3", without("model.safetensors"), r"no weights in this folder.*model\.safetensors"),
        ("qwen3", without("tokenizer.json"), "the tokenizer is missing"),
        ("mistral", without("model-00002-of-00003.safetensors"), "1 of 3 shards are missing, such as model"),
        ("mistral", with_text(INDEX, "{"), "cannot be read"),
        ("mistral", with_text(INDEX, '{"weight_map": 3}'), "names no files"),
        ("mistral", with_text(INDEX, "[]"), "no JSON object"),
        ("qwen3", with_text("config.json", "{"), "it cannot be read"),
        ("qwen3", with_text("config.json", "[]"), "no JSON object"),
        # weights of a deeper model are not cut in silence
        ("llama", with_keys("config", num_hidden_layers=1), r"would be left out, such as model\.layers\.1\."),
        ("llama", with_keys("config", intermediate_size=80), "the model cannot be loaded"),
        ("qwen3", with_keys("config", model_type="qwen9"), r"'qwen9', which transformers \d+\S* does not"),
        ("qwen3", with_keys("generation_config", eos_token_id=[640]), "id 640, but the tokenizer's None"),
        ("qwen3", with_keys("config", **QUANTISED), "are quantised .*Use the model from which"),
        ("qwen3", pickled("pytorch_model.bin"), "only pickled weights, which are refused"),
        ("qwen3", pickled("consolidated.00.pth"), "only pickled weights, which are refused"),
        ("qwen3", pickled("model.ckpt"), "only pickled weights, which are refused"),
        ("qwen3", of_class("BertForMaskedLM", model_type="bert"), f"it holds BertForMaskedLM{NEEDED}"),
        ("qwen3", of_class("ViTModel", model_type="vit"), f"it holds ViTModel{NEEDED}"),
        ("qwen3", of_class("Qwen3ForSequenceClassification"), f"Qwen3ForSequenceClassification{NEEDED}"),
        (
            "qwen3",
            of_class("T5ForConditionalGeneration", model_type="t5", is_encoder_decoder=True),
            f"an encoder with a decoder{NEEDED}",
        ),
        # a chat template that cannot hold a conversation with tools
        ("qwen3", with_template(None), "no chat template"),
        ("qwen3", with_template("{{ raise_exception('no system role') }}"), "no system role"),
        ("qwen3", with_template("{{ messages["), "it refuses a system message"),
        ("qwen3", with_template("{% for m in messages %}{{ m.content }}{% endfor %}"), "shows no tools to"),
        ("qwen3", with_template("{{ tools }}<tool_call>"), "writes a call otherwise than 'hermes' reads it"),
        ("qwen3", with_template("{{ tools }}"), "writes a call in no format that is known here"),
    ],
)
def test_a_folder_that_holds_no_model_to_train_is_refused(family: str, change: Change, says: str, copied):
    folder = copied(family)
    change(folder)
    refused(folder, says)


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/etc/hostname", "sub/x", "x\0", "outside"])
def test_an_index_that_names_what_is_outside_of_its_folder(name: str, copied, tmp_path: Path):
    folder = copied("mistral")
    (tmp_path / "x").touch()  # it is there: what is refused is its name
    written = str(tmp_path / "x") if name == "outside" else name
    (folder / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": written}}))
    refused(folder, "which is not a file in this folder")


def test_weights_that_miss_a_tensor_are_not_completed_with_random_numbers(copied):
    folder = copied("llama")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    refused(folder, r"1 would be random, such as model\.layers\.1\.mlp\.up_proj")


def test_a_vocabulary_larger_than_the_embedding(model_folders: Mapping[str, Path], copied):
    folder = copied("llama")  # 607 rows
    with_tokenizer(model_folders["mistral"], folder)
    refused(folder, "666 tokens but the model only 607 embeddings.*two models were mixed")


def test_another_models_tokenizer_that_happens_to_fit(model_folders: Mapping[str, Path], copied):
    folder = copied("qwen3")
    with_tokenizer(model_folders["llama"], folder)
    edit_json(folder / "config.json", eos_token_id=300)
    refused(folder, r"config\.json ends texts with id 300, but the tokenizer's '.+' is no special token")


def test_a_tied_head_and_old_rotary_buffers_may_lie_in_the_file(copied):
    folder = copied("llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    load_named(ModelTable(path=folder))


def test_a_model_with_code_of_its_own_runs_none_of_it(copied):
    folder = copied("qwen3")
    ran = folder / "ran"
    (folder / "modeling_own.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Own: pass\n")
    names = {"AutoConfig": "modeling_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}
    edit_json(folder / "config.json", model_type="own", auto_map=names)
    refused(folder, "which is never run")
    edit_json(folder / "config.json", model_type="qwen3", auto_map=names)
    load_named(ModelTable(path=folder))  # transformers knows this one itself
    edit_json(
        folder / "tokenizer_config.json",
        tokenizer_class="OwnTokenizer",
        auto_map={"AutoTokenizer": ["modeling_own.Own", "modeling_own.Own"]},
    )
    refused(folder, "tokenizer_class 'OwnTokenizer' has Python code of its own")
    assert not ran.exists()


def test_a_tool_call_format_that_the_template_does_not_write(model_folders: Mapping[str, Path]):
    with pytest.raises(ModelFolderError, match=r"Set model\.tool_call_format to 'hermes'"):
        load_named(ModelTable(path=model_folders["qwen3"], tool_call_format="llama"))


def test_a_checkpoint_of_another_architecture_is_named_with_the_jobs_model(
    model_folders: Mapping[str, Path], tmp_path: Path
):
    def job(family: str):
        return tiny_job(model__preset=None, model__path=str(model_folders[family]))

    folder = tmp_path / "iteration_1"
    LocalLearner.fresh(learner_parts.learner_config(job("llama")), []).save(folder, Progress(iteration=1))
    both = "holds llama with 2 layers of width 32, but the job's model is qwen3 with 2"
    with pytest.raises(CheckpointError, match=both):
        LocalLearner.resumed(learner_parts.learner_config(job("qwen3")), folder)
    with pytest.raises(CheckpointError, match="the job's model is qwen3 with 2 layers of width 96"):
        LocalLearner.resumed(learner_parts.learner_config(tiny_job()), folder)
    gone = tiny_job(model__preset=None, model__path=str(tmp_path / "gone"))
    assert LocalLearner.resumed(learner_parts.learner_config(gone), folder)[1].iteration == 1, (
        "the folder that a run began from may be gone"
    )


def test_a_run_that_began_from_a_config_without_architectures_goes_on(copied, tmp_path: Path):
    folder = copied("qwen3")
    edit_json(folder / "config.json", architectures=None)
    job = tiny_job(model__preset=None, model__path=str(folder))
    LocalLearner.fresh(learner_parts.learner_config(job), []).save(
        tmp_path / "iteration_1", Progress(iteration=1)
    )
    assert LocalLearner.resumed(learner_parts.learner_config(job), tmp_path / "iteration_1")[1].iteration == 1
