"""The parts of an optimizer step: its segments, layer checkpoints, adapters' dropout, and lack of memory."""

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

# What transformers calls the switch of a module that checkpoints itself.
_SWITCH = "gradient_checkpointing"
_LEAVE = "Lower training.micro_batch_tokens to need less."


def checkpoint_layers(model: PreTrainedModel, layers: bool | int = True) -> None:
    """Layers keep their input alone while `stepping`, and compute the rest again in the backward pass.

    `layers` is `training.gradient_checkpointing`: all, none, or so many from the first. The last ones have
    their backward pass first, so what they keep is gone before a layer is computed again.

    Raises:
        ModelFolderError: this architecture cannot checkpoint its layers, or not some of them.
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
        # Renamed in some release of transformers 5; the old name works in all of them.
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(  # type: ignore[no-untyped-call]
            gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": again}
        )
    # Only the reentrant kind needs it, and it would follow the model into its copies.
    model.disable_input_require_grads()  # type: ignore[no-untyped-call]
    _keep_whole(model, decoder[count:])


def _keep_whole(model: PreTrainedModel, layers: Sequence[nn.Module]) -> None:
    """Take checkpointing back from some layers; a model that checkpoints outside of them is refused."""
    for layer in layers:
        switches = [module for module in layer.modules() if hasattr(module, _SWITCH)]
        if not switches:
            raise ModelFolderError(
                f"{type(model).__name__} cannot checkpoint some of its layers, but all",
                where="training.gradient_checkpointing",
                hint=f"Set it to true or false. {_LEAVE}",
            )
        for module in switches:
            setattr(module, _SWITCH, False)


@contextmanager
def stepping(model: PreTrainedModel) -> Iterator[None]:
    """Checkpointing and the adapters' dropout are on in here.

    Dropout of the model's own stays off, as it is while it is scored and sampled from: otherwise the ratio of
    a first step would not be 1.
    """
    layers = [module for module in model.modules() if getattr(module, _SWITCH, False)]
    dropouts = (dropout for _, layer in lora_layers(model) for dropout in layer.lora_dropout.values())
    switched = [*layers, *dropouts]
    for module in switched:
        module.training = True  # of the module alone: train() would reach into it
    try:
        yield
    finally:
        for module in switched:
            module.training = False


@contextmanager
def memory_watched(doing: str, *, hint: str) -> Iterator[None]:
    """Turn running out of memory in here into OutOfMemory; `hint` names what to lower."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        request = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
        more = f" when it asked for {request[1]} more" if request else ""
        # Its frames hold the activations, and saving the run needs their memory.
        error.__traceback__ = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        raise OutOfMemory(f"{doing}{more}.", where="[training]", hint=hint) from error


@dataclass(frozen=True, slots=True)
class Scored:
    """A segment with the scores of its N sampled tokens before the first step (stop 8).

    proximal: [N] the learner's own log-probs (nats); empty until it is scored.
    behaviour: [N] weights towards the policy that sampled them (core.behaviour), in [0, cap]; likewise.
    policy: the policy that sampled them.
    share: [N] the share of each token in the whole iteration, where the aggregation is over that.
    reference: [N] log-probs (nats) of the policy that a KL term pulls towards; None without such a term.
    """

    segment: Segment
    proximal: Row = ()
    behaviour: Row = ()
    policy: str = ACTOR
    share: Row = ()
    reference: Row | None = None


def together(scored: Sequence[Scored], levels: Mapping[str, RatioLevel]) -> list[list[Scored]]:
    """The units that a step may not split: episodes whose tokens share a ratio or weight, else segments."""
    if "episode" not in levels.values():
        return [[item] for item in scored]
    units: dict[object, list[Scored]] = {}
    for number, item in enumerate(scored):
        whole = levels[item.policy] == "episode"
        units.setdefault(item.segment.rollout_id if whole else number, []).append(item)
    return list(units.values())


def in_steps(order: Sequence[Sequence[Scored]], batch_decisions: int) -> Iterator[list[Scored]]:
    """Cut into steps of about `batch_decisions` decisions, as equal as what stays together allows.

    A step of a few left-over decisions would move the weights as far as a full one: so no left-overs.
    """
    decisions = [sum(len(np.unique(item.segment.spans["decision"])) for item in items) for items in order]
    left = sum(decisions)
    steps = max(1, round(left / batch_decisions))
    step: list[Scored] = []
    done = 0
    for items, number in zip(order, decisions, strict=True):
        step.extend(items)
        done += number
        # The share is that of what is left: a unit larger than a step takes nothing from the later ones.
        if done and steps > 1 and done * steps >= left:
            yield step
            left, steps = left - done, steps - 1
            step, done = [], 0
    if step:
        yield step
