"""Does a model learn to delete, and does that pay? A document in a window that is too small for it.

    python -m bench.study_statelm [--quick] [--seeds 0 1 2] [--arms editing no_editing] [--background]

The job is configs/documents_statelm.toml: a tiny model reads with tools and answers. `editing` may delete
from its context, `no_editing` may not; documents, window, seeds, passes and learning rates are equal. Each
arm is warmed up by the same teacher with the tools that the arm has, and then learns by RL. Told is the
success rate on held-out documents, before and after, with 95 % intervals over seeds.
What is done is skipped, what was interrupted is resumed. After each arm bench/results/statelm.json (curves,
settings, times, versions) and statelm.png are written anew.

Left out: a larger window for `no_editing`; how well it reads there is no question of this study.
"""

import sys

from bench.study_results import Arm, Study
from bench.study_runs import main

STUDY = Study(
    name="statelm",
    title="a model that edits its context against one that cannot, in one small window",
    against="no_editing",
    job="configs/documents_statelm.toml",
    settings=("training.keep_checkpoints=1", "evaluation.instances=128"),
    quick=(
        "training.iterations=2", "rollout.episodes_per_batch=8", "training.group_size=4",
        "rollout.max_turns=4", "evaluation.instances=8", "evaluation.every_n_iters=1",
        "warmup.episodes=24", "warmup.epochs=1",
    ),
    arms={
        "editing": Arm("may delete", ()),
        "no_editing": Arm(
            "may not",
            # With nothing on offer the job may not name what is offered, but for the default.
            ("multi_turn.statelm_enabled=false", 'multi_turn.context_tools=["deleteContext", "checkBudget"]'),
        ),
    },
    measure="outcome_reward",
    measured="success rate, held out",
    own_warm_starts=True,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(STUDY))
