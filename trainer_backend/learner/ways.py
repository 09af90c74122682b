"""Describes in words which code computes a model in the learner and in the local engine."""

from typing import NamedTuple

from transformers import PreTrainedModel

from trainer_backend.inference.decoder import unsupported_because
from trainer_backend.learner.packed_decoder import is_known
from trainer_backend.models.kinds import STATES, layer_kinds, why_not_by_position


class Ways(NamedTuple):
    """Words that describe how a model is computed, for docs/models.md and `turnwise check`."""

    updates: str
    rows: str
    """What one row of a micro-batch contains in an update: several packed segments or a single one."""
    engine: str
    goes_on_from: str
    """At which tokens the engine can continue a prompt whose beginning is in its cache."""

    def __str__(self) -> str:
        return (
            f"updates by {self.updates}, {self.rows}; the local engine by {self.engine}, which continues a "
            f"prompt from {self.goes_on_from}"
        )


def describe_ways(model: PreTrainedModel, *, longest: int) -> Ways:
    """Describe how a model is computed for sequences of up to `longest` tokens.

    The model may be on the meta device, because its weights are not read.
    """
    by_position = why_not_by_position(model, longest=longest) is None
    has_states = bool(STATES & set(layer_kinds(model.config.get_text_config())))
    has_decoder = by_position and unsupported_because(model) is None
    cache = "keys and values by position" if by_position else "a cache by layer"
    return Ways(
        updates="own layers" if by_position and is_known(model) else "transformers",
        rows="packed, shared beginnings once" if by_position else "a segment a row",
        engine="own decoder" if has_decoder else f"transformers, {cache}",
        goes_on_from="a kept state" if has_states else "any part",
    )
