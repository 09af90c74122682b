"""Generation on one thread: the engine beside what `transformers` offers, and what reused prefixes save.

    python -m bench.generation_speed [--preset tiny-0.3m] [--repeats 3]

1. A batch: 32 prompts of 150 tokens, 64 new tokens each. The exit code says whether the engine is at least
   x1.1 of `model.generate` and x5 of `model.generate_batch` (its continuous batching) as it comes: by default
   that makes a cache as large as the memory. With a cache of the right size it is shown beside.
2. Decisions as in the Crafter demo: prompts of 35 to 60 tokens, 6 new ones, 64 callers.
3. Reuse: a conversation of 10 turns, 8 siblings of one prompt, with and without kept prefixes.

All sample without an end token, so everyone makes the same number of tokens. Ratios are of CPU time, the
least of some repeats taken in turn: on a busy machine the clock says little.
"""

import asyncio
import random
import sys
import time
from collections.abc import Callable, Mapping

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from bench import kit
from shared_schemas.trajectory import Sampling
from trainer_backend.inference.engine import EngineLimits, LocalEngine
from trainer_backend.inference.worker import EngineCounters
from trainer_backend.models import build_preset, train_tokenizer

Prompts = list[list[int]]
TARGETS = {"generate": 1.1, "generate_batch": 5.0}
CALLERS = 64
TURNS, SIBLINGS, GROUPS = 10, 8, 4


def by_engine(model: PreTrainedModel, prompts: Prompts, new_tokens: int, callers: int) -> None:
    """Serve this many callers, each of which sends its next prompt after the last answer."""

    async def all_callers(engine: LocalEngine) -> None:
        async def caller(first: int) -> None:
            for i in range(first, len(prompts), callers):
                sampling = Sampling(max_tokens=new_tokens, seed=i)
                await engine.generate(prompts[i], sampling, request_id=str(i))

        await asyncio.gather(*(caller(k) for k in range(callers)))

    with_engine(model, all_callers, slots=callers)


def with_engine(
    model: PreTrainedModel, run: Callable[[LocalEngine], "asyncio.Future[None]"], **limits: int
) -> EngineCounters:
    engine = LocalEngine(model, stop_ids=[], limits=EngineLimits(**limits))
    engine.start()
    asyncio.run(run(engine))
    engine.stop()
    return engine.counters


def by_generate(model: PreTrainedModel, prompts: Prompts, new_tokens: int, batch: int) -> None:
    """Generate in static batches with padding on the left."""
    for start in range(0, len(prompts), batch):
        rows = prompts[start : start + batch]
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        model.generate(
            ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=new_tokens,
            min_new_tokens=new_tokens, pad_token_id=0,
        )  # fmt: skip


def by_generate_batch(model: PreTrainedModel, prompts: Prompts, new_tokens: int, **settings: int) -> None:
    """Generate with the continuous batching of `transformers`, by default with all free memory."""
    config = GenerationConfig(
        max_new_tokens=new_tokens, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0
    )
    batching = ContinuousBatchingConfig(**settings) if settings else None
    done = model.generate_batch(prompts, generation_config=config, continuous_batching_config=batching)
    assert all(len(output.generated_tokens) == new_tokens for output in done.values())


def cpu_of(runs: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The least CPU seconds of each, measured in turns so that a busy moment affects all."""
    least: dict[str, float] = {}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.process_time()
            run()
            least[name] = min(least.get(name, float("inf")), time.process_time() - start)
    return least


def batch_figures(model: PreTrainedModel, repeats: int) -> dict[str, float]:
    prompts, new_tokens = random_prompts(model, [150] * 32), 64
    # Pages for exactly these rows, and the step size that was fastest on a CPU: as good as it gets.
    fitted = {"num_blocks": 40, "max_batch_tokens": 256}
    seconds = cpu_of(
        {
            "engine": lambda: by_engine(model, prompts, new_tokens, len(prompts)),
            "generate": lambda: by_generate(model, prompts, new_tokens, len(prompts)),
            "generate_batch, fitted by hand": lambda: by_generate_batch(model, prompts, new_tokens, **fitted),
        },
        repeats,
    )
    seconds |= cpu_of({"generate_batch": lambda: by_generate_batch(model, prompts, new_tokens)}, 1)
    print(f"batch: {len(prompts)} prompts of 150 tokens, {new_tokens} new ones each")
    tokens = len(prompts) * new_tokens
    for name, cpu in seconds.items():
        ratio = cpu / seconds["engine"]
        print(f"  {name:32s} cpu {cpu:7.2f} s  {1e6 * cpu / tokens:8.0f} us a token  engine is x{ratio:.1f}")
    return {name: seconds[name] / seconds["engine"] for name in TARGETS}


def decision_figures(model: PreTrainedModel, repeats: int) -> None:
    draw = random.Random(1)
    prompts = random_prompts(model, [draw.randint(35, 60) for _ in range(10 * CALLERS)])
    seconds = cpu_of(
        {
            "engine": lambda: by_engine(model, prompts, 6, CALLERS),
            "generate": lambda: by_generate(model, prompts, 6, CALLERS),
        },
        repeats,
    )
    print(
        f"decisions as in the demo: {len(prompts)} prompts of 35 to 60 tokens, 6 new ones, {CALLERS} callers"
    )
    for name, cpu in seconds.items():
        print(f"  {name:32s} cpu {1e3 * cpu / len(prompts):7.2f} ms a decision")


async def converse(engine: LocalEngine, prompt: list[int], added: Prompts) -> None:
    """Each turn's prompt is the last one, its answer, and what the environment says."""
    for turn, message in enumerate(added):
        result = await engine.generate(prompt, Sampling(max_tokens=16, seed=turn), request_id=str(turn))
        prompt = [*prompt, *result.token_ids, *message]


async def ask_siblings(engine: LocalEngine, prompts: Prompts) -> None:
    """Ask group after group, the siblings of each together."""
    for group, prompt in enumerate(prompts):
        calls = (
            engine.generate(prompt, Sampling(max_tokens=16, seed=i), request_id=f"{group}.{i}")
            for i in range(SIBLINGS)
        )
        await asyncio.gather(*calls)


def reuse_figures(model: PreTrainedModel, repeats: int) -> None:
    added = random_prompts(model, [60] * TURNS)
    groups = random_prompts(model, [300] * GROUPS)
    start = random_prompts(model, [300])[0]
    kinds: dict[str, Callable[[LocalEngine], object]] = {
        f"conversation of {TURNS} turns": lambda engine: converse(engine, start, added),
        f"{SIBLINGS} siblings of 300 tokens": lambda engine: ask_siblings(engine, groups),
    }
    print("reuse: 16 new tokens a request")
    for name, run in kinds.items():
        counters: dict[int, EngineCounters] = {}

        def measured(kept: int, run: Callable[..., object] = run, into: dict = counters) -> None:
            into[kept] = with_engine(model, run, kept_prefixes=kept)

        seconds = cpu_of({str(kept): lambda kept=kept: measured(kept) for kept in (0, 64)}, repeats)
        prompt, reused = counters[64].prompt_tokens, counters[64].prompt_tokens_reused
        print(
            f"  {name:32s} {reused} of {prompt} prompt tokens not computed ({reused / prompt:.0%}), "
            f"x{seconds['0'] / seconds['64']:.1f} faster"
        )


def random_prompts(model: PreTrainedModel, lengths: list[int]) -> Prompts:
    draw = random.Random(len(lengths))
    return [[draw.randrange(model.config.vocab_size) for _ in range(length)] for length in lengths]


def targets_met(ratios: Mapping[str, float]) -> bool:
    for name, least in TARGETS.items():
        verdict = "ok" if ratios[name] >= least else "TOO SLOW"
        print(f"the engine is x{ratios[name]:.1f} {name} (at least x{least}) {verdict}")
    return all(ratios[name] >= least for name, least in TARGETS.items())


def main() -> int:
    options = kit.options(__doc__, ("--preset", "tiny-0.3m"), ("--repeats", 3))
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    tokenizer = train_tokenizer(["wood stone tree"], 512)
    model = build_preset(options.preset, tokenizer)
    print(f"{options.preset}, torch {torch.__version__}, 1 thread")
    decision_figures(model, options.repeats)
    reuse_figures(model, options.repeats)
    return 0 if targets_met(batch_figures(model, options.repeats)) else 1


if __name__ == "__main__":
    sys.exit(main())
