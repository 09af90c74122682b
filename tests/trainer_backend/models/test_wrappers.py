"""The text part of a wrapper of text and vision is trained; what else its folder holds is written back."""

import json
import os
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.conftest import tiny_job
from tests.tiny_families import WRAPPERS, tiny_model, tiny_wrapper
from tests.trainer_backend.learner.hand_made import segment, tiny_tokenizer
from trainer_backend import learner_parts
from trainer_backend.errors import ModelFolderError
from trainer_backend.inference.weights import ServedWeights, read_weights
from trainer_backend.learner.broadcast import checkpoint_tensors
from trainer_backend.learner.device import Placement
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.learner.loading import write_merged
from trainer_backend.models.folder import load_model_folder, save_model_folder
from trainer_backend.models.layout import CONFIG, described, read_config, weight_files
from trainer_backend.parts import CreditedEpisode, Progress

CPU = Placement(torch.device("cpu"))
# A dense one whose folder has the names of its class, and one whose folder has older ones.
KINDS = tuple(WRAPPERS) if os.environ.get("TURNWISE_TEST_FAMILIES") else ("qwen3_5", "gemma3")
MTP, MTP_LAYER = "mtp.fc.weight", "model.layers.92.eh_proj.weight"


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in weight_files(folder) for name, tensor in load_file(file).items()}


def wrapper_folder(kind: str, folder: Path) -> PreTrainedModel:
    """A folder as the hub has it, with a processor's settings, and Qwen's head of later tokens."""
    tokenizer = tiny_tokenizer()
    end = tokenizer.eos_token_id
    wrapper = tiny_wrapper(kind, vocab_size=300, bos_token_id=None, eos_token_id=end, pad_token_id=end)
    wrapper.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"size": 16}')
    if kind.startswith("qwen3_5"):
        tensors = stored(folder) | {MTP: torch.ones(2, 3, dtype=torch.bfloat16)}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return wrapper


def learner_in(folder: Path, **tables: object) -> LocalLearner:
    torch.set_num_threads(1)
    told = {"model__preset": None, "model__path": str(folder), "training__mismatch_limit": 1e9, **tables}
    return LocalLearner.fresh(learner_parts.learner_config(tiny_job(**told)), [])


def step(learner: LocalLearner) -> None:
    part = segment("r", range(20, 30), range(40, 48), [-1.0] * 8)
    learner.update([CreditedEpisode("r", [part], [1.0])], iteration=1)


def logits(model: PreTrainedModel) -> Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.arange(3, 20)[None], use_cache=False).logits


def is_text(name: str) -> bool:
    return "language_model" in name or name.startswith("lm_head")


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_changes_the_text_part_alone_and_the_checkpoint_is_the_wrapper_s(kind: str, tmp_path: Path):
    source, folder = tmp_path / "model", tmp_path / "iteration_1"
    wrapper = wrapper_folder(kind, source)
    learner = learner_in(source)
    has_logits = kind != "llama4"  # whose wrapper computes none without an image
    if has_logits:
        torch.testing.assert_close(logits(learner.model), logits(wrapper), rtol=0, atol=0)
    step(learner)
    learner.save(folder, Progress(iteration=1))
    before, after = stored(source), stored(folder)
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        assert is_text(name) or (torch.equal(tensor, before[name]) and tensor.dtype == before[name].dtype)
    assert any(not torch.equal(after[name], before[name]) for name in after)
    assert read_config(folder)["architectures"] == [type(wrapper).__name__]
    assert described(read_config(folder)) == described(read_config(source))
    assert (folder / "preprocessor_config.json").read_text() == '{"size": 16}'
    loaded, told = type(wrapper).from_pretrained(folder, output_loading_info=True)
    assert not any(told.values())
    if has_logits:
        torch.testing.assert_close(logits(loaded), logits(learner.model), rtol=0, atol=1e-6)
    resumed, progress = LocalLearner.resumed(learner.config, folder)
    assert progress.iteration == 1
    for learnt in (learner, resumed):
        step(learnt)
    assert all(map(torch.equal, learner.model.parameters(), resumed.model.parameters()))


@pytest.mark.parametrize("kind", KINDS)
def test_servers_get_the_wrapper_s_names_and_the_engine_reads_them(kind: str, tmp_path: Path):
    wrapper_folder(kind, tmp_path / "model")
    learner = learner_in(tmp_path / "model")
    sent = dict(checkpoint_tensors(learner.model, CPU))
    of_source = stored(tmp_path / "model")
    assert all(torch.equal(tensor, of_source[name]) for name, tensor in sent.items())
    served = learner.copy_to_serve()
    step(learner)
    learner.publish(tmp_path / "version_1")
    ServedWeights(served).replace(read_weights(tmp_path / "version_1"))
    torch.testing.assert_close(logits(served), logits(learner.model), rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_have_the_names_of_the_wrapper_s_layers(kind: str, tmp_path: Path):
    wrapper = wrapper_folder(kind, tmp_path / "model")
    experts = ["experts.gate_up_proj", "experts.down_proj"] if kind in ("qwen3_5_moe", "llama4") else []
    learner = learner_in(tmp_path / "model", lora={"rank": 2, "target_modules": ["q_proj", *experts]})
    learner.save(tmp_path / "iteration_0", Progress(iteration=0))
    step(learner)
    learner.save(tmp_path / "iteration_1", Progress(iteration=1))
    expected = logits(learner.copy_to_serve())
    resumed, _ = LocalLearner.resumed(learner.config, tmp_path / "iteration_1")
    torch.testing.assert_close(logits(resumed.copy_to_serve()), expected, rtol=0, atol=1e-6)
    write_merged(tmp_path / "iteration_1", tmp_path / "merged", "float32")
    assert stored(tmp_path / "merged").keys() == stored(tmp_path / "model").keys()
    if kind == "llama4":
        return
    loaded = type(wrapper).from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=1e-5)
    adapted = PeftModel.from_pretrained(wrapper, str(tmp_path / "iteration_1" / "adapter"))
    torch.testing.assert_close(logits(adapted), expected, rtol=0, atol=1e-5)


def test_experts_are_one_tensor_each_in_every_folder_and_message(tmp_path: Path):
    tokenizer = tiny_tokenizer()
    end = tokenizer.eos_token_id
    model = tiny_model("qwen3_moe", vocab_size=300, bos_token_id=None, eos_token_id=end, pad_token_id=end)
    save_model_folder(tmp_path / "model", model, tokenizer)
    learner = learner_in(tmp_path / "model")
    step(learner)
    learner.save(tmp_path / "iteration_1", Progress(iteration=1))
    source, saved = stored(tmp_path / "model"), stored(tmp_path / "iteration_1")
    assert source.keys() == saved.keys() == dict(checkpoint_tensors(learner.model, CPU)).keys()
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in saved
    ServedWeights(model).replace(read_weights(tmp_path / "iteration_1"))
    again, _ = load_model_folder(tmp_path / "iteration_1")
    for name, weight in learner.model.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]) and torch.equal(weight, again.state_dict()[name])


def test_a_layer_of_later_tokens_that_the_class_leaves_out_is_written_back(tmp_path: Path):
    tokenizer = tiny_tokenizer()
    end = tokenizer.eos_token_id
    model = tiny_model("glm4_moe", vocab_size=300, bos_token_id=None, eos_token_id=end, pad_token_id=end)
    save_model_folder(tmp_path / "model", model, tokenizer)
    mtp = {MTP_LAYER: torch.ones(2, 3, dtype=torch.bfloat16)}
    path = tmp_path / "model" / "model.safetensors"
    save_file(load_file(path) | mtp, path, metadata={"format": "pt"})
    loaded, _ = load_model_folder(tmp_path / "model")
    path.unlink()  # what was loaded from may be gone when it is written
    save_model_folder(tmp_path / "again", loaded, tokenizer)
    assert torch.equal(stored(tmp_path / "again")[MTP_LAYER], mtp[MTP_LAYER])
    assert load_model_folder(tmp_path / "again")[1].get_vocab() == tokenizer.get_vocab()


def test_a_tensor_of_the_text_part_that_no_layer_takes_is_refused(tmp_path: Path):
    wrapper_folder("qwen3_5", tmp_path)
    path = tmp_path / CONFIG
    config = json.loads(path.read_text())
    config["text_config"] |= {"num_hidden_layers": 3, "layer_types": config["text_config"]["layer_types"][:3]}
    path.write_text(json.dumps(config))
    with pytest.raises(ModelFolderError, match=r"would be left out, such as .*layers\.3\."):
        load_model_folder(tmp_path)
