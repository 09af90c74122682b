"""roots.py: a loss aggregation in which an answer of n tokens weighs sqrt(n); in `token_mean` it weighs n."""

import numpy as np

from trainer_backend.operator_plugins import aggregation


@aggregation("root_length")
def root_length(segments):
    lengths = [segment.spans["end"] - segment.spans["start"] for segment in segments]
    total = sum(np.sqrt(row).sum() for row in lengths)
    return [np.repeat(1 / (total * np.sqrt(row)), row) for row in lengths]
