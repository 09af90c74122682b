"""Updates by `trl`'s GRPOTrainer, which bench/shared_prefix.py compares with ours. Needs trl and datasets.

trl's code is unchanged, and the trainer logs and saves nothing. It gets answers instead of generating them.
The measured time is that of one pass of clipped steps. If an iteration has several steps, all answers are
first scored under the weights at its start, and this time is included.
"""

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast


class Sample(NamedTuple):
    """The token ids of a prompt and of its answer."""

    prompt: Sequence[int]
    answer: Sequence[int]


def updates(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    samples: Sequence[Sample],
    *,
    micro: int,
    steps: int,
    folder: str,
) -> Iterator[float]:
    """Yield the CPU seconds of each iteration, without end.

    Args:
        micro: samples of a micro-batch.
        steps: optimizer steps of an iteration.
        folder: where the trainer may write.
    """
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Given(GRPOTrainer):  # type: ignore[misc]
        """Uses given answers instead of generated ones, and otherwise works like the original."""

        def _generate_and_score_completions(self, inputs):  # type: ignore[no-untyped-def]
            began.append(time.process_time())
            return _layout(self, samples, micro, scores=steps > 1)

    class AnIteration(TrainerCallback):
        def on_step_end(self, args, state, control, **_):  # type: ignore[no-untyped-def]
            control.should_training_stop = state.global_step % steps == 0
            ended.append(time.process_time())

    began: list[float] = []
    ended: list[float] = []
    micros = len(samples) // micro
    config = GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=False, report_to=[], save_strategy="no", logging_strategy="no",
        per_device_train_batch_size=micro, steps_per_generation=micros,
        gradient_accumulation_steps=micros // steps, num_generations=2, num_iterations=1, beta=0.0,
        loss_type="dapo", epsilon=0.2, epsilon_high=0.25, learning_rate=1e-4, lr_scheduler_type="constant",
        max_grad_norm=1.0, gradient_checkpointing=False, disable_tqdm=True, max_steps=100_000, seed=0,
        max_completion_length=max(len(one.answer) for one in samples), temperature=1.0,
        dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Given(
        model=model, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=config,
        train_dataset=Dataset.from_list([{"prompt": "tree"}] * len(samples)), processing_class=tokenizer,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(AnIteration())
    while True:  # each `trainer.train()` is one iteration
        trainer._step, trainer._buffered_inputs = 0, None
        trainer.train()
        yield ended[-1] - began[-1]


def _layout(
    trainer: object, samples: Sequence[Sample], micro: int, *, scores: bool
) -> dict[str, torch.Tensor]:
    """Return the batch in trl's layout, padded on both sides; with `scores`, trl's log-probs are included."""
    prompt = max(len(one.prompt) for one in samples)
    answer = max(len(one.answer) for one in samples)
    before = [prompt - len(one.prompt) for one in samples]
    after = [answer - len(one.answer) for one in samples]
    rows = {
        "prompt_ids": [[0] * pad + [*one.prompt] for pad, one in zip(before, samples, strict=True)],
        "prompt_mask": [[0] * pad + [1] * len(one.prompt) for pad, one in zip(before, samples, strict=True)],
        "completion_ids": [[*one.answer] + [0] * pad for pad, one in zip(after, samples, strict=True)],
        "completion_mask": [
            [1] * len(one.answer) + [0] * pad for pad, one in zip(after, samples, strict=True)
        ],
    }
    batch = {name: torch.tensor(row) for name, row in rows.items()}
    batch["advantages"] = torch.ones(len(samples))
    batch["num_items_in_batch"] = batch["completion_mask"].sum()
    if not scores:
        return batch
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    with torch.no_grad():
        score = trainer._get_per_token_logps_and_entropies  # type: ignore[attr-defined]
        old, *_ = score(trainer.model, ids, mask, answer, micro)  # type: ignore[attr-defined]
    return batch | {"old_per_token_logps": old}
