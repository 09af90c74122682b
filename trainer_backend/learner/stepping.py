"""What differs between scoring and stepping: layers' checkpoints, adapters' dropout, memory running out."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from trainer_backend.errors import ModelFolderError, OutOfMemory
from trainer_backend.inference.memory import is_out_of_memory
from trainer_backend.learner.lora import adapter_dropouts


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Layers keep their input alone while `stepping`, and compute the rest again in the backward pass.

    Raises:
        ModelFolderError: the architecture has no such layers.
    """
    if not model.supports_gradient_checkpointing:
        raise ModelFolderError(
            f"{type(model).__name__} cannot checkpoint its layers",
            where="training.gradient_checkpointing",
            hint="Leave it false and lower training.micro_batch_tokens.",
        )
    with warnings.catch_warnings():
        # Renamed in some release of transformers 5; the old name works in all of them.
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(  # type: ignore[no-untyped-call]
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    # Only the reentrant kind needs it, and it would follow the model into its copies.
    model.disable_input_require_grads()  # type: ignore[no-untyped-call]


@contextmanager
def stepping(model: PreTrainedModel) -> Iterator[None]:
    """Checkpointing and the adapters' dropout are on in here.

    Dropout of the model's own stays off, as it is while it is scored and sampled from: otherwise the ratio of
    a first step would not be 1.
    """
    layers = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    switched = [*layers, *adapter_dropouts(model)]
    for module in switched:
        module.training = True  # of the module alone: train() would reach into it
    try:
        yield
    finally:
        for module in switched:
            module.training = False


@contextmanager
def memory_watched(doing: str, *, hint: str) -> Iterator[None]:
    """Turn running out of memory in here into an error; `hint` names what to lower.

    Raises:
        OutOfMemory: instead of torch's error.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        asked = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
        more = f" when it asked for {asked[1]} more" if asked else ""
        # Its frames hold the activations, and whoever saves the run now needs their memory.
        error.__traceback__ = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        raise OutOfMemory(f"{doing}{more}.", where="[training]", hint=hint) from error
