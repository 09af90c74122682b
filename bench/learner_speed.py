"""Learner tokens per second beside `trl`'s GRPOTrainer on a CPU: same model, tokens and optimizer steps.

    python -m bench.learner_speed [--rounds 5] [--threads 2] [--limit 1.5]

Counted are the tokens of all prompts and answers, padding not, once an iteration. Timed is what each side
does with them once they are sampled: score them all under the weights that the iteration begins with (both
need that, since it takes more than one step), then one pass of clipped steps. Sampling is left out on both
sides; `trl` is given the same answers in the place where it would generate them. Its trainer runs as it is,
with nothing logged, saved or checkpointed, and in the micro-batches that suit it best. Rounds alternate; the
ratio is of the least CPU times, the clock's beside it: on a busy machine that says little. Without `trl` in
this interpreter nothing is measured, and the exit code is 0.
"""

import importlib.util
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from bench import kit
from trainer_backend import learner_parts
from trainer_backend.core.segments import Segment
from trainer_backend.job.load import parse_job
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.models import build_preset, train_tokenizer
from trainer_backend.parts import CreditedEpisode

LIMIT = 1.5
STEPS = 4


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt, its answer, and the answer's reward."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    advantage: float


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of batch: how many samples, and tokens of prompts and answers.

    micro: samples of a micro-batch of `trl`: what it is fastest with of 16 to 256 (Crafter), 2 to 32 (mixed).
    rows: training.row_tokens; micro-batches are of training.micro_batch_tokens, as it comes.
    steps: of an iteration; one alone needs no scores before it.
    """

    samples: int
    prompt: tuple[int, int]
    answer: tuple[int, int]
    micro: int
    rows: int
    steps: int = STEPS


# Crafter's decisions as in the demo, and answers to prompts of very different lengths.
SHAPES = {
    "crafter": Shape(samples=1024, prompt=(35, 60), answer=(4, 8), micro=256, rows=192),
    "mixed": Shape(samples=128, prompt=(20, 400), answer=(10, 100), micro=16, rows=512),
}


def samples_of(shape: Shape, vocabulary: int) -> list[Sample]:
    draw = random.Random(0)

    def ids(bounds: tuple[int, int]) -> tuple[int, ...]:
        return tuple(draw.randrange(10, vocabulary) for _ in range(draw.randint(*bounds)))

    return [Sample(ids(shape.prompt), ids(shape.answer), draw.gauss(0, 1)) for _ in range(shape.samples)]


def ours(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    samples: list[Sample],
    shape: Shape,
    threads: int,
) -> Callable[[], None]:
    job = parse_job(
        {
            "model": {"preset": "tiny-0.3m", "device": "cpu"},
            "training": {
                "learning_rate": 1e-4,
                "update_passes": 1,
                "batch_decisions": shape.samples // STEPS,
                "row_tokens": shape.rows,
                "threads": threads,
                "entropy_coef": 0.0,
                "mismatch_limit": 1e9,  # nobody sampled these
            },
        },
        where="bench",
    ).config
    learner = LocalLearner(learner_parts.learner_config(job), model, tokenizer)
    episodes = [
        CreditedEpisode(f"r{i}", [_segment(f"r{i}", s)], [s.advantage]) for i, s in enumerate(samples)
    ]
    iteration = iter(range(1, 1000))
    return lambda: _checked_steps(learner.update(episodes, iteration=next(iteration)))


def _checked_steps(metrics: dict[str, float]) -> None:
    assert metrics["optim/steps"] == STEPS, "the same number of steps on both sides"


def _segment(name: str, sample: Sample) -> Segment:
    ids = [*sample.prompt, *sample.answer]
    return Segment.of(name, ids, [-1.0] * len(sample.answer), [(len(sample.prompt), len(ids), 0, 0, 1.0)])


def theirs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    samples: list[Sample],
    shape: Shape,
    folder: str,
) -> Iterator[tuple[float, float]]:
    """CPU and wall seconds of each iteration of trl, without end."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    micros = shape.samples // shape.micro

    class Given(GRPOTrainer):  # type: ignore[misc]
        """Uses given answers instead of generated ones, and otherwise works like the original."""

        def _generate_and_score_completions(self, inputs):  # type: ignore[no-untyped-def]
            started.append((time.process_time(), time.perf_counter()))
            return _as_trl_has_them(self, samples, shape)

    started: list[tuple[float, float]] = []
    config = GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=False, report_to=[], save_strategy="no", logging_strategy="no",
        per_device_train_batch_size=shape.micro, steps_per_generation=micros,
        gradient_accumulation_steps=micros // shape.steps, num_generations=2, num_iterations=1, beta=0.0,
        loss_type="dapo", epsilon=0.2, epsilon_high=0.25, learning_rate=1e-4, lr_scheduler_type="constant",
        max_grad_norm=1.0, gradient_checkpointing=False, disable_tqdm=True, max_steps=100_000, seed=0,
        max_completion_length=shape.answer[1], temperature=1.0, dataloader_pin_memory=False,
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": "tree"}] * shape.samples)
    trainer = Given(
        model=model, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=config,
        train_dataset=rows, processing_class=tokenizer,
    )  # fmt: skip
    return _iterations(trainer, started, shape.steps)


def _as_trl_has_them(trainer: object, samples: list[Sample], shape: Shape) -> dict[str, torch.Tensor]:
    """The batch in trl's layout, prompts padded on the left and answers on the right, scored by its code."""
    prompt = max(len(sample.prompt) for sample in samples)
    answer = max(len(sample.answer) for sample in samples)
    before = [[0] * (prompt - len(sample.prompt)) for sample in samples]
    after = [[0] * (answer - len(sample.answer)) for sample in samples]
    batch = {
        "prompt_ids": [[*pad, *s.prompt] for pad, s in zip(before, samples, strict=True)],
        "prompt_mask": [[*pad, *[1] * len(s.prompt)] for pad, s in zip(before, samples, strict=True)],
        "completion_ids": [[*s.answer, *pad] for pad, s in zip(after, samples, strict=True)],
        "completion_mask": [[*[1] * len(s.answer), *pad] for pad, s in zip(after, samples, strict=True)],
    }
    tensors = {name: torch.tensor(rows) for name, rows in batch.items()}
    tensors["advantages"] = torch.tensor([sample.advantage for sample in samples])
    tensors["num_items_in_batch"] = tensors["completion_mask"].sum()
    if shape.steps == 1:
        return tensors
    ids = torch.cat([tensors["prompt_ids"], tensors["completion_ids"]], dim=1)
    mask = torch.cat([tensors["prompt_mask"], tensors["completion_mask"]], dim=1)
    with torch.no_grad():
        score = trainer._get_per_token_logps_and_entropies  # type: ignore[attr-defined]
        old, _, _ = score(trainer.model, ids, mask, answer, shape.micro)  # type: ignore[attr-defined]
    return tensors | {"old_per_token_logps": old}


def _iterations(
    trainer: object, started: list[tuple[float, float]], steps: int
) -> Iterator[tuple[float, float]]:
    """Runs `trainer.train()` an iteration at a time: it stops itself after as many steps as one has."""
    from transformers import PrinterCallback, TrainerCallback

    class AnIteration(TrainerCallback):
        def on_step_end(self, args, state, control, **_):  # type: ignore[no-untyped-def]
            control.should_training_stop = state.global_step % steps == 0
            ended.append((time.process_time(), time.perf_counter()))

    ended: list[tuple[float, float]] = []
    trainer.remove_callback(PrinterCallback)  # type: ignore[attr-defined]
    trainer.add_callback(AnIteration())  # type: ignore[attr-defined]
    while True:
        trainer._step, trainer._buffered_inputs = 0, None  # type: ignore[attr-defined]
        trainer.train()  # type: ignore[attr-defined]
        yield ended[-1][0] - started[-1][0], ended[-1][1] - started[-1][1]


def compared(name: str, shape: Shape, rounds: int, threads: int) -> float:
    torch.set_num_threads(threads)
    tokenizer = train_tokenizer(["wood stone tree"], 512)
    samples = samples_of(shape, len(tokenizer))
    tokens = sum(len(sample.prompt) + len(sample.answer) for sample in samples)
    mine = ours(build_preset("tiny-0.3m", tokenizer), tokenizer, samples, shape, threads)
    times: dict[str, list[tuple[float, float]]] = {"turnwise": [], "trl": []}
    with tempfile.TemporaryDirectory() as folder:
        peer = theirs(build_preset("tiny-0.3m", tokenizer), tokenizer, samples, shape, folder)
        for _ in range(rounds + 1):
            cpu, wall = time.process_time(), time.perf_counter()
            mine()
            times["turnwise"].append((time.process_time() - cpu, time.perf_counter() - wall))
            times["trl"].append(next(peer))
    found = {side: [min(column) for column in zip(*rows[1:], strict=True)] for side, rows in times.items()}
    for side, (cpu, wall) in found.items():
        print(f"{name:8s} {side:8s} cpu {tokens / cpu:7.0f} tokens/s   wall {tokens / wall:7.0f} tokens/s")
    cpu_ratio, wall_ratio = (found["trl"][i] / found["turnwise"][i] for i in (0, 1))
    print(
        f"{name:8s} ratio: x{cpu_ratio:.2f} (cpu), x{wall_ratio:.2f} (wall); {tokens} tokens, {STEPS} steps"
    )
    return cpu_ratio


def main() -> int:
    options = kit.options(__doc__, ("--rounds", 5), ("--threads", 2), ("--limit", LIMIT, "least ratio"))
    if importlib.util.find_spec("trl") is None:
        print("not measured: trl is not installed beside this interpreter (pip install trl datasets)")
        return 0
    warnings.filterwarnings("ignore")
    ratios = [compared(name, shape, options.rounds, options.threads) for name, shape in SHAPES.items()]
    return kit.report(f"at least x{options.limit:g} wanted", min(ratios) >= options.limit, "TOO SLOW")


if __name__ == "__main__":
    sys.exit(main())
