"""The engine's figures of bench/gpu.py: agreement with the learner, decode and prefill, shared pages."""

import asyncio
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from bench.gpu_setup import Plan, Report, make_config, make_model, timed
from bench.model_flops import Peak, decode_seconds, forward_flops
from shared_schemas.trajectory import Sampling
from trainer_backend.core.collate import pack_segments
from trainer_backend.core.segments import Segment
from trainer_backend.errors import InferenceError
from trainer_backend.inference.actor import Generation
from trainer_backend.inference.engine import LocalEngine
from trainer_backend.inference.keys import EngineKeys
from trainer_backend.inference.paged_runner import PagedRunner
from trainer_backend.learner.attention import BlockMask
from trainer_backend.learner.device import Placement
from trainer_backend.learner.loading import copy_to_serve
from trainer_backend.learner.scoring import Scorer
from trainer_backend.learner.shapes import ModelShape, model_shape

# Least share of the bandwidth limit, by shape, rows and tokens of context.
LEAST_SHARE = {("4b", 64, 1024): 0.6, ("0.6b", 16, 1024): 0.4}
# Largest differences of the learner's log-probs from the engine's, in nats.
MOST_RMS_LOW, MOST_FLOAT32 = 2e-2, 1e-4
PREFILL_TOKENS = 16384
# Rows, tokens that all rows share, tokens of a row; longest step, relative to a step that reads row by row.
SHARED_CELL, MOST_SHARED = (64, 700, 1000), 0.7


async def sampled(engine: LocalEngine, prompts: Sequence[Sequence[int]], new: int) -> list[Generation]:
    """Sample `new` tokens after each prompt, all prompts at once."""
    calls = (
        engine.generate(ids, Sampling(max_tokens=new, seed=i), request_id=str(i))
        for i, ids in enumerate(prompts)
    )
    return list(await asyncio.gather(*calls))


def random_prompts(rows: int, length: int, vocabulary: int, *, seed: int = 0) -> list[list[int]]:
    draw = random.Random((seed * 10_007 + rows) * 100_003 + length)
    return [[draw.randrange(vocabulary) for _ in range(length)] for _ in range(rows)]


@contextmanager
def started_engine(model: PreTrainedModel, placement: Placement, **keys: int) -> Iterator[LocalEngine]:
    """Yield an engine of the model; stop it even after an error, so that later tasks have the device."""
    served, turn = copy_to_serve(model, placement.held), keys.pop("prefill_tokens", 2048)
    engine = LocalEngine(served, stop_ids=[], keys=EngineKeys(**keys), prefill_tokens=turn)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def decode_figures(report: Report, name: str, plan: Plan, placement: Placement, peak: Peak) -> None:
    """Measure decode and prefill for every number of rows and length of context, and the peak memory.

    The first timed call computes its prompts, which is the prefill. Later calls find them in the cache.
    """
    config = make_config(name)
    shape = model_shape(config, None)
    keys = {"max_running": max(plan.rows), "max_model_len": plan.longest, "prefill_tokens": PREFILL_TOKENS}
    with started_engine(make_model(config, placement.device), placement, **keys) as engine:
        for context in plan.contexts:
            for rows in plan.rows:
                if report.left_s < plan.reserve_s:
                    report.miss("decode", name, f"{rows} rows of {context}: no time left")
                    continue
                try:
                    decode_figure(report, engine, name, shape, plan, peak, (rows, context))
                except InferenceError as error:  # such as out of memory, which only the most rows may cause
                    report.miss("decode", name, f"{rows} rows of {context}: {error}")
        if placement.device.type == "cuda":
            gib = torch.cuda.max_memory_allocated() / 2**30
            report.add("memory", name, f"engine: peak {gib:.1f} GiB", engine_gib=gib)


def decode_figure(
    report: Report,
    engine: LocalEngine,
    name: str,
    shape: ModelShape,
    plan: Plan,
    peak: Peak,
    cell: tuple[int, int],
) -> None:
    rows, context = cell
    # A row holds `context` tokens in the mean over the timed steps.
    prompts = random_prompts(rows, context - 3 * plan.new // 2, shape.vocabulary)
    cpu = torch.device("cpu")  # no wait for the GPU, which has finished when the answers are there

    def run(new: int) -> float:
        return timed(lambda: asyncio.run(sampled(engine, prompts, new)), cpu)

    # First run other prompts, to compile kernels and capture graphs: the next call then computes its own.
    asyncio.run(sampled(engine, random_prompts(rows, len(prompts[0]), shape.vocabulary, seed=1), plan.new))
    cold, first = run(1), run(1)
    before = engine.counters.prompt_tokens_reused
    step = step_seconds(run, plan)
    reused = (engine.counters.prompt_tokens_reused - before) / (2 * plan.rounds * rows * len(prompts[0]))
    limit = decode_seconds(shape, peak, rows=rows, cached=context)
    least = LEAST_SHARE.get((name, rows, context))
    report.add(
        "decode", name,
        f"{rows:3d} rows of {context:5d}: {rows / step:7.0f} tokens/s, {1e3 * step:6.2f} ms a step, "
        f"{limit / step:5.1%} of the bandwidth limit ({1e3 * limit:.2f} ms)"
        + (f", least {least:.0%}" if least else ""),
        met=None if least is None else limit / step >= least,
        missed="TOO SLOW",
        rows=rows, context=context, tokens_per_s=rows / step, step_s=step, limit_s=limit,
        share_of_limit=limit / step, reused=reused,
    )  # fmt: skip
    tokens, seconds = rows * len(prompts[0]), max(cold - first, 1e-9)
    mfu = forward_flops(shape, [len(prompts[0])] * rows, sampled=0) / (seconds * peak.flops)
    report.add(
        "prefill", name,
        f"{rows:3d} rows of {context:5d}: {tokens / seconds:7.0f} tokens/s, {seconds:.3f} s, MFU {mfu:.1%}",
        rows=rows, context=context, tokens_per_s=tokens / seconds, mfu=mfu,
    )  # fmt: skip


def step_seconds(run: Callable[[int], float], plan: Plan) -> float:
    """Return the seconds of a decode step; `run(n)` samples n tokens and returns the seconds it took.

    The time of a shorter call is subtracted from that of a longer one, so their common overhead is left out.
    """
    short, long = ([run(1 + count * plan.new) for _ in range(plan.rounds)] for count in (1, 2))
    return (statistics.median(long) - statistics.median(short)) / plan.new


def shared_pages_figure(report: Report, name: str, plan: Plan, placement: Placement) -> None:
    """Time a decode step of rows with the same first pages: pages read once, and read again for each row."""
    rows, shared, context = SHARED_CELL
    config = make_config(name)
    keys = {"max_running": rows, "max_model_len": context + 2 * plan.new, "prefill_tokens": PREFILL_TOKENS}
    trunk = random_prompts(1, shared, config.vocab_size)[0]
    own = random_prompts(rows, context - shared - 3 * plan.new // 2, config.vocab_size)
    prompts = [[*trunk, *ids] for ids in own]

    with started_engine(make_model(config, placement.device), placement, **keys) as engine:

        def run(new: int) -> float:
            return timed(lambda: asyncio.run(sampled(engine, prompts, new)), torch.device("cpu"))

        runner = engine._worker.batch._runner
        assert isinstance(runner, PagedRunner), "the kernels do not run on this device"
        asyncio.run(sampled(engine, [trunk], 1))  # from now on all rows find its pages
        steps, grouped, tiles = [], [], runner.tile_rows
        for tile_rows in (1, tiles, 1, tiles):  # in turns; tiles of one row make no group
            runner.tile_rows = tile_rows
            run(plan.new)  # captures the graphs
            grouped.append(sum(len(group.rows) for group in runner.last_groups))
            steps.append(step_seconds(run, plan))
    plain, once = min(steps[::2]), min(steps[1::2])
    report.add(
        "shared", name,
        f"{rows} rows with {shared} of {context} tokens shared: {1e3 * once:.2f} ms a step, read row by row "
        f"{1e3 * plain:.2f} ms: x{once / plain:.2f} (at most x{MOST_SHARED}); rows in groups: {grouped}",
        met=once <= MOST_SHARED * plain,
        missed="TOO SLOW",
        steps_s=steps, grouped=grouped, ratio=once / plain,
    )  # fmt: skip


def agreement_figure(report: Report, name: str, plan: Plan, scorer: Scorer) -> None:
    """Compare log-probs of an engine's samples with those of the scorer, both with the scorer's model."""
    placement, vocabulary = scorer.placement, make_config(name).vocab_size
    longest = plan.contexts[0]
    prompts = [ids[: longest - 7 * i] for i, ids in enumerate(random_prompts(8, longest, vocabulary))]
    with started_engine(scorer.model, placement, max_running=8, max_model_len=2 * longest) as engine:
        results = asyncio.run(sampled(engine, prompts, plan.new))
    parts = [join_answer(i, *pair) for i, pair in enumerate(zip(prompts, results, strict=True))]
    packed = pack_segments(parts, row_tokens=sum(map(len, parts)))
    scorer.model.set_attn_implementation(scorer.attention.implementation)
    with torch.no_grad():
        learned_N = scorer.logprobs(packed).double().cpu()
    by_engine_N = torch.tensor([p for result in results for p in result.logprobs], dtype=torch.float64)
    apart_N = (learned_N - by_engine_N).abs()
    rms, most = float(apart_N.square().mean().sqrt()), float(apart_N.max())
    is_low = placement.low is not None
    found, bound = (rms, MOST_RMS_LOW) if is_low else (most, MOST_FLOAT32)
    report.add(
        "agreement", name,
        f"learner and engine in {str(placement.held).removeprefix('torch.')}: {rms:.1e} nats rms, {most:.1e} "
        f"at most ({'rms' if is_low else 'the most'} may be {bound:g})",
        met=found <= bound,
        missed="TOO FAR",
        precision=str(placement.held), rms=rms, most=most,
    )  # fmt: skip


def agreement_in_float32(report: Report, name: str, plan: Plan, placement: Placement) -> None:
    model = make_model(make_config(name), placement.device)
    agreement_figure(report, name, plan, Scorer(model, replace(placement, low=None), BlockMask(), 1024))


def join_answer(number: int, prompt: Sequence[int], result: Generation) -> Segment:
    ids = [*prompt, *result.token_ids]
    return Segment.of(f"r{number}", ids, result.logprobs, [(len(prompt), len(ids), 0, 0, 1.0)])
