"""[lora]: what is trained, what leaves the learner, and what a checkpoint holds of it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer_backend.learner.hand_made import SIZE, episodes_of, learner_of, segment, tiny_tokenizer
from trainer_backend.errors import CheckpointError, JobError
from trainer_backend.inference.weights import copy_weights
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.models import load_model_folder
from trainer_backend.protocols import Progress

LORA = {"lora__rank": 4, "lora__alpha": 8}
PROBE = [segment("p", [5, 6, 7], [20, 21, 22, 23], [0.0] * 4)]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def tensors_of(learner: LocalLearner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}


def updated(tokenizer, iterations: int = 1, **overrides) -> LocalLearner:
    learner = learner_of(tokenizer, **{**LORA, "training__learning_rate": 0.01, **overrides})
    for iteration in range(1, iterations + 1):
        learner.update(episodes_of(learner, [1.0, -1.0]), iteration=iteration)
    return learner


def logits(model, ids=(5, 6, 7, 20)) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits


def test_only_adapters_are_trained_and_at_first_they_change_nothing(tokenizer):
    plain, adapted = learner_of(tokenizer), learner_of(tokenizer, **LORA)
    assert adapted.scorer.score(PROBE, **SIZE) == plain.scorer.score(PROBE, **SIZE)
    before = tensors_of(adapted)
    adapted.update(episodes_of(adapted, [1.0, -1.0]), iteration=1)
    changed = {name for name, tensor in tensors_of(adapted).items() if not torch.equal(tensor, before[name])}
    # 2 layers of 4 attention and 3 MLP matrices, each with an A and a B
    assert len(changed) == 2 * 7 * 2
    assert all(".lora_" in name for name in changed)
    # 4 * (in + out) of each: attention 96 + 96 four times, MLP 96 + 256 three times
    trained = sum(weight.numel() for weight in adapted.model.parameters() if weight.requires_grad)
    assert trained == 2 * 4 * (4 * (96 + 96) + 3 * (96 + 256))


def test_merged_weights_compute_what_the_adapters_do_and_leave_the_learners_own_alone(tokenizer):
    learner = updated(tokenizer)
    before, adapted = tensors_of(learner), logits(learner.model)
    served = learner.copy_to_serve()
    copy_weights(served, learner.weights())
    assert {name for name, _ in served.named_parameters()} == {
        name for name, _ in learner_of(tokenizer).model.named_parameters()
    }
    torch.testing.assert_close(logits(served), adapted, rtol=0, atol=1e-5)
    with learner._adapter.off():
        assert (logits(learner.model) - adapted).abs().max() > 1e-3, "the adapters do something"
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors_of(learner).items())


def test_the_kl_is_to_the_model_without_its_adapters(tokenizer):
    kl = {"training__kl_coef": 0.1, "training__entropy_coef": 0.0, "training__update_passes": 1}
    lora = updated(tokenizer, **kl)
    full = learner_of(tokenizer, **kl)
    episodes = episodes_of(lora, [1.0, -1.0])
    found = lora.update(episodes, iteration=2)["loss/kl"]
    with lora._adapter.off():
        base = [values for part in episodes for values in lora.scorer.score(part.segments, **SIZE)]
    own = [values for part in episodes for values in lora.scorer.score(part.segments, **SIZE)]
    assert base == [values for part in episodes for values in full.scorer.score(part.segments, **SIZE)]
    assert found > 0
    assert own != base


def test_a_run_that_was_interrupted_goes_on_as_if_it_had_not_been(tokenizer, tmp_path: Path):
    whole = updated(tokenizer)
    learner_of(tokenizer, **LORA).save(tmp_path / "iteration_0", Progress())
    whole.save(tmp_path / "iteration_1", Progress(1, 1, 2))
    again, progress = LocalLearner.resumed(whole.job, tmp_path / "iteration_1")
    assert progress == Progress(1, 1, 2)
    episodes = episodes_of(whole, [0.5, -1.0])
    for learner in (whole, again):
        learner.update(episodes, iteration=2)
    other = tensors_of(again)
    assert all(torch.equal(tensor, other[name]) for name, tensor in tensors_of(whole).items())


def test_a_checkpoint_is_a_plain_model_with_the_adapter_beside_it(tokenizer, tmp_path: Path):
    learner = updated(tokenizer)
    learner.save(tmp_path / "iteration_1", Progress(1, 1, 2))
    model, _ = load_model_folder(tmp_path / "iteration_1")
    torch.testing.assert_close(logits(model), logits(learner.model), rtol=0, atol=1e-5)
    names = load_file(tmp_path / "iteration_1/adapter/adapter_model.safetensors")
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    assert (tmp_path / "iteration_1/adapter/adapter_config.json").is_file()


def test_a_checkpoint_without_an_adapter_is_not_resumed_with_lora(tokenizer, tmp_path: Path):
    learner_of(tokenizer).save(tmp_path / "iteration_0", Progress())
    with pytest.raises(CheckpointError, match=r"no adapter in this checkpoint, but the job has \[lora\]"):
        LocalLearner.resumed(learner_of(tokenizer, **LORA).job, tmp_path / "iteration_0")


def test_what_the_warm_up_taught_the_adapters_becomes_the_base_that_rl_starts_from(tokenizer):
    learner = updated(tokenizer)  # as a warm-up would leave it
    before = logits(learner.model)
    learner._adapter.fold()
    torch.testing.assert_close(logits(learner.model), before, rtol=0, atol=1e-5)
    with learner._adapter.off():
        torch.testing.assert_close(logits(learner.model), before, rtol=0, atol=1e-5)


def test_with_adapters_the_base_may_be_of_low_precision_and_the_merged_sum_is_of_float32(tokenizer):
    learner = updated(tokenizer)
    name = "model.layers.0.mlp.up_proj"
    layer = learner.model.get_submodule(name)
    layer.base_layer.weight.data = layer.base_layer.weight.data.bfloat16()
    exact = layer.base_layer.weight.float() + layer.get_delta_weight("default")
    assert torch.equal(learner._adapter.merged(torch.float32)[f"{name}.weight"], exact)
    assert torch.equal(learner._adapter.merged(torch.bfloat16)[f"{name}.weight"], exact.bfloat16())


def test_dropout_is_on_in_steps_and_off_in_scores(tokenizer):
    learner = learner_of(tokenizer, **LORA, lora__dropout=0.5, training__update_passes=1)
    for weight in learner.model.parameters():
        if weight.requires_grad:
            torch.nn.init.constant_(weight, 0.1)
    assert learner.scorer.score(PROBE, **SIZE) == learner.scorer.score(PROBE, **SIZE)
    torch.manual_seed(0)
    metrics = learner.update(episodes_of(learner, [1.0, -1.0]), iteration=1)
    assert metrics["loss/ratio_max"] > 1.001


@pytest.mark.parametrize(
    ("targets", "told"),
    [
        (["q_pro"], r"lora\.target_modules: Target modules .*q_pro.* not found"),
        (["lm_head", "q_proj"], r"lora\.target_modules takes in the head"),
        (["embed_tokens"], r"lora\.target_modules takes in the embedding"),
    ],
)
def test_targets_that_do_not_fit_are_refused(tokenizer, targets: list[str], told: str):
    with pytest.raises(JobError, match=told):
        learner_of(tokenizer, lora__target_modules=targets)


def test_named_targets_alone_get_adapters(tokenizer):
    learner = learner_of(tokenizer, lora__target_modules=["q_proj", "v_proj"])
    trained = [name for name, weight in learner.model.named_parameters() if weight.requires_grad]
    assert len(trained) == 2 * 2 * 2
    assert all("q_proj" in name or "v_proj" in name for name in trained)
