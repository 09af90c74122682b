"""Do starts at the frontier solve what starts at the beginning do not? A corridor of 30 decisions.

    python -m bench.study_starts [--quick] [--seeds 0 1 2 3 4] [--arms plain frontier] [--background]

The job is bench/corridor.toml, in the environment of tests/corridor.py: one of two ways is right in each
cell, and the other ends the game. Key, door and treasure earn 1 each. For each seed one warm start
by random calls; then RL, with as many games an iteration:

    plain      every game starts at the beginning
    frontier   three of four groups start where the set of achievements is rare among what was reached
    uncertain  … from where some starts gained something, and some did not
    late       … every turn alike

Told is what the held-out games achieve of the three, from the beginning and with the most probable calls.
"""

import sys

from bench.study_results import Arm, Study
from bench.study_runs import main

_SHARE = "curriculum.share=0.75"
STUDY = Study(
    name="starts",
    title="starts at snapshots of the run against starts at the beginning, in a corridor of 30 decisions",
    against="plain",
    job="bench/corridor.toml",
    settings=("training.keep_checkpoints=1",),
    quick=(
        "training.iterations=2", "rollout.episodes_per_batch=16", "evaluation.every_n_iters=1",
        "warmup.episodes=48", "warmup.epochs=2",
    ),
    arms={
        "plain": Arm("starts at the beginning", ()),
        "frontier": Arm("starts at the frontier", (_SHARE, "curriculum.rule=frontier")),
        "uncertain": Arm("uncertain starts", (_SHARE, "curriculum.rule=uncertain")),
        "late": Arm("starts at every turn", (_SHARE, "curriculum.rule=late")),
    },
    measure="unique_achievements",
    measured="of key, door and treasure, held out",
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(STUDY))
