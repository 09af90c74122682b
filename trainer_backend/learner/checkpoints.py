"""Writes and reads checkpoints: Hugging Face model folders that also contain the state of training.

    checkpoints/iteration_n/   the folder of one checkpoint, which contains:
        model.safetensors, config.json, tokenizer.json
                               the model, for any Hugging Face program. With [lora], only iteration_0 contains
                               a model; later checkpoints contain adapter_model.safetensors and
                               adapter_config.json, to be loaded on top of the model of iteration_0
        model-n-of-m.safetensors, and an index
                               instead of model.safetensors if the learner has several ranks
        state.json             progress of training
        digests.json           digests of all other files (rundir.digests); written last
        training_state/        what a resumed run needs: optimizer.safetensors, or optimizer/ with a part for
                               each rank; rng.safetensors; with a critic, value_head.safetensors, and
                               critic.safetensors if it has layers of its own; learning_rate.json with the
                               schedule "desired_kl"
        adapter/               with [lora], the adapters in peft's layout. If the folder contains a model, its
                               weights already include them
        base.json              if the folder contains no model: name and digest of the checkpoint with the
                               base model
    checkpoints/best           a link to the checkpoint with the best evaluation so far, or to the latest
                               checkpoint if none was evaluated
    checkpoints/best.json      the checkpoint with the best evaluation, and its mean outcome

Files are written to a temporary folder, which is renamed at the end, so a folder with the final name is
complete. Nothing is pickled.
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
    """Write a checkpoint to a temporary folder, flush it, and rename it to `folder`.

    All ranks must call this function. `base` is the checkpoint that contains the base model of the adapters.
    If it is given, the new checkpoint contains the adapters, but no model. If it is None, the new checkpoint
    contains the whole model, with its adapters merged if it has any.
    """

    def begin() -> None:
        if base is not None:
            save_settings(aside, model, tokenizer)
            (aside / CONFIG).unlink()  # if it exists, transformers expects the base weights in this folder
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
    """Write the weights to a folder that inference servers can load. All ranks must call this.

    The files are written to a temporary folder, which is renamed at the end. If the model has adapters,
    `part` selects what is written: only the "adapters", the "base" without adapters, or the "whole" merged
    model together with the adapters.
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
    """Provide a temporary folder inside the context, and rename it to `folder` at the end.

    After an error, remove the temporary folder and raise CheckpointError. With several ranks, an error inside
    the context must be raised on all ranks. `kind` names the folder's content in the error's text.
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
    """Rename `aside` to `folder`, and replace an existing folder of that name.

    Removing a folder takes long, and a process that is killed must not leave an incomplete folder with the
    final name. The existing folder is therefore renamed first, and removed last.
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
    """Restore the optimizer's state and torch's RNG state from a checkpoint; return its progress.

    The model's weights are not restored here. Raises CheckpointError if a file cannot be read.
    """
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
