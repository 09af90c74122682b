"""This year's families by the learner: each segment scored and trained as if it were computed alone."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_families import EACH_KIND, KEYS, tiny_model
from tests.trainer_backend.learner.hand_made import (
    alone,
    are_equal,
    find_gradient,
    gradient,
    make_config,
    make_segments,
    segment,
)
from trainer_backend.core.collate import cut_packed, pack_segments
from trainer_backend.core.router_loss import balance_loss, load_metrics
from trainer_backend.errors import JobError
from trainer_backend.inference.weights import ServedWeights
from trainer_backend.job.tables import ModelTable
from trainer_backend.job.training_table import LoopKeys, LoraTable
from trainer_backend.learner.attention import GROUPS, PaddedRows
from trainer_backend.learner.device import Placement
from trainer_backend.learner.learner import LocalLearner, build_scorer
from trainer_backend.learner.loading import hold_in
from trainer_backend.learner.lora import adapted_layers, refuse_experts
from trainer_backend.learner.ranks import Ranks
from trainer_backend.learner.scoring import Scorer
from trainer_backend.learner.shapes import refuse_more_layers
from trainer_backend.learner.stepping import checkpoint_layers, stepping
from trainer_backend.learner.support import refuse_unsupported
from trainer_backend.parts import CreditedEpisode, Progress

CPU = Placement(torch.device("cpu"))
FAMILIES = tuple(KEYS) if os.environ.get("TURNWISE_TEST_FAMILIES") else EACH_KIND
# Those whose own loss balances the load of experts.
BALANCED = ("qwen3_moe", "gpt_oss", "qwen3_next", "qwen3_5_moe_text")
LENGTHS = (23, 70, 12, 3, 19, 9, 21, 5)


def learners(family: str) -> Scorer:
    model = tiny_model(family)
    return build_scorer(model, CPU, why_apart=refuse_unsupported(model, longest=128))


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradient_are_those_of_each_segment_alone(family: str):
    scorer, parts = learners(family), make_segments(LENGTHS)
    found = scorer.score(parts, LoopKeys(row_tokens=80, micro_batch_tokens=160))
    model = tiny_model(family)
    expected = [alone(model, part) for part in parts]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(mine), theirs.detach(), rtol=0, atol=1e-4)
    one_by_one = gradient(model, sum(row.sum() for row in expected))
    pieces = list(cut_packed(pack_segments(parts, row_tokens=80), 2))
    together = gradient(scorer.model, sum(scorer.logprobs(piece).sum() for piece in pieces))
    assert float((together - one_by_one).norm() / one_by_one.norm()) <= 1e-5
    checkpoint_layers(scorer.model)
    with stepping(scorer.model):
        again = gradient(scorer.model, sum(scorer.logprobs(piece).sum() for piece in pieces))
    torch.testing.assert_close(again, together, rtol=1e-4, atol=1e-6 * float(together.abs().max()))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_so_many_layers_are_computed_again_and_the_gradient_stays(family: str):
    """Of rows in the learner's own pass, and of padded ones in the models' own layers."""
    found = {}
    for checkpointed in (False, 0, 1, 2, True):
        torch.manual_seed(0)
        model, calls = tiny_model(family, num_hidden_layers=4), [0] * 4
        scorer = build_scorer(model, CPU, 8, why_apart=refuse_unsupported(model, longest=100))
        checkpoint_layers(model, checkpointed)
        for number, layer in enumerate(model.get_decoder().layers):
            layer.mlp.down_proj.register_forward_pre_hook(
                lambda *_, calls=calls, number=number: calls.__setitem__(number, calls[number] + 1)
            )
        with stepping(model):
            loss = scorer.logprobs(pack_segments(make_segments(LENGTHS), row_tokens=400)).sum()
        once = list(calls)
        with stepping(model):
            found[repr(checkpointed)] = gradient(model, loss)
        again = [total // own for total, own in zip(calls, once, strict=True)]
        count = 4 * checkpointed if isinstance(checkpointed, bool) else checkpointed
        assert again == [2] * count + [1] * (4 - count)
    expected = found.pop("False")
    assert all(float((mine - expected).norm() / expected.norm()) <= 1e-6 for mine in found.values())


def test_more_layers_than_the_model_has_are_refused_with_their_number():
    with pytest.raises(JobError, match=r"gradient_checkpointing.* 5 layers, but the model has 4"):
        checkpoint_layers(tiny_model("llama", num_hidden_layers=4), 5)
    with pytest.raises(JobError, match="3 layers, but the model has 2"):
        refuse_more_layers(ModelTable(preset="tiny-0.3m"), 3)


def learner_of_family(tokenizer, family: str, **overrides) -> LocalLearner:
    torch.set_num_threads(1)
    model = tiny_model(family, vocab_size=300, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    told = {"training__mismatch_limit": 1e9, "training__entropy_coef": 0.0, **overrides}
    return LocalLearner(make_config(**told), model, tokenizer)


def routed_episodes() -> list[CreditedEpisode]:
    """Of several lengths, whose advantages are 0: nothing but the routers' loss has a gradient."""
    made = [segment(f"r{k}", range(20, 23 + 7 * k), range(40, 45 + k), [-1.0] * (5 + k)) for k in range(5)]
    return [CreditedEpisode(part.rollout_id, [part], [0.0]) for part in made]


@pytest.mark.parametrize("family", [name for name in FAMILIES if name in BALANCED])
def test_the_loss_of_the_routers_is_the_familys_own_however_the_step_is_cut(tokenizer, family: str):
    cut = {"training__row_tokens": 64, "training__micro_batch_tokens": 64}
    in_pieces = learner_of_family(tokenizer, family, training__router_aux_coef=0.5, **cut)
    learner = learner_of_family(tokenizer, family, training__router_aux_coef=0.5)
    (by_pieces, metrics), (whole, of_whole) = (
        find_gradient(one, routed_episodes()) for one in (in_pieces, learner)
    )
    torch.testing.assert_close(by_pieces, whole, rtol=1e-4, atol=1e-7)
    rows = [torch.tensor(part.token_ids.tolist()) for item in routed_episodes() for part in item.segments]
    ids_BL = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask_BL = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    learner.model.zero_grad()
    learner.model.set_attn_implementation("eager")
    own = learner.model(input_ids=ids_BL, attention_mask=mask_BL, output_router_logits=True).aux_loss
    expected = gradient(learner.model, 0.5 * own)
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-6)
    for found in (metrics, of_whole):
        assert found["loss/router_aux"] == pytest.approx(own.item(), rel=1e-5)
        assert found["moe/load_max"] == pytest.approx(of_whole["moe/load_max"])
        assert 1.0 <= found["moe/load_max"] <= 2.0 and 0.5 < found["moe/load_entropy"] <= 1.0


# The ends of the names of what `all-linear` adapts in these families, beside attention's q, k, v and o.
MORE_ADAPTED = {
    "qwen3_5_text": "in_proj_qkv in_proj_z in_proj_a in_proj_b out_proj gate_proj up_proj down_proj",
    "lfm2": "in_proj out_proj w1 w2 w3",
    "gpt_oss": "",
    "qwen3_moe": "",
    "granite": "gate_proj up_proj down_proj",
    "gemma2": "gate_proj up_proj down_proj",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_on_the_familys_own_projections_all_of_them_trained_and_merged(tokenizer, family: str):
    learner = learner_of_family(tokenizer, family, lora__rank=2, training__router_aux_coef=0.0)
    parts = [part for item in routed_episodes() for part in item.segments]
    find_gradient(learner, [CreditedEpisode(part.rollout_id, [part], [1.0]) for part in parts])
    ups = {name: w for name, w in learner.model.named_parameters() if ".lora_B." in name}
    assert all(weight.grad.any() for weight in ups.values())
    if family in MORE_ADAPTED:
        ends = {name.partition(".lora_B.")[0].rpartition(".")[2] for name in ups}
        assert ends - {"q_proj", "k_proj", "v_proj", "o_proj"} == {*MORE_ADAPTED[family].split()} - {"o_proj"}
    with torch.no_grad():
        for weight in ups.values():
            weight.normal_(0.0, 0.03)
        merged = tiny_model(family, vocab_size=300, pad_token_id=None, bos_token_id=None, eos_token_id=None)
        merged.load_state_dict(learner._adapter.merged(), strict=False)
        found = learner.scorer.score(parts, LoopKeys(row_tokens=64, micro_batch_tokens=128))
        for mine, part in zip(found, parts, strict=True):
            torch.testing.assert_close(torch.from_numpy(mine), alone(merged, part), rtol=0, atol=1e-4)


EXPERTS = ("q_proj", "experts.gate_up_proj", "experts.down_proj")


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_adapters_of_experts_are_exact_in_scores_gradient_engine_and_checkpoint(
    tokenizer, family: str, tmp_path: Path
):
    keys = {"lora__rank": 2, "lora__target_modules": EXPERTS, "training__router_aux_coef": 0.0}
    learner = learner_of_family(tokenizer, family, **keys)
    served = learner.copy_to_serve()
    assert len(learner.weights()) == 4 * 3 * 2
    with torch.no_grad():
        for name, weight in learner.weights().items():
            weight.normal_(0.0, 0.05 if ".lora_B." in name else 0.2)
    parts = [part for item in routed_episodes() for part in item.segments]
    sizes = LoopKeys(row_tokens=64, micro_batch_tokens=128)
    packed = pack_segments(parts, row_tokens=64)
    own_N = learner.scorer.logprobs(packed)
    together = gradient(learner.model, own_N.sum())
    rows = [alone(learner.model, part) for part in parts]
    by_itself = gradient(learner.model, sum(row.sum() for row in rows))
    assert float((together - by_itself).norm() / by_itself.norm()) <= 1e-5
    learner.publish(tmp_path / "1")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "1", dtype=torch.float32).eval()
    assert set(merged.state_dict()) == set(learner._adapter.merged()) | {"lm_head.weight"}
    ServedWeights(served).replace(learner.weights())
    scores = learner.scorer.score(parts, sizes)
    for found, part in zip(scores, parts, strict=True):
        for model in (merged, served):
            torch.testing.assert_close(torch.from_numpy(found), alone(model, part), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_adapters_of_experts_resume_bit_for_bit_and_transformers_loads_them_with_peft(
    tokenizer, family: str, tmp_path: Path
):
    keys = {"lora__rank": 2, "lora__target_modules": EXPERTS, "training__router_aux_coef": 0.0}
    learner = learner_of_family(tokenizer, family, **keys)
    for iteration in (0, 1):  # as after a warm-up, and after an update
        with torch.no_grad():
            for weight in learner.weights().values():
                weight.add_(0.05 * torch.randn_like(weight))
        if iteration == 0:
            learner._adapter.begin()
        learner.save(tmp_path / f"iteration_{iteration}", Progress(iteration, iteration, 0))
    folder, part = tmp_path / "iteration_1", routed_episodes()[4].segments[0]
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.testing.assert_close(alone(loaded, part), alone(learner.model, part), rtol=0, atol=1e-5)
    config = replace(learner.config, model=ModelTable(path=tmp_path / "iteration_0"))
    resumed, _ = LocalLearner.resumed(config, folder)
    assert are_equal(resumed.model.state_dict(), learner.model.state_dict())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dropout": 0.1}, "lora.dropout is 0.1"),
        ({"dtype": torch.bfloat16}, "in bfloat16 most of a small product is rounded away"),
        ({"ranks": 2}, "2 ranks share"),
        ({"engine": "vllm"}, "vLLM servers take adapters of linear layers only"),
    ],
)
def test_adapters_of_experts_are_refused_where_they_would_not_be_exact(changes, says: str):
    where = {"dropout": 0.0, "dtype": torch.float32, "ranks": 1, "engine": "local"} | changes
    model = tiny_model("qwen3_moe")
    hold_in(model, where["dtype"])
    table = LoraTable(target_modules=EXPERTS, dropout=where["dropout"])
    with pytest.raises(JobError, match=says):
        refuse_experts(model, table, engine=where["engine"], ranks=where["ranks"])


@pytest.mark.parametrize(
    ("family", "target", "says"),
    [
        ("qwen3_moe", "gate_up_proj", r"one tensor per layer \(.*\), named experts.gate_up_proj"),
        ("nemotron_h", "out_proj", "whose weight its layer reads directly, without the adapter"),
        ("llama4_text", "router", "a Llama4Router, which computes more than a product"),
    ],
)
def test_a_layer_whose_adapter_would_not_be_computed_is_refused(family: str, target: str, says: str):
    with pytest.raises(JobError, match=says):
        adapted_layers(tiny_model(family), [target])


def test_a_loss_of_routers_is_refused_where_the_model_has_none(tokenizer):
    for family, says in (("granite", "has no experts"), ("glm4_moe", "balances experts without a loss")):
        with pytest.raises(JobError, match=f"is 0.1, but .*{says}"):
            learner_of_family(tokenizer, family, training__router_aux_coef=0.1)


def test_the_load_of_experts_by_hand():
    # Layer 1: 4, 4, 0, 0 of 8, twice the even load; layer 2 is even.
    found = load_metrics(torch.tensor([[4, 4, 0, 0], [2, 2, 2, 2]]))
    assert found == pytest.approx({"moe/load_max": 1.5, "moe/load_entropy": 0.75, "moe/idle_experts": 1.0})
    # 8 tokens, 2 of 4 experts each: shares f of 1 and mean probabilities P of 1/2 to two: 4 * (1/2 + 1/2)
    assert balance_loss(torch.tensor([4.0, 4.0, 0.0, 0.0]), torch.tensor([8, 8, 0, 0]), 8.0) == 4.0
    assert balance_loss(torch.tensor([2.0] * 4), torch.tensor([4] * 4), 8.0) == 2.0, "an even load"


def test_ranks_with_fewer_groups_of_segments_make_as_many_passes_as_the_others():
    class Two(Ranks):
        def of_every_rank(self, own):
            return [own, 9]

    packed = pack_segments(make_segments(LENGTHS), row_tokens=80)
    groups, _ = PaddedRows("sdpa", "", Two()).arranged(packed, CPU.device, torch.float32)[1][GROUPS]
    assert len(groups) == 9 and [len(group.read_R) for group in groups[-2:]] == [0, 0]
    scorer = learners("gemma2")
    expected = scorer.logprobs(packed)
    padded = replace(scorer, attention=replace(scorer.attention, ranks=Two()))
    torch.testing.assert_close(padded.logprobs(packed), expected)
