"""Low-rank adapters by `peft`: the [lora] table.

    y = x W^T + (alpha / rank) * x A^T B^T        A [rank, in], B [out, rank]; B is 0 at first

Only A and B are trained, in float32. The base W stays as it is, so with the adapters off the model is the one
that RL started from: the KL term needs no second copy. What leaves the learner (published weights, the model
folder of a checkpoint) is W + (alpha / rank) * B A, computed beside the learner's own tensors.

Source: Hu et al., LoRA, arXiv:2106.09685.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainer_backend.errors import CheckpointError, JobError
from trainer_backend.job_training import LoraTable

FOLDER = "adapter"
_NAME = "default"  # peft's, for a model's only adapter


class Adapter:
    """The adapters of a model, which peft puts into it in place; `model` keeps its class and its methods."""

    def __init__(self, wrapped: PeftModel) -> None:
        wrapped.eval()  # what peft adds begins in training mode
        self._wrapped = wrapped
        self._model: Any = wrapped.base_model.model

    @classmethod
    def fresh(cls, model: PreTrainedModel, table: LoraTable, *, seed: int) -> "Adapter":
        """Adapters that change nothing yet; torch's global generator is left as it was.

        Raises:
            JobError: lora.target_modules names nothing in the model, or its embedding or head.
        """
        _refuse_ends(model, table.target_modules)
        whole = table.target_modules == ("all-linear",)
        config = LoraConfig(
            r=table.rank,
            lora_alpha=table.alpha,
            lora_dropout=table.dropout,
            target_modules="all-linear" if whole else list(table.target_modules),
            task_type="CAUSAL_LM",
        )
        try:
            with torch.random.fork_rng(devices=[]), _of_a_newer_transformers():
                torch.manual_seed(seed)
                wrapped = get_peft_model(model, config)
        except ValueError as error:
            raise JobError(f"lora.target_modules: {error}") from error
        return cls(wrapped)

    @classmethod
    def stored(cls, model: PreTrainedModel, folder: Path) -> "Adapter":
        """The adapters that `save` wrote, to be trained on.

        Raises:
            CheckpointError: none there, or they are of another model.
        """
        if not (folder / "adapter_config.json").is_file():
            raise CheckpointError(
                f"{folder}: no adapter in this checkpoint, but the job has [lora]",
                hint="A run goes on with the tables that it was started with.",
            )
        try:
            with _of_a_newer_transformers():
                return cls(PeftModel.from_pretrained(model, str(folder), is_trainable=True))
        except Exception as error:  # safetensors and torch raise types of their own
            raise CheckpointError(f"{folder}: the adapter cannot be loaded: {error}") from error

    def off(self) -> AbstractContextManager[None]:
        """In here the model is its base."""
        switched: AbstractContextManager[None] = self._wrapped.disable_adapter()
        return switched

    def save(self, folder: Path) -> None:
        """adapter_model.safetensors and adapter_config.json, as peft lays them out."""
        # "auto" would ask the hub whether the base's embedding was changed.
        self._wrapped.save_pretrained(str(folder), save_embedding_layers=False)

    @torch.no_grad()
    def merged(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The weights of the plain model that computes the same; the learner's own stay as they are."""
        deltas = {f"{name}.base_layer.weight": layer for name, layer in _layers(self._model)}
        merged = {}
        for name, tensor in self._model.state_dict().items():
            if name in deltas:
                # Added in float32, rounded once.
                tensor = tensor.float() + _delta(deltas[name])
            if ".lora_" not in name:
                merged[name.replace(".base_layer.", ".")] = tensor.to(dtype)
        return merged

    @torch.no_grad()
    def fold(self) -> None:
        """Make what the adapters have learned part of the base, and begin them anew at no change.

        After the warm-up: what RL starts from, and the KL term pulls towards, is the warmed-up policy.
        """
        for _, layer in _layers(self._model):
            base: Tensor = layer.get_base_layer().weight
            base.copy_(base.float() + _delta(layer))
            layer.lora_B[_NAME].weight.zero_()


def without_adapters(model: PreTrainedModel) -> PreTrainedModel:
    """Put every adapted layer's base back in its place; for a copy that will be given merged weights."""
    for name, layer in list(_layers(model)):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer.get_base_layer())
    return model


def adapter_dropouts(model: PreTrainedModel) -> list[nn.Module]:
    """The dropout modules of the adapters; none where there are no adapters."""
    return [dropout for _, layer in _layers(model) for dropout in layer.lora_dropout.values()]


def _delta(layer: Any) -> Tensor:
    """(alpha / rank) * B A, in float32."""
    delta: Tensor = layer.get_delta_weight(_NAME)
    return delta


def _layers(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))


def _refuse_ends(model: PreTrainedModel, targets: Sequence[str]) -> None:
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    ends = {id(model.get_input_embeddings()): "the embedding", id(head): "the head"}
    for name, module in model.named_modules():
        if id(module) in ends and name.rpartition(".")[2] in {
            target.rpartition(".")[2] for target in targets
        }:
            raise JobError(
                f"lora.target_modules takes in {ends[id(module)]} ({name}), which may be one matrix with the "
                "model's other end, and which scoring reads directly; leave it out"
            )


@contextmanager
def _of_a_newer_transformers() -> Iterator[None]:
    """peft asks by a name that transformers 5 still has, and warns whoever reads the run's output."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
