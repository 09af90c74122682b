"""Parts of an optimizer step: choice of segments, gradient checkpointing, dropout, out-of-memory errors."""

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from trainer_backend.core.columns import Row
from trainer_backend.core.losses import RatioLevel
from trainer_backend.core.policies import ACTOR
from trainer_backend.core.segments import Segment
from trainer_backend.errors import ModelFolderError, OutOfMemory
from trainer_backend.learner.lora import lora_layers
from trainer_backend.learner.shapes import count_checkpointed
from trainer_backend.models.folder import is_out_of_memory
from trainer_backend.models.routers import again
from trainer_backend.models.text_part import decoder_layers

# Attribute by which transformers turns checkpointing of a module on.
_SWITCH = "gradient_checkpointing"
_LEAVE = "Lower training.micro_batch_tokens to need less."


def checkpoint_layers(model: PreTrainedModel, layers: bool | int = True) -> None:
    """Turn gradient checkpointing on: inside `stepping`, these layers save only their inputs.

    `layers` is the key `training.gradient_checkpointing`: all layers, none, or the number of layers, counted
    from the first. The last layers need checkpointing least, because their backward pass comes first and
    frees their saved tensors before any layer is recomputed.

    Raises:
        ModelFolderError: this architecture cannot checkpoint its layers, or cannot checkpoint only some.
        JobError: the model has fewer layers.
    """
    decoder = list(decoder_layers(model))
    count = count_checkpointed(layers, len(decoder))
    if not count:
        return
    if not model.supports_gradient_checkpointing:
        raise ModelFolderError(
            f"{type(model).__name__} cannot checkpoint its layers",
            where="training.gradient_checkpointing",
            hint=f"Leave it false. {_LEAVE}",
        )
    with warnings.catch_warnings():
        # A release of transformers 5 renamed this method; the old name works in all releases.
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(  # type: ignore[no-untyped-call]
            gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": again}
        )
    # Only reentrant checkpointing needs these hooks, and they would be copied with the model.
    model.disable_input_require_grads()  # type: ignore[no-untyped-call]
    _keep_whole(model, decoder[count:])


def _keep_whole(model: PreTrainedModel, layers: Sequence[nn.Module]) -> None:
    """Turn checkpointing off for these layers; raise ModelFolderError if a layer has no switch for it."""
    for layer in layers:
        switches = [module for module in layer.modules() if hasattr(module, _SWITCH)]
        if not switches:
            raise ModelFolderError(
                f"{type(model).__name__} can only checkpoint all of its layers",
                where="training.gradient_checkpointing",
                hint=f"Set it to true or false. {_LEAVE}",
            )
        for module in switches:
            setattr(module, _SWITCH, False)


@contextmanager
def stepping(model: PreTrainedModel) -> Iterator[None]:
    """Turn gradient checkpointing and the adapters' dropout on inside the context.

    The model's own dropout stays off, as in scoring and sampling, because otherwise the probability ratio in
    the first step would not be 1.
    """
    layers = [module for module in model.modules() if getattr(module, _SWITCH, False)]
    dropouts = (dropout for _, layer in lora_layers(model) for dropout in layer.lora_dropout.values())
    switched = [*layers, *dropouts]
    for module in switched:
        module.training = True  # not train(), which would include submodules
    try:
        yield
    finally:
        for module in switched:
            module.training = False


@contextmanager
def memory_watched(doing: str, *, hint: str) -> Iterator[None]:
    """Convert out-of-memory errors inside the context to OutOfMemory.

    `doing` begins the error message; `hint` names the keys of the job to lower.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        request = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
        more = f" when it asked for {request[1]} more" if request else ""
        # The frames of the traceback hold activations, but saving the run needs their memory.
        error.__traceback__ = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        raise OutOfMemory(f"{doing}{more}.", where="[training]", hint=hint) from error


@dataclass(frozen=True, slots=True)
class Scored:
    """A segment with the scores of its N sampled tokens before the first step (stop 8 of docs/route.md)."""

    segment: Segment
    proximal: Row = ()
    """[N] the learner's own log-probs (nats); empty before scoring."""
    behaviour: Row = ()
    """[N] behaviour weights (core.behaviour), in [0, cap]; empty before scoring."""
    policy: str = ACTOR
    """Name of the policy that sampled the segment."""
    share: Row = ()
    """[N] weights of the tokens in the iteration's loss; empty unless the aggregation spans an iteration."""
    reference: Row | None = None
    """[N] log-probs (nats) under the reference policy of the KL term; None without this term."""


def together(scored: Sequence[Scored], levels: Mapping[str, RatioLevel]) -> list[list[Scored]]:
    """Group segments that must be in the same step: all of an episode if its tokens share a ratio or weight.

    `levels` maps each policy to the level of its ratio or weight. Every other segment is a group of its own.
    """
    if "episode" not in levels.values():
        return [[item] for item in scored]
    units: dict[object, list[Scored]] = {}
    for number, item in enumerate(scored):
        whole = levels[item.policy] == "episode"
        units.setdefault(item.segment.rollout_id if whole else number, []).append(item)
    return list(units.values())


def in_steps(order: Sequence[Sequence[Scored]], batch_decisions: int) -> Iterator[list[Scored]]:
    """Yield steps of about `batch_decisions` decisions, as equal in size as the groups of `order` allow.

    Sizes are equal because a much smaller last step would move the weights as far as a full step.
    """
    decisions = [sum(len(np.unique(item.segment.spans["decision"])) for item in items) for items in order]
    left = sum(decisions)
    steps = max(1, round(left / batch_decisions))
    step: list[Scored] = []
    done = 0
    for items, number in zip(order, decisions, strict=True):
        step.extend(items)
        done += number
        # Divide the remaining decisions, so that a step with a large group does not affect later steps.
        if done and steps > 1 and done * steps >= left:
            yield step
            left, steps = left - done, steps - 1
            step, done = [], 0
    if step:
        yield step
