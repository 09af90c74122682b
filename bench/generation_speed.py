"""Decisions per second: the engine beside `model.generate` and a loop without a cache, on one thread.

    python bench/generation_speed.py [--preset tiny-0.3m] [--concurrency 64] [--rounds 20]

A decision is a prompt of 35 to 60 tokens and 6 sampled ones, as in the Crafter demo. `wall` is what the clock
says, `cpu` what the process used: on a busy machine only `cpu` and the ratios can be compared.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import asyncio
import random
import time
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from shared_schemas.trajectory import Sampling
from trainer_backend.inference.engine import EngineLimits, LocalEngine
from trainer_backend.models import build_preset, train_tokenizer

Prompts = list[list[int]]
NEW_TOKENS = 6


def by_engine(model: PreTrainedModel, prompts: Prompts, concurrency: int) -> None:
    """As many callers as `concurrency`, each sending its next prompt when the last is answered."""
    engine = LocalEngine(model, stop_ids=[], limits=EngineLimits(slots=concurrency))
    engine.start()

    async def caller(first: int) -> None:
        for i in range(first, len(prompts), concurrency):
            await engine.generate(prompts[i], Sampling(max_tokens=NEW_TOKENS, seed=i), request_id=str(i))

    async def all_callers() -> None:
        await asyncio.gather(*(caller(k) for k in range(concurrency)))

    asyncio.run(all_callers())
    engine.stop()


def by_generate(model: PreTrainedModel, prompts: Prompts, batch: int) -> None:
    """Static batches, padded on the left."""
    for start in range(0, len(prompts), batch):
        rows = prompts[start : start + batch]
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        model.generate(
            ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS, pad_token_id=0,
        )  # fmt: skip


def without_cache(model: PreTrainedModel, prompts: Prompts) -> None:
    """One request at a time, the whole sequence for every token."""
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            for _ in range(NEW_TOKENS):
                probs = model(ids, use_cache=False).logits[:, -1].softmax(-1)
                ids = torch.cat([ids, torch.multinomial(probs, 1)], dim=1)


def measure(name: str, run: Callable[[Prompts], None], prompts: Prompts) -> float:
    run(prompts[: max(8, len(prompts) // 10)])
    wall, cpu = time.perf_counter(), time.process_time()
    run(prompts)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    n = len(prompts)
    print(f"{name:34s} wall {n / wall:7.0f} decisions/s   cpu {1e3 * cpu / n:6.2f} ms a decision")
    return cpu / n


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="tiny-0.3m")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = train_tokenizer(["wood stone tree"], 512)
    model = build_preset(args.preset, tokenizer)
    draw = random.Random(0)
    count = args.concurrency * args.rounds
    prompts = [[draw.randrange(len(tokenizer)) for _ in range(draw.randint(35, 60))] for _ in range(count)]
    few = prompts[: max(32, count // 20)]
    print(
        f"{args.preset}, {count} decisions, {args.concurrency} at once, torch {torch.__version__}, 1 thread"
    )
    engine = measure("engine", lambda p: by_engine(model, p, args.concurrency), prompts)
    batched = measure(
        "model.generate, static batches", lambda p: by_generate(model, p, args.concurrency), prompts
    )
    single = measure("model.generate, one at a time", lambda p: by_generate(model, p, 1), few)
    naive = measure("no cache, one at a time", lambda p: without_cache(model, p), few)
    print(
        f"ratio (cpu): engine is x{batched / engine:.1f} generate in batches, "
        f"x{single / engine:.1f} generate one at a time, x{naive / engine:.1f} no cache"
    )


if __name__ == "__main__":
    main()
