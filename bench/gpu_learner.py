"""The learner's figures of bench/gpu.py: attention kernel against mask, MFU of an update, and memory."""

import statistics
from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from bench.gpu_engine import agreement_figure
from bench.gpu_setup import (
    Plan,
    Report,
    fitting,
    make_config,
    make_job,
    make_model,
    make_segments,
    plan_memory,
    timed,
)
from bench.model_flops import Peak, update_flops
from trainer_backend import learner_parts
from trainer_backend.core.collate import pack_segments
from trainer_backend.core.segments import Segment
from trainer_backend.learner.attention import BlockMask, PackedAttention, attention_for
from trainer_backend.learner.device import Placement
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.learner.memory_plan import MemoryPlan
from trainer_backend.learner.operators import BY_TORCH, operators_for
from trainer_backend.learner.scoring import Scorer
from trainer_backend.learner.shapes import model_shape
from trainer_backend.models import train_tokenizer
from trainer_backend.parts import CreditedEpisode

# LoRA of rank 32 with 64 requests of up to 8192 tokens, which must fit.
LONG_LORA = {"lora": {"rank": 32}, "gradient_checkpointing": True}


def attention_figures(report: Report, name: str, plan: Plan, placement: Placement) -> None:
    """Compare the device's attention with attention under a mask, on up to 4 of the shape's layers.

    Its results may be at most 1.5 times as far from float32 as the mask's, plus 1e-5. Speed is not judged.
    """
    config = make_config(name, layers=min(4, make_config(name).num_hidden_layers))
    model = make_model(config, placement.device)
    tokens = min(2048, plan.tokens)
    segments = make_segments(tokens, config.vocab_size, longest=tokens // 4)
    exact = computed(model, replace(placement, low=None), BlockMask(), segments)
    masked, own = BlockMask(), attention_for(placement, head_dim=config.head_dim)
    by_mask = computed(model, placement, masked, segments)
    by_own = computed(model, placement, own, segments)
    mask_s, own_s = (
        min(timed(lambda: computed(model, placement, way, segments), placement.device) for _ in range(3))  # noqa: B023
        for way in (masked, own)
    )
    for what, was, is_ in zip(
        ("log-probs", "gradients"), apart(by_mask, exact), apart(by_own, exact), strict=True
    ):
        report.add(
            "attention", name,
            f"{what} by {type(own).__name__} are {is_:.2e} from float32's, under a mask {was:.2e}; "
            f"{mask_s / own_s:.1f} times as fast",
            met=is_ <= 1.5 * was + 1e-5,
            missed="TOO FAR",
            path=type(own).__name__, what=what, packed=is_, masked=was, masked_s=mask_s, packed_s=own_s,
        )  # fmt: skip


def computed(
    model: PreTrainedModel, placement: Placement, attention: PackedAttention, segments: Sequence[Segment]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the [N] log-probs of the segments, and the gradient of the mean log-prob."""
    model.set_attn_implementation(attention.implementation)
    model.zero_grad()
    packed = pack_segments(segments, row_tokens=sum(map(len, segments)))
    operators = BY_TORCH if isinstance(attention, BlockMask) else operators_for(placement, model.config)
    logprobs_N = Scorer(model, placement, attention, 1024, operators=operators).logprobs(packed)
    logprobs_N.mean().backward()
    gradient = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    return logprobs_N.detach(), gradient


def apart(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> list[float]:
    """Return for each pair of tensors the root mean square of the difference, relative to that of `other`."""
    return [float((a - b).norm() / b.norm()) for a, b in zip(one, other, strict=True)]


def learner_figures(report: Report, name: str, plan: Plan, placement: Placement, peak: Peak) -> None:
    """Measure the learner: agreement with an engine, MFU of the update, memory against the plan.

    The first of `WAYS` that fits the memory plan is trained.
    """
    config = make_config(name)
    way, job, memory = fitting(config, plan, placement.device.type)
    report.add("plan", name, f"{way}; {memory}", way=way, needs=dict(memory.needs.device), free=memory.free)
    if memory.shortage() is not None:
        report.miss("update", name, str(memory.shortage()))
        return
    learner = LocalLearner(
        learner_parts.learner_config(job),
        make_model(config, placement.device),
        train_tokenizer(["wood stone"], 300),
    )
    scorer, dtypes = learner.scorer, sorted({str(weight.dtype) for weight in learner.model.parameters()})
    report.add(
        "learner", name,
        f"{placement}; {type(scorer.attention).__name__}, logits of {scorer.logits_chunk} tokens at a time, "
        f"weights of {', '.join(dtypes)}",
        path=type(scorer.attention).__name__,
    )  # fmt: skip
    if placement.low is not None:
        agreement_figure(report, name, plan, scorer)
    update_figure(report, name, learner, plan, peak)
    memory_figure(report, name, memory)


def update_figure(report: Report, name: str, learner: LocalLearner, plan: Plan, peak: Peak) -> None:
    """Time an update: it scores packed tokens, a quarter of them sampled, and makes an optimizer step."""
    shape = model_shape(make_config(name), learner.config.lora)
    segments = make_segments(plan.tokens, shape.vocabulary, longest=min(2048, plan.tokens // 4))
    episodes = [
        CreditedEpisode(segment.rollout_id, [segment], [(-1.0) ** number])
        for number, segment in enumerate(segments)
    ]
    device = learner.scorer.placement.device
    seconds = [timed(lambda: learner.update(episodes, iteration=1), device) for _ in range(plan.rounds + 1)]
    median = statistics.median(seconds[1:])
    lengths = [len(segment) for segment in segments]
    sampled = sum(len(segment.logprobs) for segment in segments)
    mfu = update_flops(shape, lengths, sampled) / (median * peak.flops)
    report.add(
        "update", name,
        f"{sum(lengths)} tokens, {sampled} of them sampled, {len(lengths)} segments: {median:.3f} s "
        f"({min(seconds[1:]):.3f} to {max(seconds[1:]):.3f}), {sum(lengths) / median:.0f} tokens/s, "
        f"MFU {mfu:.1%} (least {plan.least_mfu:.0%})",
        met=mfu >= plan.least_mfu,
        missed="TOO SLOW",
        seconds=seconds, tokens=sum(lengths), sampled=sampled, mfu=mfu,
    )  # fmt: skip


def memory_figure(report: Report, name: str, memory: MemoryPlan) -> None:
    """Report the peak memory of tensors, which must not exceed the plan."""
    if memory.placement.device.type != "cuda":
        report.add("memory", name, "is counted on CUDA alone")
        return
    planned, peak = sum(memory.needs.device.values()), torch.cuda.max_memory_allocated()
    kept = torch.cuda.max_memory_reserved()
    report.add(
        "memory", name,
        f"learner: peak {peak / 2**30:.1f} GiB ({kept / 2**30:.1f} with what the allocator keeps), planned "
        f"{planned / 2**30:.1f}: {peak / planned:.0%}",
        met=peak <= planned,
        missed="MORE THAN PLANNED",
        peak=peak, reserved=kept, planned=planned,
    )  # fmt: skip


def long_lora_figure(report: Report, name: str, plan: Plan, placement: Placement) -> None:
    """Report whether adapters of rank 32 fit with 64 requests of up to 8192 tokens, by the memory plan."""
    job = make_job(replace(plan, served=(64, 8192)), LONG_LORA, placement.device.type)
    memory = plan_memory(make_config(name), job)
    shortage = memory.shortage()
    report.add(
        "lora", name,
        f"rank 32, 64 requests of 8192: {memory}" + (f"; {shortage}" if shortage else ""),
        met=shortage is None if placement.device.type == "cuda" else None,
        missed="DOES NOT FIT",
        needs=dict(memory.needs.device), least=memory.needs.least, free=memory.free,
    )  # fmt: skip
