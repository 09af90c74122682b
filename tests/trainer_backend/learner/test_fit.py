"""Proposals for a GPU that is not here: they fit, and none of their settings could be left out."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from tests.conftest import tiny_job
from tests.trainer_backend.learner.hand_made import make_config
from trainer_backend.errors import JobError
from trainer_backend.job.schema import JobConfig
from trainer_backend.learner.device import place_on_card
from trainer_backend.learner.fit import GIB, Search, propose, with_settings
from trainer_backend.learner.memory_plan import Models
from trainer_backend.learner.shapes import ModelShape, count_checkpointed
from trainer_backend.terminal.check_command import card_bytes, lines_before_a_run

# 1 GiB of weights; a token's keys and values are 10 * 8 * 128 * 2 numbers of 2 bytes.
SHAPE = ModelShape(
    parameters=2**28, layers=10, width=1024, mlp_width=4096, heads=8, kv_heads=8, head_dim=128,
    vocabulary=1000,
)  # fmt: skip
ADAPTED = replace(SHAPE, adapters=2**20)
SAMPLES_HERE = {"inference__max_model_len": 1024, "inference__max_running": 64}
CACHE, SHARE = "inference.cache_gib", "inference.vllm.gpu_memory_utilization"
MICRO, SLEEP = "training.micro_batch_tokens", "inference.sleep"
CHECKPOINTING, OFFLOAD = "training.gradient_checkpointing", "training.optimizer_offload"
VLLM = {"inference": {"engine": "vllm", "vllm_python": "python", "max_model_len": 1024}}


def make_search(card_gib: float, **tables: Any) -> Search:
    config = make_config(**tables)
    shapes = {(True, "head"): Models(SHAPE, "llama"), (False, "head"): Models(ADAPTED, "llama")}
    return Search(config, place_on_card(int(card_gib * GIB)), shortest=512, _models=shapes)


def test_what_is_planned_is_a_card_of_that_size_in_bfloat16_with_its_kernels():
    plan = make_search(24, **SAMPLES_HERE).plan(make_search(24, **SAMPLES_HERE).config)
    device = plan.needs.device
    assert plan.free == 24 * GIB
    assert (device["weights"], device["gradients"], device["optimizer"]) == (GIB, GIB, 2 * GIB)
    assert device["engine"] == GIB // 2
    # a row of 1024 tokens is 40 MiB; 64 of them run, and 64 are kept
    assert device["cache"] == 128 * 40 * 2**20
    assert "sampling" in device, "the cache is in pages"


@pytest.mark.parametrize(
    ("card_gib", "tables", "keys"),
    [
        (16, SAMPLES_HERE, []),
        (12, SAMPLES_HERE, [CACHE]),
        (9, SAMPLES_HERE, [CACHE, MICRO]),
        (6.4, SAMPLES_HERE, [CACHE, MICRO, CHECKPOINTING]),
        (4.5, SAMPLES_HERE, [CACHE, MICRO, CHECKPOINTING, OFFLOAD]),
        (24, VLLM, [SHARE]),
        (8, VLLM, [SHARE, MICRO, SLEEP]),
        (4, VLLM, [SHARE, MICRO, SLEEP, "lora"]),
    ],
)
def test_a_proposal_fits_and_needs_each_of_its_settings(card_gib, tables, keys):
    search = make_search(card_gib, **tables, training__micro_batch_tokens=4096)
    proposal = propose(search)
    assert proposal.fits and list(proposal.settings) == keys
    changed = with_settings(search.config, proposal.settings)
    assert proposal.plan == search.plan(changed) and proposal.plan.need <= proposal.plan.free
    for key in keys:
        rest = {other: value for other, value in proposal.settings.items() if other != key}
        assert search.plan(with_settings(search.config, rest)).need > proposal.plan.free
    assert str(proposal).endswith(f"of {card_gib:.1f} GiB")


def test_micro_batches_that_the_job_leaves_open_are_the_largest_that_fit():
    def plan(card_gib: float, **tables: Any):
        search = make_search(card_gib, **SAMPLES_HERE, **{"training__batch_decisions": 512, **tables})
        return search.plan(search.config), search

    # A twentieth of the card is left free, and a tenth of the activations.
    for card_gib in (14, 24, 60):
        chosen, search = plan(card_gib)
        tokens = chosen.micro_batch_tokens
        assert chosen.need + chosen.needs.device["activations"] / 10 <= 0.95 * card_gib * GIB
        more = search.plan(with_settings(search.config, {MICRO: 2 * tokens}))
        assert more.need + more.needs.device["activations"] / 10 > 0.95 * card_gib * GIB
        again = search.plan(with_settings(search.config, {MICRO: tokens}))
        assert chosen.needs == again.needs and len(chosen.notes) == len(again.notes) + 1
        assert f"micro-batches of {tokens} tokens" in chosen.notes[-1]
    assert plan(14)[0].micro_batch_tokens < plan(24)[0].micro_batch_tokens < 2**16
    assert plan(1000)[0].micro_batch_tokens == 2**16
    # no more than a step has: 8 decisions of at most 1024 tokens
    assert plan(1000, training__batch_decisions=8)[0].micro_batch_tokens == 8192


def test_as_few_layers_are_checkpointed_as_make_a_job_fit():
    tables = {**SAMPLES_HERE, "inference__cache_gib": 0.4, "training__micro_batch_tokens": 1024}
    proposals = {card_gib: propose(make_search(card_gib, **tables)) for card_gib in (7.4, 7.0, 6.6, 6.2)}
    # of 10 layers a quarter, half, or all
    assert {card_gib: dict(each.settings) for card_gib, each in proposals.items()} == {
        7.4: {}, 7.0: {CHECKPOINTING: 2}, 6.6: {CHECKPOINTING: 5}, 6.2: {CHECKPOINTING: True}
    }  # fmt: skip
    assert "training.gradient_checkpointing = 5 " in str(proposals[6.6])


def test_one_layer_is_not_all_of_them_though_1_equals_true():
    job = tiny_job(training__gradient_checkpointing=1)
    again = JobConfig.model_validate_json(job.model_dump_json())
    for wish in (job.training.gradient_checkpointing, again.training.gradient_checkpointing):
        assert type(wish) is int and count_checkpointed(wish, 10) == 1
    assert count_checkpointed(True, 10) == 10 and count_checkpointed(False, 10) == 0
    # Where one is set and all are needed, the proposal says so.
    tables = {**SAMPLES_HERE, "inference__cache_gib": 0.4, "training__micro_batch_tokens": 1024}
    proposals = (
        propose(make_search(size, **tables, **{CHECKPOINTING.replace(".", "__"): 1})) for size in (7.4, 6.2)
    )
    assert [dict(each.settings) for each in proposals] == [{}, {CHECKPOINTING: True}]


def test_what_ranks_alone_read_is_proposed_with_more_ranks_alone():
    search = make_search(3, **VLLM, training__optimizer_offload=True)
    proposal = propose(search)
    assert proposal.fits and proposal.settings["learner.nproc_per_node"] == 2
    assert proposal.settings["training.optimizer_offload"] is False
    assert "cluster" in proposal.settings and str(proposal).endswith(" on each rank")


def test_what_no_setting_makes_fit_is_told_with_what_it_still_needs():
    proposal = propose(make_search(1.2, **SAMPLES_HERE))
    assert not proposal.fits and str(proposal).startswith("none of the tried settings is enough: with ")


def test_servers_of_a_run_take_gpus_from_the_last_one_and_their_share_of_it():
    search = make_search(10, **VLLM, cluster={}, learner__nproc_per_node=2)
    plan = search.plan(search.config)
    assert plan.ranks == "rank 1 of 2 ranks", "it needs most"
    assert plan.needs.device["vllm"] == int(0.92 * 10 * GIB)


@pytest.mark.parametrize(
    ("text", "size"), [("24GiB", 24 * GIB), ("80 GB", 80 * 10**9), ("1.5gib", 3 * GIB // 2)]
)
def test_a_size_has_a_number_and_a_unit(text, size):
    assert card_bytes(text) == size


@pytest.mark.parametrize("text", ["24", "24G", "0GiB", "-1GB", "GiB", "1e3GB", "24 Gibit"])
def test_another_size_is_refused_with_what_is_allowed(text):
    with pytest.raises(JobError, match="24GiB"):
        card_bytes(text)


def check_lines(card: str, **tables: Any) -> list[str]:
    return list(lines_before_a_run(tiny_job(**tables), trial=False, card=card_bytes(card)))


def test_check_tells_each_kind_with_the_sum_and_the_card():
    lines = check_lines("24GiB")
    start = next(number for number, line in enumerate(lines) if line.startswith("memory on cuda with 24.0"))
    kinds = [line.split()[0] for line in lines[start + 1 :] if line.startswith("  ")]
    assert kinds[:3] == ["weights", "gradients", "optimizer"]
    assert {"sum", "card"} < {*kinds} and lines[-1] == "everything fits at its fullest"


def test_check_says_what_it_cannot_plan_where_the_model_is_not_here():
    lines = check_lines("24GiB", model={"name": "someone/no-such-model"})
    assert lines[-1].startswith("memory is not planned") and "hf download someone/no-such-model" in lines[-1]


def test_a_config_alone_is_enough_for_a_plan(tmp_path: Path):
    (tmp_path / "config.json").write_text(LlamaConfig(num_hidden_layers=1, hidden_size=64).to_json_string())
    assert check_lines("24GiB", model={"path": tmp_path})[-1] == "everything fits at its fullest"


def test_check_refuses_a_job_that_cannot_fit_with_a_proposal():
    with pytest.raises(JobError, match=r"does not fit: .* of 0\.5 GiB") as caught:
        check_lines("0.5GiB")
    assert "it needs" in (caught.value.hint or "")
