"""Is collecting ahead faster on a CPU, and does it learn as well? The demo's job in three ways.

    python -m bench.study_ahead [--quick] [--seeds 0 1 2] [--arms …] [--background]

For each seed one warm start, which all arms load: the stages take turns in one process, as in `make demo`, or
overlap in one process (`training.max_staleness = 1`), or overlap with learner and gateway in processes
of their own (`[cluster]`). Worlds, seeds, episodes and passes are equal. `iteration_s` is the median of the
seconds between the ends of two iterations with no evaluation between them. bench/results/ahead.json and
ahead.png are written anew after each arm.
"""

import sys

from bench.study_results import IN_GROUPS, Arm, Study
from bench.study_runs import main

STUDY = Study(
    name="ahead",
    title="collecting ahead, and learner and gateway in processes, against taking turns in one",
    against="turns",
    settings=(
        *IN_GROUPS,
        "algorithm.advantage=stepwise",
        "training.keep_checkpoints=1",
        "training.iterations=24",
        "evaluation.every_n_iters=12",
    ),
    arms={
        "turns": Arm("one process, taking turns", ()),
        "ahead": Arm("one process, one iteration ahead", ("training.max_staleness=1",)),
        "processes": Arm(  # two threads each on two cores would wait for each other
            "in processes, one iteration ahead",
            (
                "training.max_staleness=1",
                "cluster.launcher=local",
                "training.threads=1",
                "inference.threads=1",
            ),
        ),
    },
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
