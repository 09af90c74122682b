"""Checkpoints: a Hugging Face model folder with optimizer, RNG and progress; written to a temporary folder.

    checkpoints/iteration_n/   model.safetensors config.json tokenizer.json    for any Hugging Face program;
                                   with [lora], after iteration_0, adapter_model.safetensors and
                                   adapter_config.json instead, over the model of iteration_0
                               state.json    progress of training
                               digests.json    of all other files (rundir.digests); written last
                               training_state/    for resuming: optimizer.safetensors, rng.safetensors;
                                   value_head.safetensors with a critic, critic.safetensors for its own
                                   layers; learning_rate.json with "desired_kl"
                               with several ranks model-n-of-m.safetensors of each rank, an index, and
                                   training_state/optimizer/ with the share of each rank
                               adapter/    with [lora], in peft's layout; a model in this folder includes it
                               base.json    without a model: the checkpoint with the base model, its digest
    checkpoints/best           a link to the checkpoint with the best evaluation so far, or to the latest
    checkpoints/best.json      the checkpoint that was marked as the best, and its mean outcome

Nothing is pickled. The final rename commits: a folder with the final name is complete.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from trainer_backend.errors import CheckpointError
from trainer_backend.learner.adapter_folder import FOLDER, write_for_transformers
from trainer_backend.learner.own_critic import OwnCritic
from trainer_backend.learner.ranks import ALONE, Ranks
from trainer_backend.learner.shares import restore_moments, save_moments, write_weights
from trainer_backend.learner.step_size import StepSize
from trainer_backend.learner.value_head import ValueHead
from trainer_backend.models import save_model_folder
from trainer_backend.models.folder import collect_weights, save_settings
from trainer_backend.models.layout import BASE, CONFIG
from trainer_backend.models.origin import as_stored, read_origin, refuse_joined
from trainer_backend.parts import Progress, WeightPart
from trainer_backend.rundir.checkpoint_paths import STATE_FILE, TRAINING_FOLDER
from trainer_backend.rundir.digests import collect_digests, read_digest
from trainer_backend.rundir.files import flush

if TYPE_CHECKING:  # peft
    from trainer_backend.learner.adapter import Adapter


def save_checkpoint(
    folder: Path,
    *,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    adapter: "Adapter | None" = None,
    critic: ValueHead | OwnCritic | None = None,
    step_size: StepSize | None = None,
    base: Path | None = None,
    ranks: Ranks = ALONE,
) -> None:
    """Write a checkpoint to a temporary folder, flush it, and rename it to `folder`; all ranks call this.

    With `base`, the checkpoint with the adapters' base model, no model is written. Otherwise the model is
    written, with any adapters merged.
    """

    def begin() -> None:
        if base is not None:
            save_settings(aside, model, tokenizer)
            (aside / CONFIG).unlink()  # with it, transformers would expect the base's weights here
            named = {"folder": base.name, "digest": read_digest(base)}
            (aside / BASE).write_text(json.dumps(named), encoding="utf-8")
        digests.take()
        if adapter is not None:
            adapter.save(aside / FOLDER)
            if base is not None:
                write_for_transformers(aside, aside / FOLDER, base)
        own.mkdir()
        states = {"torch": torch.get_rng_state()}
        if torch.cuda.is_available():  # for the adapters' dropout on a GPU
            states["cuda"] = torch.cuda.get_rng_state()
        save_file(states, own / "rng.safetensors")
        if step_size is not None:
            step_size.save(own)

    def end() -> None:
        (aside / STATE_FILE).write_text(json.dumps(asdict(progress)), encoding="utf-8")
        digests.write()

    with _written_aside(folder, "checkpoint", ranks) as aside, collect_digests(aside) as digests:
        own = aside / TRAINING_FOLDER
        if base is None:
            _save_model(aside, model, tokenizer, adapter, "whole", ranks)
        ranks.first_alone(begin)
        if critic is not None:
            critic.save(own, ranks)
        save_moments(own, optimizer, ranks)
        ranks.first_alone(end)


def save_weights(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    adapter: "Adapter | None",
    part: WeightPart = "whole",
    ranks: Ranks = ALONE,
) -> None:
    """Write a model folder for servers, by a temporary folder; all ranks call this.

    With adapters, `part` selects the adapters alone, the base alone, or the merged model together with the
    adapters.
    """
    with _written_aside(folder, "model folder", ranks) as aside:
        if adapter is not None and part == "adapters":
            ranks.first_alone(partial(adapter.save, aside))
            return
        _save_model(aside, model, tokenizer, adapter, part, ranks)
        if adapter is not None and part == "whole":
            ranks.first_alone(partial(adapter.save, aside / FOLDER))


def _save_model(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    adapter: "Adapter | None",
    part: WeightPart,
    ranks: Ranks,
) -> None:
    if not ranks.are_several:
        weights = None
        if adapter is not None:
            own = adapter.under()
            weights = {name: own[name].cpu() for name in own} if part == "base" else adapter.merged()
        save_model_folder(folder, model, tokenizer, weights=weights)
        return
    refuse_joined(model)
    ranks.first_alone(partial(save_settings, folder, model, tokenizer))

    def finished(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        if adapter is not None and part != "base":
            weight = adapter.merged_in(name, weight)
        return as_stored(model, {name: weight})

    weights = collect_weights(model) if adapter is None else adapter.under()
    write_weights(folder, weights, ranks, finished=finished)
    ranks.first_alone(partial(read_origin(model).write_kept, folder))


@contextmanager
def _written_aside(folder: Path, kind: str, ranks: Ranks) -> Iterator[Path]:
    """Provide a temporary folder to fill; rename it to `folder` at the end, or remove it after an error.

    With several ranks, an error inside must be raised on all of them.
    """
    aside = folder.with_name(f".{folder.name}.tmp")

    def begin() -> None:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)

    try:
        ranks.first_alone(begin)
        yield aside
        ranks.first_alone(partial(_put_in_place, aside, folder))
    except Exception as error:
        # Not only OSError: safetensors raises its own error class for a full disk.
        if ranks.is_first:
            shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(
            f"{folder}: the {kind} could not be written: {error}",
            hint="Earlier checkpoints are intact; free some space, then resume the run",
        ) from error


def _put_in_place(aside: Path, folder: Path) -> None:
    """Rename `aside` to `folder`; an old folder of that name is renamed first, and removed last.

    Removing takes long, and a kill in the meantime must not leave half of a folder under the final name.
    """
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    try:
        os.replace(aside, folder)
    except OSError:
        if old.exists():
            os.replace(old, folder)
        raise
    # A rename is durable only after its parent folder is flushed.
    flush(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def restore_progress(folder: Path, optimizer: torch.optim.Optimizer, ranks: Ranks = ALONE) -> Progress:
    """Restore optimizer and RNG; the model itself is loaded like any folder."""
    try:
        own = folder / TRAINING_FOLDER
        state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        progress = Progress(**state)
        restore_moments(own, optimizer, ranks)
        states = load_file(own / "rng.safetensors")
        torch.set_rng_state(states["torch"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{folder}: the checkpoint cannot be read: {error}") from error
    return progress
