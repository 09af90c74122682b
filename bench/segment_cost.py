"""What a token of an iteration costs a learner's process beside its model.

    python -m bench.segment_cost [--tokens 1000000] [--bytes 16] [--out FILE]

Episodes of 2,000 tokens in 8 decisions, of which a tenth is sampled, and then nearly all: but the first token
of each prompt. A token costs

    steps       CPU time to make segments of stored steps
    write       CPU time to write the call of an update
    sent        bytes of that call
    read        CPU time to read it
    held        memory of what was read, the call's own bytes included, as Python counts it
    resident    the same as the system counts it, in a fresh process
    batch       CPU time from segments to the tensors of a step, without any forward pass: packing, log-probs
                back by segment, their check, weights, units, columns
    rows        memory of the log-probs and weights that an update keeps beside the segments

Beside them, in turn in the same process: the call and its memory with the same numbers in tuples over all
tokens, as JSON, which is what it was ("plain").

Exit code 1 where a token is held in more than --bytes.
"""

import gc
import json
import os
import platform
import random
import sys
import tempfile
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import torch
from pydantic import TypeAdapter

from bench import kit
from bench.demo_iteration import JOB
from shared_schemas.trajectory import ObservationData, PolicyLogprobs, Sampling, StepData
from trainer_backend import learner_parts
from trainer_backend.core.aggregation import number_units, token_mean
from trainer_backend.core.collate import by_segment, collate, pack_segments
from trainer_backend.core.segments import CONTEXT, Segment, build_segments
from trainer_backend.job.load import load_job
from trainer_backend.learner.behaviour import Weighed, mismatch, weighed
from trainer_backend.learner.calls import CALLS
from trainer_backend.learner.scoring import refuse_unknown_ids
from trainer_backend.learner.stepping import Scored
from trainer_backend.parts import CreditedEpisode

LIMIT = 16
LENGTH, DECISIONS, ROW_TOKENS, IDS = 2_000, 8, 4_096, 50_000
SHARES = {"a tenth sampled": 0.1, "nearly all sampled": 1.0}


@dataclass(frozen=True, slots=True)
class Plain:
    """A segment in numbers of Python's, all [L]."""

    rollout_id: str
    token_ids: tuple[int, ...]
    decision: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    temperatures: tuple[float, ...]

    @classmethod
    def of(cls, segment: Segment) -> "Plain":
        rows: list[list[Any]] = [[fill] * len(segment) for fill in (CONTEXT, 0.0, CONTEXT, 1.0)]
        columns: tuple[Any, ...] = (
            segment.decision,
            segment.logprobs,
            segment.versions,
            segment.temperatures,
        )
        for row, column in zip(rows, columns, strict=True):
            for position, value in zip(segment.sampled_positions.tolist(), column.tolist(), strict=True):
                row[position] = value
        return cls(segment.rollout_id, tuple(segment.token_ids.tolist()), *map(tuple, rows))


def episode(number: int, share: float) -> list[StepData]:
    draw, length = random.Random(number), LENGTH // DECISIONS
    sampled = min(length - 1, round(length * share))

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(IDS) for _ in range(count))

    def call(t: int) -> PolicyLogprobs:
        return PolicyLogprobs(
            prompt_ids_reused=t * length, prompt_token_ids=ids(length - sampled), token_ids=ids(sampled),
            logprobs=tuple(-draw.random() for _ in range(sampled)), finish_reason="stop",
            versions=((0, 3),),
        )  # fmt: skip

    return [
        StepData(
            turn=t + 1, observation_data=ObservationData(), action_taken={"type": "text"},
            sampling=Sampling(), policy_logprobs=call(t),
        )
        for t in range(DECISIONS)
    ]  # fmt: skip


class Costs:
    """Costs a token by name, printed as they come: µs of CPU time, or bytes."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.by_name = tokens, dict[str, float]()

    def add(self, name: str, cost: float, unit: str) -> None:
        self.by_name[name] = round(cost, 4)
        print(f"    {name:24s}{cost:9.3f} {unit} a token", flush=True)

    def timed(self, name: str, work: Callable[[], Any]) -> None:
        self.add(name, 1e6 * kit.least(work, 3).cpu_s / self.tokens, "µs")

    def held(self, name: str, work: Callable[[], Any]) -> None:
        """Add the memory of a result as Python counts it."""
        gc.collect()
        tracemalloc.start()
        result = work()
        gc.collect()
        self.add(name, tracemalloc.get_traced_memory()[0] / self.tokens, "bytes")
        tracemalloc.stop()
        del result


def measured(tokens: int, share: float, folder: Path) -> dict[str, float]:
    costs = Costs(tokens)
    stored = [episode(number, share) for number in range(tokens // LENGTH)]

    def segments() -> list[Segment]:
        return [part for i, steps in enumerate(stored) for part in build_segments(steps, rollout_id=f"r{i}")]

    costs.timed("steps", segments)
    parts = segments()
    call(
        costs,
        "",
        folder / "call",
        [CreditedEpisode(part.rollout_id, [part], [1.0] * DECISIONS) for part in parts],
    )
    plain = [Plain.of(part) for part in parts]
    call(costs, "plain ", folder / "call", plain)
    del plain
    batches(costs, parts)
    return costs.by_name


@dataclass(frozen=True, slots=True)
class Way:
    """How a call is written and read."""

    write: Callable[[list[Any]], bytes]
    read: Callable[[bytes], Any]


WAYS = {
    "": Way(
        lambda episodes: CALLS.write_arguments("update", (episodes, 1, None)),
        partial(CALLS.read_arguments, "update"),
    ),
    "plain ": Way(TypeAdapter(list[Plain]).dump_json, TypeAdapter(list[Plain]).validate_json),
}


def call(costs: Costs, name: str, file: Path, episodes: list[Any]) -> None:
    """Costs of a call with these."""
    way = WAYS[name]
    body = way.write(episodes)
    costs.timed(f"{name}write", lambda: way.write(episodes))
    costs.add(f"{name}sent", len(body) / costs.tokens, "bytes")
    costs.timed(f"{name}read", lambda: way.read(body))
    file.write_bytes(body)
    # Nothing keeps the text of JSON; arrays are views of what was sent.
    costs.held(f"{name}held", lambda: way.read(file.read_bytes()))
    with get_context("spawn").Pool(1) as fresh:
        costs.add(f"{name}resident", fresh.apply(resident, (name, file)) / costs.tokens, "bytes")


def resident(name: str, file: Path) -> int:
    """Resident bytes that a call adds to this process."""
    process = psutil.Process()
    WAYS[name].read(WAYS[name].write([]))  # so that nothing is built for the first time
    before = process.memory_info().rss
    arguments = WAYS[name].read(file.read_bytes())
    gc.collect()
    return int(process.memory_info().rss - before) if arguments else 0


def batches(costs: Costs, parts: list[Segment]) -> None:
    """Costs of what an update does besides forward and backward passes."""
    objectives = learner_parts.learner_config(load_job(JOB, ()).config).objectives
    generator = torch.Generator().manual_seed(0)
    logprobs_N = -torch.rand(sum(len(part.logprobs) for part in parts), generator=generator)

    def scores() -> Weighed:
        rows = by_segment(pack_segments(parts, row_tokens=ROW_TOKENS), logprobs_N)
        return weighed(
            [Scored(part, share=share) for part, share in zip(parts, token_mean(parts), strict=True)],
            rows,
            objectives,
        )

    def batch() -> None:
        refuse_unknown_ids(parts, IDS)
        scored = scores().scored
        mismatch(scored, 3, limit=1e9)
        collate(
            parts,
            advantages={part.rollout_id: [1.0] * DECISIONS for part in parts},
            weights=[item.share for item in scored],
            proximal=[item.proximal for item in scored],
            behaviour=[item.behaviour for item in scored],
            units=number_units(parts, ["token"] * len(parts)),
            policies=[0] * len(parts),
            row_tokens=ROW_TOKENS,
        )

    costs.timed("batch", batch)
    costs.held("rows", scores)


def main() -> int:
    options = kit.options(
        __doc__,
        ("--tokens", 1_000_000, "tokens of the iteration"),
        ("--bytes", LIMIT, "most bytes that a token is held in"),
        ("--out", "", "file for the results"),
    )
    torch.set_num_threads(1)
    results: dict[str, dict[str, float]] = {}
    for name, share in SHARES.items():
        print(name, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            results[name] = measured(options.tokens, share, Path(folder))
    if options.out:
        machine = {
            "cpus": os.cpu_count(),
            "platform": platform.platform(),
            "python": platform.python_version(),
        }
        text = {"bench": "segment_cost", "machine": machine, "tokens": options.tokens, "a token": results}
        Path(options.out).write_text(json.dumps(text, indent=1) + "\n")
    most = max(found["held"] for found in results.values())
    return kit.report(f"segments: {most:.1f} bytes a token (at most {options.bytes})", most <= options.bytes)


if __name__ == "__main__":
    sys.exit(main())
