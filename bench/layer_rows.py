"""Why the engine stacks rows of models with states and windows, and what padded rows cost in updates.

    python -m bench.layer_rows [--quick]

Rows of different lengths decode, by turns in one process: in a stack (`inference.layer_cache`), each by
itself in a cache of `transformers`, and in cohorts of rows that happen to have one length. Prints, for each
kind of layer, the median time of a step and how many times longer the other two ways take.

Then the learner's pass over padded rows, forward and backward, and `transformers`' own over the same groups
of rows, by turns: the median of the ratios of CPU time. Exit code 1 where the learner's takes 5 % longer.
"""

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from bench import kit
from tests.tiny_families import tiny_model
from trainer_backend.core.collate import pack_segments
from trainer_backend.core.segments import Segment
from trainer_backend.inference.layer_cache import Bounds, RowState, Stack
from trainer_backend.inference.layer_runner import LayerRunner
from trainer_backend.learner.by_length import one_row, padded_groups
from trainer_backend.learner.device import place
from trainer_backend.learner.learner import scorer_of
from trainer_backend.learner.support import refuse_unsupported

KINDS = ("qwen3_5_text", "lfm2", "gpt_oss")
UPDATED = ("qwen3_next", "gpt_oss", "gemma3_text")
SEGMENTS, LIMIT = 48, 1.05
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


def segments() -> list[Segment]:
    """Of 40 to 240 tokens, of which the last quarter is sampled."""
    draw = np.random.default_rng(0)
    made = []
    for number in range(SEGMENTS):
        length = int(draw.integers(40, 240))
        start = 3 * length // 4
        ids, span = draw.integers(3, 64, length).tolist(), (start, length, 0, 0, 1.0)
        made.append(Segment.of(f"r{number}", ids, [-1.0] * (length - start), [span]))
    return made


def by_learner(model: PreTrainedModel, parts: Sequence[Segment]) -> Callable[[], Tensor]:
    scorer = scorer_of(model, place("cpu"), why_apart=refuse_unsupported(model, longest=LONGEST))
    packed = pack_segments(parts, row_tokens=LONGEST)
    return lambda: scorer.logprobs(packed).sum()


def by_transformers(model: PreTrainedModel, parts: Sequence[Segment]) -> Callable[[], Tensor]:
    """The same groups of rows; the head reads the same states, and one product has all logits."""
    row, bounds = one_row(pack_segments(parts, row_tokens=LONGEST))
    groups, order_N = padded_groups(row, bounds)

    def loss() -> Tensor:
        states = [
            model.model(input_ids=group.token_ids_BL, use_cache=False)
            .last_hidden_state.flatten(0, 1)
            .index_select(0, group.read_R)
            for group in groups
        ]
        logits_NV = model.lm_head(torch.cat(states).index_select(0, order_N))
        return logits_NV.float().log_softmax(-1).gather(1, row.target_N[:, None]).sum()

    return loss


def cpu_s(loss: Callable[[], Tensor], model: PreTrainedModel) -> float:
    model.zero_grad()
    start = time.process_time()
    loss().backward()  # type: ignore[no-untyped-call]
    return time.process_time() - start


def compare_updates(repeats: int) -> bool:
    """Whether the learner's pass is as fast for each kind of layer."""
    holds = True
    for kind in UPDATED:
        model, parts = tiny_model(kind, **SIZE), segments()
        ways = [make(model, parts) for make in (by_learner, by_transformers)]
        torch.testing.assert_close(ways[0](), ways[1](), rtol=1e-4, atol=0)
        pairs = [[cpu_s(way, model) for way in ways] for _ in range(repeats + 1)][1:]
        ratios = sorted(own / theirs for own, theirs in pairs)
        middle = statistics.median(ratios)
        own_ms = 1e3 * statistics.median(own for own, _ in pairs)
        print(
            f"{kind:14} update: {own_ms:.0f} ms, x{middle:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}) of the "
            "CPU time of transformers' pass over the same groups"
        )
        holds &= middle <= LIMIT
    return holds


def main() -> int:
    told = kit.options(__doc__, ("--quick", False, "fewer repeats"))
    repeats = 2 if told.quick else 5
    torch.set_num_threads(1)
    compare_decoding(repeats)
    return 0 if compare_updates(3 * repeats) else 1


@torch.inference_mode()
def compare_decoding(repeats: int) -> None:
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
    sys.exit(main())
