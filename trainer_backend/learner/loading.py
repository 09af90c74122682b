"""Loads and checks a job's model folder, a checkpoint of its run, or frozen weights."""

import copy
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from trainer_backend.core.logprobs import wide_product
from trainer_backend.core.presets import PRESETS
from trainer_backend.errors import CheckpointError, ModelFolderError
from trainer_backend.inference.actor import WeightSource
from trainer_backend.inference.chat_check import refuse_without_tools
from trainer_backend.inference.rendering import ChatRenderer
from trainer_backend.job.tables import ModelTable
from trainer_backend.learner.adapter_folder import FOLDER, add_adapters, read_adapter, take_out
from trainer_backend.learner.checkpoints import save_weights
from trainer_backend.learner.device import Placement
from trainer_backend.models.folder import load_model_folder
from trainer_backend.models.kinds import own_attention
from trainer_backend.models.layout import BASE, base_folder, described, read_config, read_object
from trainer_backend.models.precision import held_dtype
from trainer_backend.models.sources import model_folder, remember_chat_settings
from trainer_backend.rundir.checkpoint_paths import is_whole, model_in
from trainer_backend.rundir.digests import read_digest, refuse_damaged


def load_named(table: ModelTable) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """The model and tokenizer that model.path or model.name names; weights in fp32."""
    return _checked(model_folder(table), table)


def load_checkpoint(table: ModelTable, checkpoint: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """The model of a checkpoint."""
    expected = _described(table)
    stored = described(read_config(checkpoint))
    if expected is not None and expected != stored:
        raise CheckpointError(
            f"{checkpoint} holds {stored}, but the job's model is {expected}",
            hint="It is of another run, or [model] of the job was changed.",
        )
    return _checked(checkpoint, table)


def write_merged(folder: Path, to: Path, dtype: str) -> Path:
    """Write the model of a checkpoint as one plain model folder, for other programs: any adapters merged.

    The sum is made in float32 and rounded once, to `dtype` (torch's name for it). `folder` is a run (its best
    checkpoint), a checkpoint, or a model folder, whose path is returned; `to` must not exist.

    Raises ModelFolderError or CheckpointError: the model is damaged, incomplete, or cannot be written.
    """
    if to.exists():
        raise ModelFolderError("it exists, and nothing is replaced", where=str(to), hint="Name another --to.")
    checkpoint = model_in(folder)
    if is_whole(checkpoint):
        refuse_damaged(checkpoint)
    model, tokenizer = _checked(checkpoint, ModelTable(path=checkpoint))
    model.to(getattr(torch, dtype))
    try:
        save_weights(to, model, tokenizer, None)
    except CheckpointError as error:
        hint = "Name a folder with --to where you may write, on a disk with room for the whole model."
        raise ModelFolderError(error.detail, hint=hint) from error
    return checkpoint


def _checked(folder: Path, table: ModelTable) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    base = checked_base(folder)
    if base is not None:
        refuse_damaged(base)
    model, tokenizer = load_model_folder(base or folder)
    if base is not None:
        take_out(model, base / FOLDER)
        add_adapters(model, folder / FOLDER)
    remember_chat_settings(tokenizer, table)
    refuse_without_tools(tokenizer)
    ChatRenderer(tokenizer).refuse_unread_settings(table.chat_template_kwargs)
    return model, tokenizer


def checked_base(folder: Path) -> Path | None:
    """The folder whose model a checkpoint's adapters are over, unchanged; None for a folder with a model."""
    base = base_folder(folder)
    if base is not None and read_digest(base) != read_object(folder / BASE).get("digest"):
        raise CheckpointError(
            f"{folder}: its adapters were trained over another {base.name} than the one now next to it",
            hint="Put back the one that the run began with; over other weights they mean nothing.",
        )
    return base


def _described(table: ModelTable) -> str | None:
    """A description of the job's model; None where its folder is gone, though its run has checkpoints."""
    if table.preset is not None:
        layers, width = PRESETS[table.preset].layers, PRESETS[table.preset].width
        return described({"model_type": "qwen3", "num_hidden_layers": layers, "hidden_size": width})
    try:
        return described(read_config(model_folder(table, cached_only=True)))
    except ModelFolderError:
        return None


def hold_in(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert the matrices, and nothing but them; norms and biases are float32 (`models.precision`).

    `model.to(dtype)` would round the frequencies of rotary positions as well, and in bfloat16 tokens beyond
    the first hundreds would stand elsewhere.
    """
    for weight in model.parameters():
        weight.data = weight.data.to(held_dtype(weight, dtype))


def held_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy without gradients: matrices of `dtype`, norms and biases of float32, buffers as they are.

    Weights are converted one by one, so that a float32 copy of the whole model need not fit.
    """
    converted = {}
    for weight in model.parameters():
        held = weight.detach().to(held_dtype(weight, dtype), copy=True)
        converted[id(weight)] = nn.Parameter(held, requires_grad=False)
    # What deepcopy meets twice it takes from here; so tied weights stay tied.
    return copy.deepcopy(model, converted)


def copy_to_serve(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy for the engine: adapters and all, attention that takes a cache, logits of float32."""
    served = held_copy(model, dtype)
    served.set_attn_implementation(own_attention(model))
    if dtype != torch.float32:
        served.lm_head = Float32Head(served.lm_head.weight, served.lm_head.bias)
    served.eval()  # type: ignore[no-untyped-call]
    return served


def folder_to_serve(model: PreTrainedModel, folder: Path, placement: Placement) -> PreTrainedModel:
    """The float32 model of a folder for an engine on the placement; it is used up.

    Adapters of a checkpoint that are merged into weights to be rounded are separated from the base again:
    after rounding, the sum may equal the base, and the training would be lost.
    """
    if placement.low is not None and (folder / FOLDER).is_dir():
        from trainer_backend.learner.adapter import unmerge  # peft: half a second of a start

        unmerge(model, folder / FOLDER)
    served = copy_to_serve(model, placement.held)
    served.to(placement.device)  # type: ignore[arg-type]
    return served


def new_weights(folder: Path, placement: Placement) -> WeightSource:
    """Weights that an engine of `folder_to_serve` loads from a later folder of the run: adapters, or all."""
    has_adapters = placement.low is not None and (folder / FOLDER).is_dir()
    return read_adapter(folder / FOLDER) if has_adapters else folder


class Float32Head(nn.Module):
    """An LM head whose factors are of low precision and whose sums, and bias if any, are float32.

    Logits rounded to bfloat16 would be another distribution than the one that is trained: 0.06 nats off at a
    logit of 20.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., D] to [..., V]."""
        # Autocast would round the sums to what the factors are.
        with torch.autocast(hidden.device.type, enabled=False):
            logits = wide_product(hidden.flatten(0, -2).to(self.weight.dtype), self.weight.T)
            if self.bias is not None:
                logits = logits + self.bias.float()
        return logits.view(*hidden.shape[:-1], -1)
