"""roots.py: n tokens sampled in a row count as sqrt(n), between decision_mean and token_mean."""

import numpy as np

from trainer_backend.operator_plugins import aggregation


@aggregation("root_length")
def root_length(segments):
    lengths = [segment.spans["end"] - segment.spans["start"] for segment in segments]
    total = sum(np.sqrt(row).sum() for row in lengths)
    return [np.repeat(1 / (total * np.sqrt(row)), row) for row in lengths]
