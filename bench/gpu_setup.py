"""Shared by the figures of bench/gpu.py: a report that survives a timeout, models, batches and jobs.

Models are shapes of Qwen3 with random weights.
"""

import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from bench import kit
from trainer_backend import learner_parts
from trainer_backend.core.segments import Segment
from trainer_backend.job.load import parse_job
from trainer_backend.job.schema import JobConfig
from trainer_backend.learner.device import place
from trainer_backend.learner.memory import memory_needs
from trainer_backend.learner.memory_plan import MemoryPlan, device_memory, main_memory, memory_use
from trainer_backend.learner.shapes import model_shape


class Task(NamedTuple):
    """A measurement.

    least_s: with fewer seconds left, the task is not begun.
    """

    kind: str
    shape: str
    least_s: float
    run: Callable[[], None]


@dataclass
class Report:
    """The measured figures, and the tasks that could not be measured.

    Attributes:
        file: the JSON file; None writes none.
        machine: facts about the measured machine.
        end: end of the allowed time, by `time.monotonic`.
    """

    file: Path | None
    machine: dict[str, Any]
    end: float
    figures: list[dict[str, Any]] = field(default_factory=list)
    missing: list[dict[str, str]] = field(default_factory=list)

    @property
    def left_s(self) -> float:
        return self.end - time.monotonic()

    @property
    def met(self) -> bool:
        """Whether no measured figure misses its bound."""
        return all(figure["met"] is not False for figure in self.figures)

    def add(
        self, kind: str, shape: str, line: str, *, met: bool | None = None, missed: str = "MISSED",
        **values: Any,
    ) -> None:  # fmt: skip
        """Print a figure, and write all figures.

        Args:
            met: whether the figure meets its bound; None if it has none.
        """
        said = "" if met is None else f" {kit.verdict(met, missed)}"
        print(f"  {shape:5s} {kind:10s} {line}{said}", flush=True)
        self.figures.append({"kind": kind, "shape": shape, "line": line, "met": met, **values})
        self._write()

    def miss(self, kind: str, shape: str, reason: str) -> None:
        print(f"  {shape:5s} {kind:10s} not measured: {reason}", flush=True)
        self.missing.append({"kind": kind, "shape": shape, "reason": reason})
        self._write()

    def measure(self, tasks: Sequence[Task]) -> None:
        """Run the tasks in order. If a task fails or has too little time left, note that and continue."""
        for task in tasks:
            if self.left_s < task.least_s:
                self.miss(task.kind, task.shape, f"{max(0, self.left_s):.0f} s are left")
                continue
            try:
                task.run()
            except Exception as error:
                self.miss(task.kind, task.shape, f"{type(error).__name__}: {error}"[:500])
            forget_memory()

    def _write(self) -> None:
        if self.file is not None:
            found = {"machine": self.machine, "figures": self.figures, "missing": self.missing}
            kit.write_results(self.file, found)


def forget_memory() -> None:
    """Free the memory that the last task used, and reset the peak."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call, including all work that it has started on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
)  # fmt: skip
SHAPES = {"0.6b": (1024, 3072, 28, 16, 8), "4b": (2560, 9728, 36, 32, 8), "tiny": (64, 128, 2, 4, 2)}
# Ways to train a model, from all weights to the way that needs least memory.
WAYS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "all weights, layers checkpointed": {"gradient_checkpointing": True},
    "adapters of rank 16": {"lora": {"rank": 16}},
    "adapters of rank 16, layers checkpointed": {"lora": {"rank": 16}, "gradient_checkpointing": True},
}


@dataclass(frozen=True, slots=True)
class Plan:
    """The sizes and numbers of the measurements.

    tokens: number of tokens in an update.
    rows, contexts: decode steps are measured for every number of rows with every length of context.
    new: timed decode steps.
    rounds: timed calls of decoding, and timed updates, after one that is not timed.
    least_mfu: bound of an update.
    reserve_s: seconds that decode leaves to later tasks.
    served: requests, and tokens of each, of the engine that shares the device with the learner.
    """

    tokens: int
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    new: int
    rounds: int
    least_mfu: float
    reserve_s: float
    served: tuple[int, int]

    @property
    def longest(self) -> int:
        return max(self.contexts) + self.new


FULL = Plan(
    tokens=16384, rows=(64, 16, 1), contexts=(1024, 288, 4096), new=32, rounds=3, least_mfu=0.35,
    reserve_s=180.0, served=(8, 1024),
)  # fmt: skip
SMOKE = Plan(
    tokens=512, rows=(4, 1), contexts=(112,), new=8, rounds=1, least_mfu=0.0, reserve_s=0.0, served=(8, 256)
)


def make_config(name: str, layers: int | None = None) -> Qwen3Config:
    small = name == "tiny"
    sizes = dict(zip(SIZES, SHAPES[name], strict=True))
    return Qwen3Config(
        **(sizes | ({"num_hidden_layers": layers} if layers else {})),
        head_dim=16 if small else 128,
        vocab_size=512 if small else 151936,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
    )


def make_model(config: Qwen3Config, device: torch.device) -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def make_segments(tokens: int, vocabulary: int, *, longest: int) -> list[Segment]:
    """Return segments of up to `longest` tokens, `tokens` in all; the last quarter of each is sampled."""
    draw, left, made = random.Random(0), tokens, []
    while left:
        length = min(left, draw.randint(longest // 4, longest))
        if 0 < left - length < 8:  # what is left over is no segment of its own
            length = left
        ids = [draw.randrange(vocabulary) for _ in range(length)]
        answer = max(1, length // 4)
        spans = [(length - answer, length, 0, 0, 1.0)]
        made.append(Segment.of(f"r{len(made)}", ids, [-12.0] * answer, spans))
        left -= length
    return made


def make_job(plan: Plan, way: dict[str, Any], device: str) -> JobConfig:
    training = {key: value for key, value in way.items() if key != "lora"}
    document = {
        "model": {"preset": "tiny-0.3m", "device": device},  # the model itself is handed over
        "inference": {
            "max_running": plan.served[0], "max_model_len": plan.served[1], "kept_prefixes": 0,
        },
        "training": training | {
            "update_passes": 1, "batch_decisions": 10**6, "row_tokens": plan.tokens,
            "micro_batch_tokens": plan.tokens, "learning_rate": 1e-6,
            "mismatch_limit": 1e9,  # no policy sampled these segments
        },
    } | ({"lora": way["lora"]} if "lora" in way else {})  # fmt: skip
    return parse_job(document, where="bench").config


def fitting(config: Qwen3Config, plan: Plan, device: str) -> tuple[str, JobConfig, MemoryPlan]:
    """Return the first of WAYS that fits the device, or else the last, with its job and memory plan."""
    for name, way in WAYS.items():
        job = make_job(plan, way, device)
        found = name, job, plan_memory(config, job)
        if sum(found[2].needs.device.values()) <= found[2].free:
            break
    return found


def plan_memory(config: Qwen3Config, job: JobConfig) -> MemoryPlan:
    """Return the plan that `learner.memory_plan.memory_plan` would make, for a model without a folder."""
    placement, shape, main = place(job.model.device), model_shape(config, job.lora), main_memory()
    is_gpu = placement.device.type != "cpu"
    needs = memory_needs(
        shape, memory_use(learner_parts.learner_config(job), placement, shape), is_gpu=is_gpu
    )
    return MemoryPlan(placement, needs, device_memory(placement) if is_gpu else main, main)
