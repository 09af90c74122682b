"""Why the engine stacks rows of models with states and windows, and decodes them in one pass.

    python -m bench.layer_rows [--quick]

Rows of different lengths decode, by turns in one process: in a stack (`inference.layer_cache`), each by
itself in a cache of `transformers`, and in cohorts of rows that happen to have one length. Prints, for each
kind of layer, the median time of a step and how many times longer the other two ways take.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from bench import kit
from tests.tiny_families import tiny_model
from trainer_backend.inference.layer_cache import Bounds, RowState, Stack
from trainer_backend.inference.layer_runner import LayerRunner

KINDS = ("qwen3_5_text", "lfm2", "gpt_oss")
ROWS, TOKENS, LONGEST = 16, 64, 512
SIZE = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": LONGEST}


def lengths_of(rows: int, apart: int, seed: int) -> list[int]:
    """Lengths of rows, `apart` tokens apart at least."""
    return sorted(
        apart * int(n) for n in np.random.default_rng(seed).integers(40 // apart, 240 // apart, rows)
    )


def by_stack(model: PreTrainedModel, lengths: list[int]) -> Callable[[], object]:
    runner = LayerRunner(model, slots=len(lengths), max_len=LONGEST)
    for row, length in enumerate(lengths):
        runner.cache.waiting[row] = prefilled(runner, length)
    cached_B, ids_B = np.array(lengths), np.full(len(lengths), 7)

    def step() -> None:
        runner.decode(ids_B, cached_B)
        cached_B[:] += 1

    return step


def prefilled(runner: LayerRunner, length: int) -> RowState:
    """A row of some tokens."""
    stack = Stack(runner._config, Bounds(1, length, torch.float32))
    stack.lengths = [0]
    stack.begin(1)
    runner._pass(torch.full((1, length), 5), stack, position_ids=torch.arange(length)[None])
    stack.commit(1, length)
    return stack.take(0, length)


def by_cohorts(model: PreTrainedModel, lengths: list[int]) -> Callable[[], object]:
    """Each length's rows in one cache of `transformers`."""
    cohorts = []
    for length, rows in Counter(lengths).items():
        cache = DynamicCache(config=model.config)
        model(input_ids=torch.full((rows, length), 5), cache=cache, use_cache=True, logits_to_keep=1)
        cohorts.append((rows, cache))

    def step() -> None:
        for rows, cache in cohorts:
            model(input_ids=torch.full((rows, 1), 7), cache=cache, use_cache=True, logits_to_keep=1)

    return step


def by_rows(model: PreTrainedModel, lengths: list[int]) -> Callable[[], object]:
    steps = [by_cohorts(model, [length]) for length in lengths]
    return lambda: [step() for step in steps]


def step_s(step: Callable[[], object], tokens: int) -> float:
    start = time.perf_counter()
    for _ in range(tokens):
        step()
    return (time.perf_counter() - start) / tokens


@torch.inference_mode()
def main() -> None:
    told = kit.options(__doc__, ("--quick", False, "fewer repeats"))
    repeats = 2 if told.quick else 5
    torch.set_num_threads(1)
    for kind in KINDS:
        model = tiny_model(kind, **SIZE)
        for apart in (1, 25):
            taken: dict[str, list[float]] = {"stack": [], "rows": [], "cohorts": []}
            for repeat in range(repeats):
                lengths = lengths_of(ROWS, apart, repeat)
                for name, way in (("stack", by_stack), ("rows", by_rows), ("cohorts", by_cohorts)):
                    taken[name].append(step_s(way(model, lengths), TOKENS))
            stack = taken["stack"]
            ratios = {
                name: statistics.median(other / own for other, own in zip(times, stack, strict=True))
                for name, times in taken.items()
            }
            print(
                f"{kind:14} lengths {apart:2} apart: {1e3 * statistics.median(stack):.1f} ms in a stack, "
                f"row by row {ratios['rows']:.1f} x, in cohorts {ratios['cohorts']:.1f} x"
            )


if __name__ == "__main__":
    main()
