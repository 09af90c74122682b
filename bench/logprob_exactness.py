"""Log-probs of sampled tokens, the engine's against those of one plain forward pass over the whole sequence.

    python -m bench.logprob_exactness [--requests 128] [--limit 1e-4]

Same weights and temperature, no truncation, fp32; DESIGN.md section 7 holds the project to 1e-4. Exit code 1
when a difference is larger.
"""

import asyncio
import math
import random
import sys
from collections.abc import Sequence

import torch

from bench import kit
from shared_schemas.trajectory import Sampling
from trainer_backend.inference.actor import Generation
from trainer_backend.inference.engine import LocalEngine
from trainer_backend.inference.keys import EngineKeys
from trainer_backend.models import PRESETS, build_preset, train_tokenizer

LIMIT = 1e-4


def largest_difference(preset: str, seed: int, count: int) -> float:
    tokenizer = train_tokenizer(["wood stone tree"], 512)
    model = build_preset(preset, tokenizer, seed=seed)
    # A trained model is surer of itself than a fresh one: larger logits are the harder case.
    with torch.no_grad():
        model.model.norm.weight.mul_(8.0)
    draw = random.Random(seed)
    requests = [
        (
            [draw.randrange(len(tokenizer)) for _ in range(draw.randint(1, 200))],
            Sampling(temperature=draw.choice([0.5, 0.7, 1.0, 1.3]), seed=i, max_tokens=draw.randint(1, 60)),
        )
        for i in range(count)
    ]

    async def generations() -> list[Generation]:
        calls = (engine.generate(ids, s, request_id=str(i)) for i, (ids, s) in enumerate(requests))
        return await asyncio.gather(*calls)

    engine = LocalEngine(model, stop_ids=[], keys=EngineKeys(max_running=32, max_model_len=2048))
    engine.start()
    results = asyncio.run(generations())
    engine.stop()
    worst = 0.0
    for (ids, sampling), result in zip(requests, results, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*ids, *result.token_ids]])).logits[0, len(ids) - 1 : -1]
        logprobs = torch.log_softmax(logits / sampling.temperature, dim=-1)
        recomputed = logprobs.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
        apart = (recomputed - torch.tensor(result.logprobs)).abs().nan_to_num(nan=math.inf)
        worst = max(worst, float(apart.max()))  # max() would pass over a NaN
    return worst


def main(arguments: Sequence[str] | None = None) -> int:
    options = kit.options(
        __doc__,
        ("--requests", 128, "of each preset and seed"),
        ("--limit", LIMIT, "largest difference allowed"),
        ("--presets", ",".join(PRESETS), "to compare"),
        arguments=arguments,
    )
    torch.set_num_threads(1)
    met = True
    for preset in options.presets.split(","):
        worst = max(largest_difference(preset, seed, options.requests) for seed in range(3))
        verdict = "ok" if worst <= options.limit else "TOO LARGE"
        met = met and worst <= options.limit
        print(
            f"{preset}: {3 * options.requests} requests, largest difference {worst:.1e} "
            f"(limit {options.limit:.0e}) {verdict}"
        )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
