"""The plan beside real models and learners: what is counted is there, and what cannot fit is refused."""

from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, Qwen3Config

from tests.conftest import tiny_job
from tests.tiny_families import tiny_model
from tests.trainer_backend.learner.hand_made import make_config, make_episodes, make_learner, segment
from trainer_backend import learner_parts
from trainer_backend.core.collate import pack_segments
from trainer_backend.errors import JobError, ModelFolderError
from trainer_backend.inference.cache import CACHE_NAME, SlotCache
from trainer_backend.inference.keys import EngineKeys
from trainer_backend.job.training_table import LoraTable
from trainer_backend.learner.adapter import Adapter
from trainer_backend.learner.attention import BlockMask, ByLength, PaddedRows
from trainer_backend.learner.by_length import SHORTEST_SHARE
from trainer_backend.learner.device import Found, Placement, place
from trainer_backend.learner.factory import LocalFactory
from trainer_backend.learner.fit import less_memory
from trainer_backend.learner.learner import build_scorer
from trainer_backend.learner.loading import copy_to_serve
from trainer_backend.learner.memory import MemoryNeeds, MemoryUse, activations, cached_row, memory_needs
from trainer_backend.learner.memory import cache as cache_bytes
from trainer_backend.learner.memory_plan import (
    MemoryPlan,
    Models,
    main_memory,
    memory_plan,
    memory_use,
    plan_on,
    refuse_too_large,
    slower_layers,
)
from trainer_backend.learner.ranks import Ranks
from trainer_backend.learner.scoring import Scorer
from trainer_backend.learner.shapes import ModelShape, model_shape
from trainer_backend.learner.stepping import checkpoint_layers, stepping
from trainer_backend.learner.support import refuse_unsupported
from trainer_backend.models import save_model_folder
from trainer_backend.models.kinds import missing_kernels
from trainer_backend.terminal.check_command import lines_before_a_run

GIB = 2**30


@cache
def large_shape() -> ModelShape:
    """Two layers as wide as those of 8B parameters: 64 KiB of keys and values a token."""
    return model_shape(Qwen3Config(num_hidden_layers=2), None)


def count_bytes(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("overrides", [{}, {"lora__rank": 4}], ids=["all weights", "adapters"])
def test_weights_gradients_and_moments_are_what_a_learner_has(tokenizer, overrides):
    learner = make_learner(tokenizer, **overrides)
    learner.update(make_episodes(learner, [1.0, -1.0]), iteration=1)
    shape = model_shape(learner.model.config, learner.config.lora)
    planned = memory_needs(shape, memory_use(learner.config, place("cpu"), shape), is_gpu=False).device
    weights = list(learner.model.parameters())
    assert planned["weights"] == count_bytes(weights)
    assert planned["gradients"] == count_bytes(weight.grad for weight in weights if weight.requires_grad)
    state = learner._optimizer.state.values()
    moments = [values[name] for values in state for name in ("exp_avg", "exp_avg_sq")]
    assert planned["optimizer"] == count_bytes(moments)
    assert planned["engine"] == count_bytes(learner.copy_to_serve().parameters())
    rounded = replace(memory_use(learner.config, place("cpu"), shape), low=True)
    copied = count_bytes(copy_to_serve(learner.model, torch.bfloat16).parameters())
    assert memory_needs(shape, rounded, is_gpu=False).device["engine"] == copied


USE = MemoryUse(
    low=False, masked=False, row_tokens=256, micro_batch_tokens=1024, logits_chunk=8, keys=EngineKeys()
)  # fmt: skip


@pytest.mark.parametrize(
    ("family", "checkpointed", "rounded", "attention"),
    [
        ("qwen3", 0, True, BlockMask()),
        ("qwen3", 4, False, BlockMask()),
        ("llama", 0, False, ByLength()),
        ("llama", 2, True, ByLength()),
    ],
)
def test_activations_are_near_the_peak_of_an_update(family, rounded, checkpointed, attention):
    size = {"hidden_size": 96, "intermediate_size": 256, "num_attention_heads": 6, "head_dim": 16}
    model = tiny_model(family, **size)
    checkpoint_layers(model, checkpointed)
    placement = Placement(torch.device("cpu"), torch.bfloat16 if rounded else None)
    model.set_attn_implementation(attention.implementation)
    peak = measure_peak(Scorer(model, placement, attention, 8))
    masked = isinstance(attention, BlockMask)
    use = replace(USE, low=rounded, masked=masked, checkpointed=checkpointed)
    planned = activations(model_shape(model.config, None), use)
    assert 0.9 * peak < planned < 1.15 * peak


@pytest.mark.parametrize(
    ("family", "checkpointed"),
    [
        ("qwen3_5_text", 0), ("gpt_oss", 0), ("gemma3_text", 0), ("lfm2", 0), ("qwen3_moe", 0),
        ("nemotron_h", 0), ("gemma2", 2), ("qwen3_5_text", 4),
    ],
)  # fmt: skip
def test_activations_of_the_models_own_layers_are_near_the_peak_of_an_update(family, checkpointed):
    size = {"hidden_size": 96, "intermediate_size": 192, "head_dim": 16, "max_position_embeddings": 1024}
    model = tiny_model(family, **size)
    scorer = build_scorer(model, place("cpu"), 8, why_apart=refuse_unsupported(model, longest=256))
    shape = model_shape(model.config, None, longest=256)
    checkpoint_layers(model, checkpointed)
    peak = measure_peak(scorer)
    assert bool(shape.apart) == isinstance(scorer.attention, PaddedRows)
    # The plan has the padding that a group may have, which these segments of one length do not need.
    use = replace(USE, checkpointed=checkpointed)
    planned = activations(shape, use) * (SHORTEST_SHARE if shape.apart else 1.0)
    assert 0.75 * peak < planned < 1.3 * peak


@pytest.mark.parametrize(("checkpointed", "experts"), [(0, 64), (4, 256)])
def test_the_sums_of_experts_and_their_adapters_are_planned_as_they_are_made(checkpointed, experts):
    size = {"hidden_size": 96, "moe_intermediate_size": 96, "num_local_experts": experts}

    def planned_and_measured(*targets: str) -> tuple[int, int]:
        model = tiny_model("qwen3_moe", **size)
        lora = LoraTable(rank=2, target_modules=targets)
        shape = model_shape(model.config, lora)
        Adapter.fresh(model, lora, seed=0, base=None)
        checkpoint_layers(model, checkpointed)
        scorer = build_scorer(model, place("cpu"), 8, why_apart=None)
        return activations(shape, replace(USE, checkpointed=checkpointed)), measure_peak(scorer)

    plain, adapted = planned_and_measured("q_proj"), planned_and_measured("q_proj", "experts.down_proj")
    planned, measured = (b - a for a, b in zip(plain, adapted, strict=True))
    # A layer has as many tensors of 96 * 96 numbers. Their sums in all 4 layers, or in the one that is
    # computed again, and the gradient of a layer's.
    assert planned == 4 * experts * 96 * 96 * (2 if checkpointed else 5)
    assert 0.9 * measured < planned < 1.15 * measured


def measure_peak(scorer) -> int:
    """The most bytes that are allocated at a time in a forward and backward pass of 4 rows of 256 tokens."""
    parts = [segment(f"r{i}", [3, 3], [4] * 254, [-1.0] * 254) for i in range(4)]
    packed = pack_segments(parts, row_tokens=256)
    for weight in scorer.model.parameters():
        weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found, stepping(scorer.model):
        scorer.states(packed).logprobs_N.sum().backward()
    events = found.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(accumulate(size for _, size in changes))


def test_a_cpu_keeps_its_micro_batches_unless_its_memory_cannot_hold_them():
    small = {"vocab_size": 64, "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6}

    def chosen(**tables) -> MemoryPlan:
        config = make_config(**tables)
        return plan_on(place("cpu"), config, Models(model_shape(LlamaConfig(**small), None), "llama"))

    plan = chosen()
    assert plan.micro_batch_tokens == 4096 and not any("micro-batches" in note for note in plan.notes)
    assert chosen(training__micro_batch_tokens=300).micro_batch_tokens == 300
    # 1 MiB a token, of 4096 requests of 1024: no machine has so much, so the least is chosen, a row
    config = make_config(inference__max_running=4096, inference__max_model_len=1024)
    wide = model_shape(Qwen3Config(num_hidden_layers=2, head_dim=2048), None)
    too_large = plan_on(place("cpu"), config, Models(wide, "qwen3"))
    assert too_large.micro_batch_tokens == 1024
    assert "micro-batches of 1024 tokens are chosen" in too_large.notes[-1]


def test_a_learner_has_the_micro_batches_of_its_plan(tokenizer, tmp_path: Path):
    save_model_folder(tmp_path / "model", tiny_model("llama", vocab_size=300), tokenizer)
    job = tiny_job(model__preset=None, model__path=str(tmp_path / "model"))
    factory = learner_parts.local_learners(job)
    assert "memory" in factory.plan_memory(None, [])
    assert factory.fresh([], None).config.training.micro_batch_tokens == 4096


@dataclass(frozen=True, slots=True)
class BesideASmaller(Ranks):
    """This rank; another one has room for micro-batches of 1024 tokens."""

    def of_every_rank(self, own):
        return [own, 1024] if isinstance(own, int) else [own]


def test_ranks_compute_as_many_tokens_as_the_fullest_has_room_for_and_the_report_says_so():
    config = make_config()
    factory = LocalFactory(config, ranks=BesideASmaller())
    report, alone = factory.plan_memory(None, []), LocalFactory(config).plan_memory(None, [])
    assert "micro-batches of 1024 tokens are chosen" in report and "micro-batches" not in alone
    given, own = (float(text.split("activations ")[1].split(",")[0]) for text in (report, alone))
    assert given < own / 3


def make_plan(free: int, *, host: dict[str, int] | None = None, host_free: int = 0) -> MemoryPlan:
    needs = MemoryNeeds({"weights": 3 * GIB, "activations": 3 * GIB, "cache": 7 * GIB}, host or {}, 6 * GIB)
    return MemoryPlan(place("cpu"), needs, free, host_free)


def test_what_cannot_fit_at_its_least_is_refused_with_every_kind():
    kinds = r"13\.0 of 5\.0 GiB free: weights 3\.0, activations 3\.0, cache 7\.0.*Lower it\."
    with pytest.raises(JobError, match=rf"at least 6\.00 GiB on cpu: .*{kinds}"):
        refuse_too_large(make_plan(5 * GIB), hint="Lower it.")
    refuse_too_large(make_plan(8 * GIB), hint="")
    assert "fits only while sequences are shorter than allowed" in str(make_plan(8 * GIB))
    assert "fits only" not in str(make_plan(13 * GIB))
    moments = make_plan(20 * GIB, host={"optimizer": 9 * GIB}, host_free=8 * GIB)
    with pytest.raises(JobError, match=r"needs 9.00 of 8.00 GiB of main memory"):
        refuse_too_large(moments, hint="")


def test_one_sequence_as_long_as_allowed_makes_the_cache_as_large_as_the_plan_has_it(tokenizer):
    served = make_learner(tokenizer).copy_to_serve()
    cache = SlotCache(slots=5, max_len=200)
    with torch.inference_mode():
        cache.begin_prefill(first_row=0, length=200)
        served(input_ids=torch.ones((1, 200), dtype=torch.int64), use_cache=True, **{CACHE_NAME: cache})
    shape = model_shape(served.config, None)
    config = make_config(inference__max_running=5, inference__max_model_len=200, inference__kept_prefixes=0)
    use = replace(memory_use(config, place("cpu"), shape), trunks=False)
    planned = memory_needs(shape, use, is_gpu=False).device["cache"]
    assert count_bytes((*cache._keys, *cache._values)) == planned


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "nemotron_h", "granitemoehybrid"])
def test_a_row_of_layers_with_states_takes_what_the_plan_has_of_it(family):
    model = tiny_model(family)
    with torch.inference_mode():
        cache = model(input_ids=torch.ones((1, 10), dtype=torch.int64), use_cache=True)[CACHE_NAME]
    held = [value for layer in cache.layers for value in vars(layer).values()]
    tensors = [part for value in held for part in (value.values() if isinstance(value, dict) else [value])]
    shape, keys = model_shape(model.config, None), EngineKeys().model_copy(update={"max_model_len": 10})
    use = replace(USE, keys=keys)
    assert cached_row(shape, use) == count_bytes(filter(torch.is_tensor, tensors))
    assert cache_bytes(shape, use) == (64 + 2 * 64) * cached_row(shape, use)


def test_a_model_and_a_fixed_policy_are_planned_for_without_their_weights(tokenizer, tmp_path: Path):
    learner = make_learner(tokenizer)
    save_model_folder(tmp_path, learner.model, tokenizer)
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    named = make_config(model__preset=None, model__path=str(tmp_path))
    own = memory_plan(learner.config, tmp_path).needs.device
    for found in (own, memory_plan(named).needs.device):
        assert found["weights"] == count_bytes(learner.model.parameters())
    plan = memory_plan(learner.config, fixed=[tmp_path])
    # a preset beside it has its vocabulary, whatever model.vocab_size says
    assert plan.needs.device == own | {"fixed": own["engine"], "fixed cache": own["cache"]}
    assert ", fixed 1." in str(plan) and ", fixed cache " in str(plan)


def test_a_config_that_cannot_be_read_is_told_as_such(tmp_path: Path):
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelFolderError, match=r"config\.json"):
        memory_plan(make_config(), tmp_path)


def test_the_jobs_limits_are_what_is_counted_with():
    config = make_config(inference__max_model_len=500, inference__kept_prefixes=3, training__kl_coef=0.1)
    shape = large_shape()
    use = memory_use(config, place("cpu"), shape)
    assert (use.row_tokens, use.micro_batch_tokens) == (500, 4096)
    assert use.keys == config.inference and use.keys.slots == 16
    assert (use.reference, use.masked, use.low) == (True, False, False)
    assert memory_use(config, place("mps", Found(cuda=None, mps=True)), shape).masked


MIXED = {"rollout_only__model_path": "fixed", "rollout_allocation_schedule__alpha": 0.5}
ELSEWHERE = {"cluster": {"launcher": "external"}, "services__gateways": 2}


@pytest.mark.parametrize(
    ("tables", "engines", "processes"),
    [
        ({}, 1, 1),
        ({"cluster": {}}, 1, 2),
        ({"cluster": {}, "services__gateways": 3}, 3, 4),
        ({"cluster": {}, "services__gateways": 3, "inference__own_process": True}, 3, 4),
        ({"cluster": {}, "services__gateways": 3, **MIXED}, 3, 4),
        ({"cluster": {}, "services__gateways": 3, **MIXED, "inference__own_process": True}, 3, 7),
        ({"cluster": {"launcher": "ray"}, "services__gateways": 2}, 0, 1),
        ({**ELSEWHERE, "learner__url": "http://node3:9000"}, 0, 1),
        ({**ELSEWHERE, "learner__url": "http://127.0.0.1:9000"}, 2, 3),
        ({"inference": {"engine": "vllm", "urls": ["http://h:1"], "max_model_len": 256}}, 0, 1),
    ],
)
def test_every_gateway_with_an_engine_of_its_own_on_the_learners_machine_is_counted(
    tables, engines, processes
):
    config = make_config(**tables)
    use = memory_use(config, place("cpu"), large_shape())
    assert (use.engines, use.processes) == (engines, processes)
    assert ("lower services.gateways (3)" in less_memory(config)) == (engines == 3)


RANKS = {"cluster": {}, "learner__nproc_per_node": 2, "learner__nnodes": 2}


def test_of_several_ranks_those_of_the_first_node_share_it_with_the_engines(tokenizer, tmp_path: Path):
    save_model_folder(tmp_path, make_learner(tokenizer).model, tokenizer)
    config = make_config(**RANKS | {"cluster": {"launcher": "ray"}})
    config = replace(config, engines=1)
    plans = [memory_plan(config, tmp_path, ranks=Ranks(index, 4)) for index in range(4)]
    assert ["engine" in plan.needs.device for plan in plans] == [True, True, False, False]
    assert str(plans[3]).startswith("memory (cpu, float32, 2 of 4 ranks): ")
    assert "gathered" in plans[3].needs.device


def test_less_memory_names_keys_that_the_job_reads_and_that_are_not_turned_already():
    turned = {"training__gradient_checkpointing": True, "lora__rank": 2}
    plain, rest = less_memory(make_config()), less_memory(make_config(**turned))
    for knob in ("gradient_checkpointing", "[lora]"):
        assert knob in plain and knob not in rest
    for knob in ("micro_batch_tokens", "max_running"):
        assert knob in plain and knob in rest
    kept = {"learner__fsdp_reshard_after_forward": False, "learner__data_parallel_replicate_degree": 2}
    hint = less_memory(make_config(cluster={}, learner__nproc_per_node=2, **kept))
    assert "set learner.fsdp_reshard_after_forward = true" in hint
    assert "lower learner.data_parallel_replicate_degree (2)" in hint
    own, head = (make_config(algorithm__advantage="gae", training__critic=name) for name in ("own", "head"))
    assert "[lora]" in less_memory(head) and "[lora]" not in less_memory(own)
    assert "set training.critic = 'head'" in less_memory(own)


def test_main_memory_is_the_containers_where_that_is_less(tmp_path: Path):
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.stat").write_text("anon 2000000\nfile 1500000\n")
    assert main_memory(tmp_path) == 3_000_000  # files in memory give way
    (tmp_path / "memory.max").write_text("max\n")
    assert main_memory(tmp_path) > 3_000_000
    assert main_memory(tmp_path / "nowhere") > 3_000_000


def test_plan_and_check_tell_that_segments_have_rows_of_their_own_and_what_computes_states(
    tokenizer, tmp_path: Path
):
    end = tokenizer.eos_token_id
    model = tiny_model("qwen3_5_text", vocab_size=300, bos_token_id=None, eos_token_id=end, pad_token_id=end)
    save_model_folder(tmp_path, model, tokenizer)
    job = tiny_job(model__preset=None, model__path=str(tmp_path))
    lines = memory_plan(learner_parts.learner_config(job)).report().splitlines()
    found = [line for line in lines_before_a_run(job, trial=False) if line in lines[1:]]
    assert [line.split(":")[0] for line in found] == [
        "updates of this model run through transformers, a segment a row, padded by up to 25% of its tokens "
        "(learner/padding_share)",
        "layers with a state are computed by torch's operators, which are exact and slow",
    ]
    on_a_gpu = list(slower_layers("cuda", "", missing_kernels(model.config, lambda module: module == "fla")))
    assert on_a_gpu == [found[1].replace("a CPU has no others", "causal-conv1d would be much faster")]
