"""What a CUDA machine makes of real models, in one run: shapes of Qwen3, randomly initialised.

    python -m bench.gpu [--shapes 0.6b 4b] [--tokens 16384] [--rounds 3] [--smoke]

Of each shape, with our learner and our engine on the device as a run has them:

    attention   log-probs and gradients of packed segments by the device's kernel, and under a mask over rows:
                both as far from float32 under the mask. On 4 of the shape's layers.
    update      seconds and MFU (bench/model_flops.py has the formula and the peaks) of LocalLearner.update on
                so many packed tokens, a quarter of them sampled: scoring and one optimizer step, >= 35 %. All
                weights are trained where the memory plan fits; else with layers checkpointed; else adapters.
    decode      tokens a second of LocalEngine at 1, 8 and 64 rows, of what memory bandwidth would allow
    memory      the peak of both, and what our plan said before: no more than that

Exit code 1 where a bound is missed. Without a CUDA device there is nothing to measure and the exit code is 0.
`--smoke` goes through the same code on a CPU with a tiny shape, against a made-up peak.
"""

import argparse
import asyncio
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel, Qwen3Config

from bench.gpu_setup import SHAPES, Plan, config_of, fitting, model_of, segments_of
from bench.model_flops import Peak, decode_seconds, peak_of, update_flops
from shared_schemas.trajectory import Sampling
from trainer_backend.core.collate import pack_segments
from trainer_backend.core.memory import ModelShape
from trainer_backend.core.segments import Segment
from trainer_backend.inference.engine import EngineLimits, LocalEngine
from trainer_backend.learner.attention import BlockMask, PackedAttention, attention_for
from trainer_backend.learner.capacity import MemoryPlan, model_shape
from trainer_backend.learner.config import LearnerConfig
from trainer_backend.learner.device import Found, Placement, place
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.learner.scoring import Scorer
from trainer_backend.models import train_tokenizer
from trainer_backend.protocols import CreditedEpisode

LEAST_MFU = 0.35


def attention_holds(config: Qwen3Config, placement: Placement, tokens: int) -> bool:
    """Whether the device's attention is as near to float32 under a mask as the mask is in its precision."""
    model = model_of(config, placement.device)
    segments = segments_of(tokens, config.vocab_size, longest=tokens // 4)
    exact = computed(model, replace(placement, low=None), BlockMask(), segments)
    masked = computed(model, placement, BlockMask(), segments)
    own = attention_for(placement, head_dim=config.head_dim)
    found = computed(model, placement, own, segments)
    holds = True
    for name, was, is_ in zip(
        ("log-probs", "gradients"), apart(masked, exact), apart(found, exact), strict=True
    ):
        near = is_ <= 1.5 * was + 1e-5
        holds &= near
        print(
            f"  attention   {name} by {type(own).__name__} are {is_:.2e} from float32's, "
            f"under a mask {was:.2e} {'ok' if near else 'TOO FAR'}"
        )
    return holds


def computed(
    model: PreTrainedModel, placement: Placement, attention: PackedAttention, segments: Sequence[Segment]
) -> tuple[torch.Tensor, torch.Tensor]:
    """[N] log-probs, and the gradient of their mean."""
    model.set_attn_implementation(attention.implementation)
    model.zero_grad()
    packed = pack_segments(segments, row_tokens=sum(map(len, segments)))
    logprobs_N, _ = Scorer(model, placement, attention, 1024).logprobs(packed)
    logprobs_N.mean().backward()
    gradient = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    return logprobs_N.detach(), gradient


def apart(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> list[float]:
    """Root mean square difference, relative to the second argument."""
    return [float((a - b).norm() / b.norm()) for a, b in zip(one, other, strict=True)]


def timed(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def update_holds(learner: LocalLearner, shape: ModelShape, plan: Plan, peak: Peak, least: float) -> bool:
    """Whether the update is fast enough."""
    segments = segments_of(plan.tokens, shape.vocabulary, longest=min(2048, plan.tokens // 4))
    episodes = [
        CreditedEpisode(segment.rollout_id, [segment], [(-1.0) ** number])
        for number, segment in enumerate(segments)
    ]
    device = learner.scorer.placement.device
    seconds = [timed(lambda: learner.update(episodes, iteration=1), device) for _ in range(plan.rounds + 1)]
    median = statistics.median(seconds[1:])
    lengths = [len(segment) for segment in segments]
    sampled = sum(len(segment.sampled_positions) for segment in segments)
    mfu = update_flops(shape, lengths, sampled) / (median * peak.flops)
    verdict = "ok" if mfu >= least else "TOO SLOW"
    print(
        f"  update      {sum(lengths)} tokens, {sampled} of them sampled, {len(lengths)} segments: "
        f"{median:.3f} s, {sum(lengths) / median:.0f} tokens/s, MFU {mfu:.1%} (least {least:.0%}) {verdict}"
    )
    return mfu >= least


def decode_figures(engine: LocalEngine, shape: ModelShape, plan: Plan, peak: Peak) -> None:
    draw = random.Random(1)

    async def generate(rows: int, new: int) -> None:
        prompts = [[draw.randrange(shape.vocabulary) for _ in range(plan.prompt)] for _ in range(rows)]
        calls = (
            engine.generate(ids, Sampling(max_tokens=new, seed=i), request_id=f"{rows}.{new}.{i}")
            for i, ids in enumerate(prompts)
        )
        await asyncio.gather(*calls)

    def run(rows: int, new: int) -> float:
        return min(timed(lambda: asyncio.run(generate(rows, new)), torch.device("cpu")) for _ in range(2))

    for rows in plan.rows:
        step = (run(rows, plan.new) - run(rows, 1)) / (plan.new - 1)
        limit = decode_seconds(shape, peak, rows=rows, cached=plan.prompt + plan.new / 2)
        print(
            f"  decode      {rows:3d} rows: {rows / step:7.0f} tokens/s, {1e3 * step:.2f} ms a step, "
            f"{limit / step:.1%} of the bandwidth limit ({1e3 * limit:.2f} ms)"
        )


def memory_holds(memory: MemoryPlan) -> bool:
    """Whether the peak memory of tensors is within the plan; always true on a CPU."""
    if memory.placement.device.type != "cuda":
        print("  memory      is counted on CUDA alone")
        return True
    planned, peak = sum(memory.needs.device.values()), torch.cuda.max_memory_allocated()
    kept = torch.cuda.max_memory_reserved()
    verdict = "ok" if peak <= planned else "MORE THAN PLANNED"
    print(
        f"  memory      peak {peak / 2**30:.1f} GiB ({kept / 2**30:.1f} with what the allocator keeps), "
        f"planned {planned / 2**30:.1f}: {peak / planned:.0%} {verdict}"
    )
    return peak <= planned


def measured(name: str, plan: Plan, device: str, peak: Peak, least_mfu: float) -> bool:
    """Measure a shape, and return whether all bounds hold."""
    config, placement = config_of(name), place(device)
    print(f"Qwen3 {name}")
    holds = attention_holds(config_of(name, layers=4), placement, tokens=min(2048, plan.tokens))
    forget_memory(placement)
    way, job, memory = fitting(config, plan, device)
    shape = model_shape(config, job.lora)
    print(f"  plan        {way}; {memory}")
    if memory.shortage() is not None:
        print(f"  not measured: {memory.shortage()}")
        return holds
    learner = LocalLearner(
        LearnerConfig.of(job), model_of(config, placement.device), train_tokenizer(["wood stone"], 300)
    )
    scorer, dtypes = learner.scorer, sorted({str(weight.dtype) for weight in learner.model.parameters()})
    print(
        f"  learner     {placement}; {type(scorer.attention).__name__}, logits of {scorer.logits_chunk} "
        f"tokens at a time, weights of {', '.join(dtypes)}"
    )
    limits = EngineLimits(slots=max(plan.rows), max_model_len=plan.longest, kept_prefixes=0)
    engine = LocalEngine(learner.copy_to_serve(), stop_ids=[], limits=limits)
    engine.start()
    decode_figures(engine, shape, plan, peak)
    holds &= update_holds(learner, shape, plan, peak, least_mfu)
    holds &= memory_holds(memory)
    engine.stop()
    return holds


def forget_memory(placement: Placement) -> None:
    """Reset the memory statistics."""
    if placement.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES], default=["0.6b", "4b"])
    parser.add_argument("--tokens", type=int, default=16384, help="of an update")
    parser.add_argument("--rounds", type=int, default=3, help="timed updates, after one that is not")
    parser.add_argument("--peak-tflops", type=float, help="bfloat16, of a device that the table has not")
    parser.add_argument("--bandwidth-gbs", type=float, help="likewise, GB/s")
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny shape on the CPU; nothing is judged slow"
    )
    options = parser.parse_args(arguments)
    if options.smoke:
        torch.set_num_threads(1)
        plan = Plan(tokens=512, rows=(1, 4), prompt=32, new=9, rounds=1)
        return 0 if measured("tiny", plan, "cpu", Peak(1e11, 1e10), least_mfu=0.0) else 1
    if not torch.cuda.is_available():
        print(f"not measured: {Found.by_torch()}, and these figures are a CUDA device's")
        return 0
    name = torch.cuda.get_device_name()
    peak = peak_of(name)
    if options.peak_tflops and options.bandwidth_gbs:
        peak = Peak(1e12 * options.peak_tflops, 1e9 * options.bandwidth_gbs)
    if peak is None:
        print(f"not measured: the peak of {name!r} is unknown; give --peak-tflops and --bandwidth-gbs")
        return 1
    print(f"{name}, torch {torch.__version__}: {peak.flops / 1e12:g} TFLOP/s, {peak.bandwidth / 1e9:g} GB/s")
    plan = Plan(options.tokens, rows=(1, 8, 64), prompt=256, new=65, rounds=options.rounds)
    return 0 if all([measured(shape, plan, "cuda", peak, LEAST_MFU) for shape in options.shapes]) else 1


if __name__ == "__main__":
    sys.exit(main())
