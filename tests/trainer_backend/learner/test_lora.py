"""[lora]: what is trained, what leaves the learner, and what a checkpoint holds of it."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared_schemas.trajectory import Sampling
from tests.tiny_families import tiny_model
from tests.trainer_backend.learner.hand_made import (
    SIZE,
    are_equal,
    copy_tensors,
    make_config,
    make_episodes,
    make_learner,
    segment,
)
from tests.trainer_backend.segment_columns import lists
from trainer_backend.errors import CheckpointError, JobError, ModelFolderError, WeightsRefused
from trainer_backend.inference.engine import LocalEngine
from trainer_backend.inference.vllm_worker.turnwise_weights import tensors
from trainer_backend.inference.weights import ServedWeights
from trainer_backend.job.tables import ModelTable
from trainer_backend.job.training_table import LoraTable
from trainer_backend.learner import lora
from trainer_backend.learner.adapter import Adapter
from trainer_backend.learner.device import Placement
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.learner.loading import (
    copy_to_serve,
    folder_to_serve,
    held_copy,
    hold_in,
    load_checkpoint,
    new_weights,
    write_merged,
)
from trainer_backend.learner.shapes import refuse_unknown_targets
from trainer_backend.models import build_preset, load_model_folder, save_model_folder
from trainer_backend.models.folder import load_tokenizer
from trainer_backend.models.layout import weight_files
from trainer_backend.models.precision import held_dtype, tokens_for
from trainer_backend.parts import Progress
from trainer_backend.rundir.digests import refuse_damaged

LORA = {"lora__rank": 4, "lora__alpha": 8}
PROBE = [segment("p", [5, 6, 7], [20, 21, 22, 23], [0.0] * 4)]


def updated(tokenizer, iterations: int = 1, **overrides) -> LocalLearner:
    learner = make_learner(tokenizer, **{**LORA, "training__learning_rate": 0.01, **overrides})
    for iteration in range(1, iterations + 1):
        learner.update(make_episodes(learner, [1.0, -1.0]), iteration=iteration)
    return learner


def logits(model, ids=(5, 6, 7, 20)) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits


def test_only_adapters_are_trained_and_at_first_they_change_nothing(tokenizer):
    plain, adapted = make_learner(tokenizer), make_learner(tokenizer, **LORA)
    assert lists(adapted.scorer.score(PROBE, SIZE)) == lists(plain.scorer.score(PROBE, SIZE))
    before = copy_tensors(adapted)
    adapted.update(make_episodes(adapted, [1.0, -1.0]), iteration=1)
    after = adapted.model.state_dict()
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    # 2 layers of 4 attention and 3 MLP matrices, each with an A and a B
    assert len(changed) == 2 * 7 * 2
    assert all(".lora_" in name for name in changed)
    # 4 * (in + out) of each: attention 96 + 96 four times, MLP 96 + 256 three times
    trained = sum(weight.numel() for weight in adapted.model.parameters() if weight.requires_grad)
    assert trained == 2 * 4 * (4 * (96 + 96) + 3 * (96 + 256))


def test_the_engine_computes_with_the_adapters_and_is_given_theirs_alone_and_all_of_them(tokenizer):
    learner = updated(tokenizer)
    served = learner.copy_to_serve()
    at_first = logits(served)
    learner.update(make_episodes(learner, [1.0, -1.0]), iteration=2)
    before = copy_tensors(learner)
    ServedWeights(served).replace(learner.weights())
    assert (logits(served) - at_first).abs().max() > 1e-3, "the update did something"
    ids = PROBE[0].token_ids.tolist()
    sampled = logits(served, ids)[0, 2:-1].log_softmax(-1).gather(1, torch.tensor(ids[3:])[:, None])[:, 0]
    assert learner.scorer.score(PROBE, SIZE)[0] == pytest.approx(sampled.tolist(), abs=1e-5)
    weights = learner.weights()
    assert len(weights) == 2 * 7 * 2
    assert are_equal(learner.model.state_dict(), before)
    weights.popitem()
    with pytest.raises(WeightsRefused, match=r"tensors missing: .*lora_B"):
        ServedWeights(served).replace(weights)


@pytest.mark.parametrize("family", ["qwen3", "qwen2"], ids=["norms of heads", "biases"])
def test_what_a_few_small_steps_teach_survives_a_base_of_low_precision_in_learner_and_engine(family: str):
    """Of the change that float32 would compute, both compute the whole, up to noise without a direction."""
    size = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "head_dim": 128}
    told = {"vocab_size": 300, "initializer_range": 0.02, "pad_token_id": None, "tie_word_embeddings": True}
    model = tiny_model(family, **size, **told)
    hold_in(model, torch.bfloat16)
    adapter = Adapter.fresh(model, LoraTable(rank=8, alpha=16), seed=0, base=None)
    served = copy_to_serve(model, torch.bfloat16)
    low = Placement(torch.device("cpu"), torch.bfloat16)
    ids_BL = torch.randint(0, 300, (4, 64))

    def found(model: torch.nn.Module, placement: Placement) -> torch.Tensor:
        with torch.no_grad(), placement.autocast():
            tokens = tokens_for(model, ids_BL, placement.low)
            hidden_BLD = model.model(**tokens, use_cache=False).last_hidden_state
        return hidden_BLD.float() @ model.lm_head.weight.float().T

    def of_all() -> list[torch.Tensor]:
        ServedWeights(served).replace(adapter.weights())
        exact = held_copy(model, torch.float32)
        return [found(exact, Placement(torch.device("cpu"))), found(model, low), found(served, low)]

    before = of_all()
    for name, weight in adapter.weights().items():
        if ".lora_B" in name:  # as ten steps of AdamW at a rate of 1e-5 leave it
            weight.copy_(torch.randint(0, 2, weight.shape) * 2e-4 - 1e-4)
    meant, learned, sampled = (after - start for after, start in zip(of_all(), before, strict=True))
    for change in (learned, sampled):
        assert float((change * meant).sum() / (meant * meant).sum()) == pytest.approx(1.0, abs=0.15)


def test_a_checkpoint_is_played_as_it_was_trained_where_its_weights_are_rounded(tokenizer, tmp_path: Path):
    learner = make_learner(tokenizer, **LORA)
    for weight in learner.model.parameters():
        if not weight.requires_grad:
            weight.data = weight.data.bfloat16().float()  # as a folder's are
    base = copy_tensors(learner)
    learner.update(make_episodes(learner, [1.0, -1.0]), iteration=1)
    learner.save(tmp_path / "iteration_1", Progress(1, 1, 2))
    low = Placement(torch.device("cpu"), torch.bfloat16)
    played = folder_to_serve(load_model_folder(tmp_path / "iteration_1")[0], tmp_path / "iteration_1", low)
    expected = {
        name: tensor.to(held_dtype(tensor, torch.bfloat16))
        for name, tensor in {**base, **learner.weights()}.items()
    }
    found = played.state_dict()
    assert are_equal(found, expected)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
async def test_an_engine_that_began_with_a_published_folder_loads_the_next_one_unrounded(
    tokenizer, tmp_path: Path, dtype: torch.dtype | None
):
    learner, placement = updated(tokenizer), Placement(torch.device("cpu"), dtype)
    learner.publish(tmp_path / "version_0")
    model = folder_to_serve(load_model_folder(tmp_path / "version_0")[0], tmp_path / "version_0", placement)
    engine = LocalEngine(model, stop_ids=learner.facts().stop_ids)
    engine.start()
    learner.update(make_episodes(learner, [1.0, -1.0]), iteration=2)
    learner.publish(tmp_path / "version_1")
    await engine.load_weights(1, new_weights(tmp_path / "version_1", placement))
    engine.stop()
    if dtype is None:
        torch.testing.assert_close(logits(model), logits(learner.model), rtol=0, atol=1e-5)
        return
    served = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" in name}
    assert are_equal(served, {name: tensor.to(dtype) for name, tensor in learner.weights().items()})


async def test_an_engine_made_for_adapters_computes_as_a_merged_checkpoint_that_it_loads(
    tokenizer, tmp_path: Path
):
    learner = updated(tokenizer)
    engine = LocalEngine(served := learner.copy_to_serve(), stop_ids=[])
    other = updated(tokenizer, iterations=2, job__seed=1)
    other.save(tmp_path / "iteration_0", Progress())
    plain, _ = load_model_folder(tmp_path / "iteration_0")
    engine.start()
    await engine.load_weights(1, tmp_path / "iteration_0")
    ids = [5, 6, 7]
    found = await engine.generate(ids, Sampling(max_tokens=6, seed=0), request_id="a")
    exact = logits(plain, [*ids, *found.token_ids])[0, 2:-1].log_softmax(-1)
    expected = exact.gather(1, torch.tensor(found.token_ids)[:, None])[:, 0]
    assert found.logprobs == pytest.approx(expected.tolist(), abs=1e-5)
    with pytest.raises(WeightsRefused, match="only adapters, and a whole model has replaced their base"):
        await engine.load_weights(2, learner.weights())
    assert engine.version == 1
    # With their base they serve again, and from then on alone.
    await engine.load_weights(2, copy_tensors(learner))
    learner.update(make_episodes(learner, [1.0, -1.0]), iteration=2)
    await engine.load_weights(3, learner.weights())
    engine.stop()
    torch.testing.assert_close(logits(served), logits(learner.model), rtol=0, atol=1e-5)


def test_adapters_that_a_server_merges_into_their_base_are_the_merged_model_bit_for_bit(
    tokenizer, tmp_path: Path
):
    learner = updated(tokenizer)
    for weight in learner.model.parameters():
        weight.data = weight.data if weight.requires_grad else weight.data.bfloat16()
    for part in ("whole", "base", "adapters"):
        learner.publish(tmp_path / part, part)
    merged = dict(tensors(tmp_path / "base", ["model.safetensors"], tmp_path / "adapters"))
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert are_equal({name: tensor.float() for name, tensor in merged.items()}, whole)
    assert not torch.equal(  # the base alone is another model
        load_file(tmp_path / "base" / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].float(),
        whole["model.layers.0.mlp.up_proj.weight"],
    )
    assert {path.suffix for path in (tmp_path / "adapters").iterdir()} <= {".safetensors", ".json", ".md"}
    assert load_tokenizer(tmp_path / "base").get_vocab() == tokenizer.get_vocab()
    stranger = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    stranger = {name.replace(".layers.0.", ".layers.7."): tensor for name, tensor in stranger.items()}
    save_file(stranger, tmp_path / "adapters" / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"has no model\.layers\.7\..*weight, of which .* has an adapter"):
        dict(tensors(tmp_path / "base", ["model.safetensors"], tmp_path / "adapters"))


def save_checkpoints(tokenizer, folder: Path, *, warm: int = 0, **overrides) -> LocalLearner:
    """A run's checkpoints before and after an update, after `warm` others, and its learner."""
    learner = updated(tokenizer, iterations=warm, **overrides)
    learner.save(folder / "iteration_0", Progress())
    learner.update(make_episodes(learner, [1.0, -1.0]), iteration=1)
    learner.save(folder / "iteration_1", Progress(1, 1, 2))
    return learner


def test_after_the_first_checkpoint_the_adapters_alone_are_written_and_become_the_merged_model_elsewhere(
    tokenizer, tmp_path: Path
):
    learner = save_checkpoints(tokenizer, tmp_path)
    folder, adapter = tmp_path / "iteration_1", tmp_path / "iteration_1/adapter/adapter_model.safetensors"
    assert (tmp_path / "iteration_0/model.safetensors").is_file()
    assert not list(folder.glob("model*.safetensors"))
    assert "q_proj.lora_A" in " ".join(load_file(adapter))
    refuse_damaged(folder)
    model, of_folder = load_checkpoint(learner.config.model, folder)
    assert of_folder.get_vocab() == tokenizer.get_vocab()
    merged, found = learner._adapter.merged(), model.state_dict()
    assert found.keys() - merged.keys() == {"lm_head.weight"}  # tied: named once
    assert all(torch.equal(tensor, found[name]) for name, tensor in merged.items())
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        to = tmp_path / "plain" / name
        write_merged(folder, to, name)
        assert not (to / "adapter").exists()
        stored = load_file(to / "model.safetensors")
        assert stored and all(torch.equal(tensor, found[key].to(dtype)) for key, tensor in stored.items())
        assert load_tokenizer(to).get_vocab() == tokenizer.get_vocab()
    with pytest.raises(ModelFolderError, match="it exists already"):
        write_merged(folder, to, "float32")
    with pytest.raises(ModelFolderError, match=r"Not a directory.*--to"):
        write_merged(folder, to / "config.json" / "below", "float32")
    adapter.write_bytes(adapter.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"damaged.*adapter_model\.safetensors"):
        write_merged(folder, tmp_path / "other", "float32")


@pytest.mark.parametrize("warm", [0, 1])
def test_transformers_with_peft_loads_a_checkpoint_of_adapters_as_it_stands(tokenizer, tmp_path, warm: int):
    learner = save_checkpoints(tokenizer, tmp_path, warm=warm, lora__target_modules=["q_proj", "up_proj"])
    folder = tmp_path / "iteration_1"
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    torch.testing.assert_close(logits(model), logits(learner.copy_to_serve()), rtol=0, atol=1e-5)
    at_first = AutoModelForCausalLM.from_pretrained(tmp_path / "iteration_0", local_files_only=True)
    assert (logits(model) - logits(at_first)).abs().max() > 1e-3, "the update did something"
    # Without a warm-up iteration_0 is the base itself, and the rank stays.
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 4 * (1 + warm)
    assert AutoTokenizer.from_pretrained(folder, local_files_only=True).get_vocab() == tokenizer.get_vocab()


def test_merged_checkpoints_hold_the_model_in_each(tokenizer, tmp_path: Path):
    learner = save_checkpoints(tokenizer, tmp_path, lora__merged_checkpoints=True)
    model, _ = load_model_folder(tmp_path / "iteration_1")
    torch.testing.assert_close(logits(model), logits(learner.copy_to_serve()), rtol=0, atol=1e-5)


def test_adapters_over_a_changed_or_another_model_than_theirs_are_refused(tokenizer, tmp_path: Path):
    learner = save_checkpoints(tokenizer, tmp_path / "one")
    save_checkpoints(tokenizer, tmp_path / "other", warm=1)
    folder, base = tmp_path / "one/iteration_1", tmp_path / "one/iteration_0/model.safetensors"
    base.write_bytes(base.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"iteration_0.*model\.safetensors"):
        load_checkpoint(learner.config.model, folder)
    with pytest.raises(ModelFolderError, match="holds only adapters, no model") as caught:
        weight_files(folder)
    assert f"turnwise merge {folder} --to" in str(caught.value)
    shutil.rmtree(tmp_path / "one/iteration_0")
    with pytest.raises(ModelFolderError, match="'iteration_0' is not next to it"):
        load_checkpoint(learner.config.model, folder)
    shutil.copytree(tmp_path / "other/iteration_0", tmp_path / "one/iteration_0")
    for load in (load_checkpoint, lambda _, folder: LocalLearner.resumed(learner.config, folder)):
        with pytest.raises(CheckpointError, match="trained over another iteration_0"):
            load(learner.config.model, folder)


def test_rl_starts_from_what_the_warm_up_taught_and_so_does_a_resumed_run(tokenizer, tmp_path: Path):
    kl = {"training__kl_coef": 0.1, "training__update_passes": 1}
    learner = updated(tokenizer, **kl)  # as a warm-up would leave it
    learner._reference = None
    learner._adapter.begin()
    warm = logits(learner.copy_to_serve())
    learner.save(tmp_path / "iteration_0", Progress())
    exported, _ = load_model_folder(tmp_path / "iteration_0")
    torch.testing.assert_close(logits(exported), warm, rtol=0, atol=1e-5)
    again, _ = LocalLearner.resumed(learner.config, tmp_path / "iteration_0")
    assert torch.equal(logits(again.copy_to_serve()), warm)
    episodes = make_episodes(learner, [1.0, -1.0])
    for iteration in (1, 2):
        found, expected = (one.update(episodes, iteration=iteration) for one in (learner, again))
        assert found == expected
        # of the one step of an iteration: where the first looks, RL has not gone anywhere yet
        assert (found["loss/kl"] == 0) == (iteration == 1)
    learner.save(tmp_path / "iteration_2", Progress(2, 2, 4))
    later, _ = LocalLearner.resumed(learner.config, tmp_path / "iteration_2")
    assert later.update(episodes, iteration=3) == learner.update(episodes, iteration=3)
    assert are_equal(learner.model.state_dict(), later.model.state_dict())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {r"no adapter in this checkpoint, but the job has \[lora\]": LORA}),
        (
            LORA,
            {
                r"it has adapters, but the job has no \[lora\]": {},
                r"rank 4, but lora\.rank of the job gives 8": {**LORA, "lora__rank": 8},
                r"alpha 8, but lora\.alpha of the job gives 4": {**LORA, "lora__alpha": 4},
                r"target_modules .* 12 more, .* \['q_proj'\]": {**LORA, "lora__target_modules": ["q_proj"]},
            },
        ),
    ],
)  # fmt: skip
def test_a_run_is_not_resumed_with_other_adapters_than_it_has(tokenizer, tmp_path: Path, before, after):
    learner = make_learner(tokenizer, **before)
    learner.save(tmp_path / "iteration_0", Progress())
    learner.save(tmp_path / "iteration_1", Progress(1, 1, 2))  # of adapters alone, where there are any
    for told, job in after.items():
        config = make_config(**job)
        for name in ("iteration_0", "iteration_1"):
            with pytest.raises(CheckpointError, match=told):
                LocalLearner.resumed(config, tmp_path / name)


def test_the_saved_adapter_names_the_model_that_it_was_trained_over(tokenizer, tmp_path: Path):
    folder = tmp_path / "base"
    save_model_folder(folder, make_learner(tokenizer).model, tokenizer)
    config = make_config(model__preset=None, model__path=str(folder), **LORA)
    learner = LocalLearner.fresh(config, [])
    learner.save(tmp_path / "iteration_0", Progress())
    again, _ = LocalLearner.resumed(config, tmp_path / "iteration_0")
    again.save(tmp_path / "iteration_1", Progress(1, 1, 2))
    for name in ("iteration_0", "iteration_1"):
        settings = json.loads((tmp_path / name / "adapter/adapter_config.json").read_text())
        assert settings["base_model_name_or_path"] == str(folder)


@pytest.mark.parametrize("level", ["token", "decision", "episode"])
def test_dropout_is_in_the_gradient_of_steps_and_in_no_log_prob(tokenizer, level: str):
    """A policy equal to its reference and to the proximal policy has a KL of 0 and ratios of 1, and after a
    step the ratios are those of the policy that is sampled from."""
    learner = make_learner(
        tokenizer, **LORA, lora__dropout=0.5, training__kl_coef=0.1, algorithm__ratio_level=level
    )
    for weight in learner.model.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.2)
    episodes = make_episodes(learner, [1.0, -1.0])
    by_id = {item.rollout_id: item for item in episodes}
    update = learner.policy_update()
    before = update.weighed(episodes).scored
    gradients = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        metrics = update.gradient(before, by_id)
        gradients.append(torch.cat([w.grad.flatten() for w in learner.model.parameters() if w.requires_grad]))
        for name in ("loss/kl", "loss/kl_to_proximal"):
            assert metrics[name] == pytest.approx(0.0, abs=1e-9)
        for name in ("loss/ratio_min", "loss/ratio_max"):
            assert metrics[name] == pytest.approx(1.0, abs=1e-5)
    assert torch.equal(gradients[0], gradients[1])
    assert not torch.allclose(gradients[0], gradients[2]), "which inputs are left out is drawn"
    for weight in learner.weights().values():
        weight.mul_(1.2)
    after = learner.scorer.score([item.segment for item in before], SIZE)
    # Each unit is all that its rollout sampled, or a token; the mean of ratios is over tokens.
    pairs = [zip(item.proximal, now, strict=True) for item, now in zip(before, after, strict=True)]
    logs = [[new - old for old, new in pair] for pair in pairs]
    ratios = [math.exp(log if level == "token" else sum(row) / len(row)) for row in logs for log in row]
    metrics = update.gradient(before, by_id)
    assert metrics["loss/ratio_mean"] == pytest.approx(sum(ratios) / len(ratios), abs=1e-5)
    k3 = [math.expm1(-log) + log for row in logs for log in row]
    assert metrics["loss/kl"] == pytest.approx(sum(k3) / len(k3), abs=1e-5)
    assert metrics["loss/kl"] > 1e-4


@pytest.mark.parametrize(
    ("targets", "told"),
    [
        (["q_proj", "query_proj"], r"the model has no linear layer 'query_proj'.*Did you mean 'q_proj'"),
        (["self_attn", "q_proj"], r"no linear layer 'self_attn'; known: all-linear, down_proj, gate_proj"),
        (["layers.0.mlp.up_proj", "layers.2.mlp.up_proj"], r"no linear layer 'layers\.2\.mlp\.up_proj'"),
        (["proj"], r"no linear layer 'proj'"),
        (["lm_head", "q_proj"], r"includes the head"),
        (["embed_tokens"], r"includes the embedding"),
    ],
)
def test_targets_that_do_not_fit_are_refused_before_and_after_the_weights_are_there(
    tokenizer, targets: list[str], told: str
):
    with pytest.raises(JobError, match=rf"lora\.target_modules.*{told}"):
        make_learner(tokenizer, lora__target_modules=targets)
    with pytest.raises(JobError, match=told):
        refuse_unknown_targets(ModelTable(preset="tiny-0.3m"), LoraTable(target_modules=targets))


def test_all_linear_layers_are_not_named_with_others():
    with pytest.raises(ValidationError, match="'all-linear' takes in every linear layer"):
        LoraTable(target_modules=("all-linear", "q_proj"))


@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        (["q_proj"], {"layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj"}),
        (["layers.1.mlp.up_proj"], {"layers.1.mlp.up_proj"}),
    ],
)
def test_named_targets_alone_get_adapters(tokenizer, targets: list[str], layers: set[str]):
    learner = make_learner(tokenizer, lora__target_modules=targets)
    trained = {
        name.partition(".lora_")[0].removeprefix("model.")
        for name, weight in learner.model.named_parameters()
        if weight.requires_grad
    }
    assert trained == layers


def test_the_source_of_a_class_is_read_once_however_many_layers_a_model_has(tokenizer, monkeypatch):
    read: list[type] = []
    lora._source.cache_clear()
    monkeypatch.setattr(lora, "getsource", lambda kind: str(read.append(kind)))
    assert len(lora.adapted_layers(build_preset("tiny-0.3m", tokenizer, seed=1), ["all-linear"])) > 7
    assert len(read) == len(set(read)) == 2, "of attention and of the feed-forward layer"
    lora._source.cache_clear()
