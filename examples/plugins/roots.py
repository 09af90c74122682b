"""roots.py: n tokens sampled in a row weigh sqrt(n), between `decision_mean` (1) and `token_mean` (n)."""

import numpy as np

from trainer_backend.operator_plugins import aggregation


@aggregation("root_length")
def root_length(segments):
    lengths = [segment.spans["end"] - segment.spans["start"] for segment in segments]
    total = sum(np.sqrt(row).sum() for row in lengths)
    return [np.repeat(1 / (total * np.sqrt(row)), row) for row in lengths]
