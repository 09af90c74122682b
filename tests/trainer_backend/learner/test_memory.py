"""The plan of memory, by hand and beside real models."""

from dataclasses import replace
from typing import Any

import pytest

from trainer_backend.inference.keys import EngineKeys
from trainer_backend.job.tables import LearnerTable
from trainer_backend.learner.memory import OVERHEAD, MemoryUse, memory_needs, serving_needs
from trainer_backend.learner.shapes import ModelShape

# One layer of width 4, two heads of 2 for queries and one for keys, an MLP of 8, 10 tokens, 1000 weights.
SHAPE = ModelShape(
    parameters=1000, layers=3, width=4, mlp_width=8, heads=2, kv_heads=1, head_dim=2, vocabulary=10
)
# Not checked: a job's requests are longer.
KEYS = EngineKeys().model_copy(update={"max_running": 5, "kept_prefixes": 2, "max_model_len": 11})
CPU = MemoryUse(low=False, keys=KEYS, masked=True, row_tokens=5, micro_batch_tokens=10, logits_chunk=6)


def with_keys(use: MemoryUse, **changes: Any) -> MemoryUse:
    return replace(use, keys=use.keys.model_copy(update=changes))


def test_float32_on_a_cpu_by_hand():
    needs = memory_needs(SHAPE, CPU, is_gpu=False)
    # a layer keeps 24 * 4 + 16 * 8 + 16 * 4 = 288 bytes a token; three, and three tenths of one in work
    activations = 10 * (3 * 288 + 86) + 10 * 5 * 5  # and of the mask a token: 4 bytes and a boolean a key
    assert needs.device == {
        "weights": 4000,
        "gradients": 4000,
        "optimizer": 8000,
        "engine": 4000,
        "cache": 7 * 11 * (2 * 3 * 1 * 2) * 4,
        "activations": activations,
        "logits": 6 * 10 * 12 + 10 * 4 * 4,
    }
    assert needs.host == {}
    # at the very least without the two prefixes, and with two thirds of the activations
    assert needs.least == int(sum(needs.device.values()) - activations / 3 - 2 * 11 * 12 * 4)


def test_of_a_cache_in_pages_one_longest_request_must_fit():
    rows, paged = (memory_needs(SHAPE, replace(CPU, paged=paged), is_gpu=True) for paged in (False, True))
    # logits of five rows over 10 tokens, and what is made of them
    sampling = 5 * 10 * 52
    assert paged.device == rows.device | {"sampling": sampling}
    # five requests run, and four of them may wait: 11 tokens of 12 numbers each
    assert rows.least - paged.least == 4 * 11 * 12 * 4 - sampling


def test_a_cache_in_pages_takes_no_more_than_it_may_and_at_least_one_longest_request():
    row = 11 * 12 * 4
    for most, cache in ((3 * row + 1, 3 * row + 1), (1, row), (10**9, 7 * row)):
        use = with_keys(replace(CPU, paged=True), cache_gib=most / 2**30)
        needs = memory_needs(SHAPE, use, is_gpu=True)
        assert needs.device["cache"] == cache
        assert needs.least == memory_needs(SHAPE, replace(CPU, paged=True), is_gpu=True).least
        assert serving_needs(SHAPE, use, is_gpu=True).device["cache"] == cache
        fixed = memory_needs(SHAPE, use, is_gpu=True, fixed=[SHAPE, SHAPE])
        assert fixed.device["fixed cache"] == 2 * cache
    assert memory_needs(SHAPE, with_keys(CPU, cache_gib=1 / 2**30), is_gpu=True).device["cache"] == 7 * row


def test_each_engine_has_weights_and_a_cache_and_each_process_an_overhead():
    one = memory_needs(SHAPE, CPU, is_gpu=True)
    three = memory_needs(SHAPE, replace(CPU, engines=3, processes=4), is_gpu=True)
    assert three.device == one.device | {
        "engine": 3 * one.device["engine"],
        "cache": 3 * one.device["cache"],
        "overhead": 4 * OVERHEAD,
    }
    none = memory_needs(SHAPE, replace(CPU, engines=0), is_gpu=False)
    assert not {"engine", "cache"} & set(none.device)
    # each further one at least: its weights, its cache without the two prefixes, and its overhead
    assert three.least - one.least == 2 * (4000 + 5 * 11 * 12 * 4) + 3 * OVERHEAD


# 100 weights outside of three layers of 300; four ranks, of which two are here.
ENDS = {"ends": 100, "critic": 5}
RANKS = {"nnodes": 2, "nproc_per_node": 2}
FOUR = LearnerTable(**RANKS)
LOW = {"low": True, "masked": False}
MASK = 10 * 5 * 5  # a token: 4 bytes and a boolean for each key of its row


@pytest.mark.parametrize(
    ("shape", "use", "expected"),
    [
        # The master copy stays float32. 26 * 4 + 8 * 8 + 6 * 4 + 4 * 2 = 200 bytes a token and layer, and
        # autocast keeps its copy of the weights.
        (
            {}, LOW,
            {
                "weights": 4000, "engine": 2000, "cache": 7 * 11 * 12 * 2, "overhead": OVERHEAD,
                "activations": 10 * (3 * 200 + 60) + 2000, "logits": 6 * 10 * 12 + 10 * 4 * (4 + 2),
            },
        ),
        # Layers by kernels keep 12 * 4 + 6 * 8 + 6 * 4 + 6 * 2 = 132, unless adapters are trained.
        ({}, {**LOW, "fused": True}, {"activations": 10 * (3 * 132 + 39) + 2000}),
        ({"adapters": 50}, {**LOW, "fused": True}, {"activations": 10 * (3 * 200 + 60)}),
        # Adapters have gradients and moments of their own; an engine copies both, and a reference them alone.
        (
            {"adapters": 50}, {**LOW, "reference": True},
            {
                "weights": 1000 * 2 + 50 * 4, "gradients": 200, "optimizer": 400, "engine": 2000 + 50 * 2,
                "reference": 50 * 4,
            },
        ),
        ({}, {**LOW, "reference": True}, {"reference": 2000}),
        # Norms and biases are float32 in every copy.
        (
            {"vectors": 100}, {**LOW, "reference": True},
            {"weights": 4000} | dict.fromkeys(("engine", "reference", "fixed"), 900 * 2 + 100 * 4),
        ),
        ({"vectors": 100, "adapters": 50}, LOW, {"weights": 900 * 2 + 100 * 4 + 50 * 4}),
        ({"vectors": 100}, {}, {"engine": 4000}),
        # Norms of heads keep queries and keys three times.
        ({"head_norms": True}, {}, {"activations": 10 * (3 * 336 + 100) + MASK}),
        # Norms keep 96, the MLP 128, attention 64 bytes a token: two layers have a state of 200 in its place.
        (
            {"states": 2, "state_bytes": 200}, {},
            {"activations": 10 * (3 * 224 + 2 * 200 + 64 + 424 * 3 // 10) + MASK},
        ),
        # Of convolutions nothing is known: they are counted as attention.
        ({"states": 2}, {}, {"activations": 10 * (3 * 288 + 86) + MASK}),
        # A mixer, a state and an MLP, each with one norm.
        (
            {"states": 1, "state_bytes": 200, "mlps": 1, "norms": 1}, {},
            {"activations": 10 * (3 * 48 + 64 + 200 + 128 + 248 * 3 // 10) + MASK},
        ),
        # Experts with adapters are summed in each layer, or in the one that is computed again, and one has a
        # gradient; an engine sums those of the layer that it computes.
        ({"adapted_experts": 300}, {}, {"activations": 10 * (3 * 288 + 86) + MASK + 4 * 100 * (3 + 1)}),
        (
            {"adapted_experts": 300}, {"checkpointed": 3},
            {"activations": 10 * (3 * 16 + 288 * 14 // 10) + MASK + 4 * 100 * (1 + 1)},
        ),
        ({"adapters": 50, "adapted_experts": 300}, {}, {"engine": 4 * (1000 + 50 + 100)}),
        # Checkpointed layers keep their input, and one layer is computed at a time. The layers that keep all
        # are done when one is computed again, and need more.
        ({}, {"checkpointed": 3}, {"activations": 10 * (3 * 16 + 288 * 14 // 10) + MASK}),
        ({}, {"checkpointed": 1}, {"activations": 10 * (16 + 2 * 288 + 86) + MASK}),
        ({}, {"checkpointed": 2}, {"activations": 10 * (2 * 16 + 288 * 14 // 10) + MASK}),
        # Of a critic with layers of its own, ranks share all but the head.
        ({**ENDS, "critic": 1005}, {"ranks": FOUR}, {"weights": 2020, "gradients": 2020, "optimizer": 4040}),
        # Gathered layers that are kept are whole on every rank, but for their gradients.
        (
            ENDS, {"ranks": LearnerTable(**RANKS, fsdp_reshard_after_forward=False)},
            {"gathered": 1000 * 4 + (100 + 2 * 300) * 4},
        ),
        # Each group of ranks holds all weights.
        (ENDS, {"ranks": LearnerTable(**RANKS, data_parallel_replicate_degree=2)}, {"weights": 2000 + 20}),
    ],
    ids=",".join,
)  # fmt: skip
def test_bytes_on_a_gpu_by_hand(shape: dict[str, Any], use: dict[str, Any], expected: dict[str, int]):
    model = replace(SHAPE, **shape)
    found = memory_needs(model, replace(CPU, **use), is_gpu=True, fixed=[model]).device
    assert {kind: found[kind] for kind in expected} == expected


def test_what_rows_share_outside_of_them_is_counted_with_the_cache():
    rows = {
        slots: memory_needs(SHAPE, with_keys(CPU, max_running=slots), is_gpu=False) for slots in (1, 5, 6)
    }
    for slots, shared in {1: 0, 5: 1, 6: 2}.items():
        use = with_keys(replace(CPU, trunks=True), max_running=slots)
        cache = memory_needs(SHAPE, use, is_gpu=False).device["cache"]
        assert cache - rows[slots].device["cache"] == shared * 11 * 12 * 4
        other = replace(SHAPE, own_pass=False)
        assert memory_needs(other, use, is_gpu=False).device["cache"] == rows[slots].device["cache"]


def test_offloaded_moments_are_in_main_memory_of_a_gpu_and_where_they_were_on_a_cpu():
    use = replace(CPU, offload=True)
    on_gpu, on_cpu = (memory_needs(SHAPE, use, is_gpu=is_gpu) for is_gpu in (True, False))
    assert "optimizer" not in on_gpu.device
    assert on_gpu.host == {"optimizer": 8000, "checkpoint": 4000}
    assert (on_cpu.device["optimizer"], on_cpu.host) == (8000, {})


def test_a_checkpoint_passes_through_main_memory_as_weights_first_and_moments_next():
    assert memory_needs(SHAPE, CPU, is_gpu=True).host == {"checkpoint": 8000}
    assert memory_needs(replace(SHAPE, adapters=50), CPU, is_gpu=True).host == {"checkpoint": 4000}


LAYERED = replace(SHAPE, **ENDS)


def changes(shape: ModelShape, use: MemoryUse, *, is_gpu: bool = True) -> dict[str, int]:
    """Bytes of the kinds on the device that are not as they are with one process."""
    one, found = (
        memory_needs(shape, each, is_gpu=is_gpu).device for each in (replace(use, ranks=LearnerTable()), use)
    )
    return {kind: found.get(kind, 0) for kind in {*one, *found} if found.get(kind) != one.get(kind)}


def test_a_rank_holds_its_share_and_what_it_gathers():
    assert changes(LAYERED, replace(CPU, ranks=FOUR)) == {
        "weights": 1000 + 20,  # of 4 bytes each; the value head is whole
        "gradients": 1000 + 20,
        "optimizer": 2000 + 40,
        "gathered": (100 + 2 * 300) * (4 + 4),  # embedding and two layers, and their gradients
    }


def test_offloaded_shares_are_in_main_memory_with_those_of_the_nodes_other_ranks():
    use = replace(CPU, ranks=LearnerTable(**RANKS, fsdp_cpu_offload=True), reference=True)
    found = changes(LAYERED, use)
    assert {kind: found[kind] for kind in ("weights", "gradients", "optimizer", "reference")} == {
        "weights": 20, "gradients": 20, "optimizer": 40, "reference": 0,
    }  # fmt: skip
    host = memory_needs(LAYERED, use, is_gpu=True).host
    assert host["shares"] == 2 * (1000 + 1000 + 2000 + 1000)


def test_one_rank_at_a_time_loads_the_whole_model_and_each_writes_its_part_of_a_checkpoint():
    use = replace(CPU, ranks=LearnerTable(nnodes=4))
    assert memory_needs(LAYERED, use, is_gpu=True).host == {"loading": 4000}
    use = replace(CPU, ranks=FOUR)
    assert memory_needs(LAYERED, use, is_gpu=False).host == {"loading": 4000}
    # the moments of two ranks, a quarter each but for the value head's
    assert memory_needs(LAYERED, use, is_gpu=True).host == {"checkpoint": 2 * (2000 + 40)}
    with_copy = replace(use, reference=True)  # which all ranks make at once
    assert memory_needs(LAYERED, with_copy, is_gpu=True).host == {"loading": 2 * 8000}
    fewer = replace(use, ranks=LearnerTable(nproc_per_node=2, data_parallel_replicate_degree=2))
    # the moments of both, which each group of one has whole
    assert memory_needs(LAYERED, fewer, is_gpu=True).host == {"checkpoint": 2 * (8000 + 40)}


def test_adapters_are_whole_on_every_rank_and_what_is_under_them_is_shared():
    shape = replace(LAYERED, adapters=50, critic=0)
    use = replace(CPU, low=True, masked=False, reference=True, ranks=FOUR)
    assert changes(shape, use) == {"weights": 2000 // 4 + 200, "gathered": (100 + 2 * 300) * 2}


def test_the_ranks_of_a_node_share_the_memory_of_a_cpu():
    use = replace(CPU, ranks=FOUR)
    on_gpu, on_cpu = (memory_needs(LAYERED, use, is_gpu=is_gpu).device for is_gpu in (True, False))
    for kind in ("weights", "gradients", "optimizer", "gathered", "activations", "logits"):
        assert on_cpu[kind] == 2 * on_gpu[kind]
    assert (on_cpu["engine"], on_cpu["cache"]) == (on_gpu["engine"], on_gpu["cache"])


@pytest.mark.parametrize(
    "more",
    [
        replace(CPU, micro_batch_tokens=100),
        replace(CPU, row_tokens=50),
        replace(CPU, logits_chunk=60),
        with_keys(CPU, max_running=50),
        with_keys(CPU, max_model_len=110),
    ],
)
def test_every_limit_that_an_error_names_makes_a_difference(more: MemoryUse):
    assert memory_needs(SHAPE, more, is_gpu=False).least > memory_needs(SHAPE, CPU, is_gpu=False).least


def test_fixed_policies_hold_weights_and_a_cache_of_their_own():
    other = replace(SHAPE, parameters=3000, layers=2)
    alone = memory_needs(SHAPE, CPU, is_gpu=False)
    needs = memory_needs(SHAPE, CPU, is_gpu=False, fixed=[SHAPE, other])
    more = {"fixed": (1000 + 3000) * 4, "fixed cache": 7 * 11 * (12 + 8) * 4}
    assert needs.device == alone.device | more
    # of their cache too, the kept prefixes may go: 2 of 7
    assert needs.least == pytest.approx(alone.least + sum(more.values()) - 2 * 11 * 20 * 4, abs=1)


def test_the_largest_fixed_policy_passes_through_main_memory_before_any_checkpoint_does():
    use = replace(CPU, low=True, masked=False)
    small, large = replace(SHAPE, parameters=900), replace(SHAPE, parameters=3000)
    # moments, 8 bytes a weight of the actor, are more than the small one in float32 and bfloat16
    assert memory_needs(SHAPE, use, is_gpu=True, fixed=[small]).host == {"checkpoint": 8000}
    needs = memory_needs(SHAPE, use, is_gpu=True, fixed=[small, large])
    assert (needs.host, needs.device["fixed"]) == ({"fixed": 3000 * 6}, 3900 * 2)


def test_while_vllm_sleeps_the_larger_of_an_update_and_of_its_own_memory_is_held():
    use = replace(CPU, engines=0, vllm_servers=1)
    both = memory_needs(SHAPE, replace(use, vllm=5 * OVERHEAD), is_gpu=True).device
    assert both["vllm"] == 5 * OVERHEAD and both["gradients"] == 4000
    awake = memory_needs(SHAPE, replace(use, vllm=5 * OVERHEAD, vllm_sleeps=True), is_gpu=True).device
    # what stays in the learner from step to step, and vLLM
    assert awake == {"weights": 4000, "optimizer": 8000, "vllm": 5 * OVERHEAD, "overhead": OVERHEAD}
    # a server of CUDA's own size has nothing to give back
    update = memory_needs(SHAPE, replace(use, vllm=OVERHEAD, vllm_sleeps=True), is_gpu=True).device
    assert update == both | {"vllm": OVERHEAD}
