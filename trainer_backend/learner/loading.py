"""The model folder of a job, or a checkpoint of its run, checked for what it is going to be used for."""

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from trainer_backend.core.presets import PRESETS
from trainer_backend.errors import CheckpointError, ModelFolderError
from trainer_backend.inference.chat_check import refuse_without_tools
from trainer_backend.jobfile.model_table import ModelTable
from trainer_backend.models.folder import load_model_folder
from trainer_backend.models.layout import described, read_config
from trainer_backend.models.sources import model_folder, remember_chat_settings


def load_named(table: ModelTable) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """What model.path or model.name names, weights in fp32.

    Raises:
        ModelFolderError: it is not there, is no model to train, or cannot hold a conversation with tools.
    """
    return _checked(model_folder(table), table)


def load_checkpoint(table: ModelTable, checkpoint: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """The model of a checkpoint.

    Raises:
        CheckpointError: it is of another architecture or size than the model that the job names.
        ModelFolderError: as `load_named`.
    """
    expected = _described(table)
    found = described(read_config(checkpoint))
    if expected is not None and expected != found:
        raise CheckpointError(
            f"{checkpoint} holds {found}, but the job's model is {expected}",
            hint="It is of another run, or [model] of the job was changed.",
        )
    return _checked(checkpoint, table)


def _checked(folder: Path, table: ModelTable) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    model, tokenizer = load_model_folder(folder)
    remember_chat_settings(tokenizer, table)
    refuse_without_tools(tokenizer)
    return model, tokenizer


def _described(table: ModelTable) -> str | None:
    """The job's model; None where what it began from is gone, which a run with checkpoints outlives."""
    if table.preset is not None:
        preset = PRESETS[table.preset]
        return described(
            {
                "model_type": "qwen3",
                "num_hidden_layers": preset.layers,
                "hidden_size": preset.width,
            }
        )
    try:
        return described(read_config(model_folder(table, cached_only=True)))
    except ModelFolderError:
        return None
