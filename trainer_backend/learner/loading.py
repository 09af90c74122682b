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
    """Load the model and tokenizer of model.path or model.name; weights in float32."""
    return _load(model_folder(table), table)


def load_checkpoint(table: ModelTable, checkpoint: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Load the model and tokenizer of a checkpoint.

    Raises CheckpointError if the checkpoint's model and the job's model have different architectures.
    """
    expected = _described(table)
    stored = described(read_config(checkpoint))
    if expected is not None and expected != stored:
        raise CheckpointError(
            f"{checkpoint} holds {stored}, but the job's model is {expected}",
            hint="It belongs to another run, or the job's [model] was changed.",
        )
    return _load(checkpoint, table)


def write_merged(folder: Path, to: Path, dtype: str) -> Path:
    """Write the model of a checkpoint as a plain model folder; return the folder that was read.

    Adapters are merged into the weights in float32; the sums are rounded once, to `dtype`.

    Args:
        folder: a run, of which the best checkpoint is read; a checkpoint; or a model folder.
        to: the new folder, which must not exist.
        dtype: the name of a torch dtype, such as "bfloat16".

    Raises ModelFolderError or CheckpointError: the model is damaged, incomplete, or cannot be written.
    """
    if to.exists():
        raise ModelFolderError("it exists already", where=str(to), hint="Name another folder with --to.")
    checkpoint = model_in(folder)
    if is_whole(checkpoint):
        refuse_damaged(checkpoint)
    model, tokenizer = _load(checkpoint, ModelTable(path=checkpoint))
    model.to(getattr(torch, dtype))
    try:
        save_weights(to, model, tokenizer, None)
    except CheckpointError as error:
        hint = "Name a writable folder with --to, on a disk with room for the whole model."
        raise ModelFolderError(error.detail, hint=hint) from error
    return checkpoint


def _load(folder: Path, table: ModelTable) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
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
    """Return the folder with the base model of a checkpoint's adapters; None for a folder with a model.

    Raises CheckpointError if the adapters were trained with another base model.
    """
    base = base_folder(folder)
    if base is not None and read_digest(base) != read_object(folder / BASE).get("digest"):
        raise CheckpointError(
            f"{folder}: its adapters were trained over another {base.name} than the one now next to it",
            hint="Restore the folder that the run began with; adapters are useless over other weights.",
        )
    return base


def _described(table: ModelTable) -> str | None:
    """Describe the architecture of the job's model; None if its folder cannot be read."""
    if table.preset is not None:
        layers, width = PRESETS[table.preset].layers, PRESETS[table.preset].width
        return described({"model_type": "qwen3", "num_hidden_layers": layers, "hidden_size": width})
    try:
        return described(read_config(model_folder(table, cached_only=True)))
    except ModelFolderError:
        return None


def hold_in(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert a model's matrices to `dtype`, in place, and its norms and biases to float32.

    `model.to(dtype)` would also round the frequencies of rotary embeddings. In bfloat16 this would shift the
    positions of all tokens after the first few hundred.
    """
    for weight in model.parameters():
        weight.data = weight.data.to(held_dtype(weight, dtype))


def held_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Copy a model without gradients: matrices in `dtype`, norms and biases in float32, buffers unchanged.

    Weights are converted one by one, so that no float32 copy of the whole model is needed.
    """
    converted = {}
    for weight in model.parameters():
        held = weight.detach().to(held_dtype(weight, dtype), copy=True)
        converted[id(weight)] = nn.Parameter(held, requires_grad=False)
    # The memo of deepcopy: it inserts the converted weights, and keeps tied weights tied.
    return copy.deepcopy(model, converted)


def copy_to_serve(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Copy a model, and adapters if it has any, for a local engine; the copy computes float32 logits."""
    served = held_copy(model, dtype)
    served.set_attn_implementation(own_attention(model))
    if dtype != torch.float32:
        served.lm_head = Float32Head(served.lm_head.weight, served.lm_head.bias)
    served.eval()  # type: ignore[no-untyped-call]
    return served


def folder_to_serve(model: PreTrainedModel, folder: Path, placement: Placement) -> PreTrainedModel:
    """Convert `model`, the float32 model of `folder`, for an engine on the placement.

    The caller must not use `model` afterwards. If adapters are merged into the weights, and the placement
    computes in low precision, they are separated. Rounding the merged weights could lose the adapters.
    """
    if placement.low is not None and (folder / FOLDER).is_dir():
        from trainer_backend.learner.adapter import unmerge  # peft: half a second of a start

        unmerge(model, folder / FOLDER)
    served = copy_to_serve(model, placement.held)
    served.to(placement.device)  # type: ignore[arg-type]
    return served


def new_weights(folder: Path, placement: Placement) -> WeightSource:
    """Return the weights that a served model loads in order to become the model in `folder`.

    A model with separate adapters loads only the adapters in the folder; any other model loads the folder.
    """
    has_adapters = placement.low is not None and (folder / FOLDER).is_dir()
    return read_adapter(folder / FOLDER) if has_adapters else folder


class Float32Head(nn.Module):
    """LM head that multiplies inputs in low precision, but sums the products and adds the bias in float32.

    Rounding logits to bfloat16 would make the sampled distribution differ from the trained one. A logit of 20
    could change by 0.06 nats.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states [..., D] to logits [..., V]."""
        # Autocast would round the sums as well.
        with torch.autocast(hidden.device.type, enabled=False):
            logits = wide_product(hidden.flatten(0, -2).to(self.weight.dtype), self.weight.T)
            if self.bias is not None:
                logits = logits + self.bias.float()
        return logits.view(*hidden.shape[:-1], -1)
