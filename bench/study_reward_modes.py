"""Does rewarding each decision help? The demo's job with decision rewards, and with the outcome alone.

    python -m bench.study_reward_modes [--quick] [--seeds 0 1 2] [--arms …] [--background]

For each seed one warm start, which both arms load: `decision_stepwise` with `stepwise` advantages, and mode
`off` with `grpo` (whole trajectories). Worlds, sampling seeds, episodes, passes and learning rates are equal.
What is done is skipped, what was interrupted is resumed. After each arm bench/results/reward_modes.json
(curves with 95 % intervals, settings, times, versions) and reward_modes.png are written anew.

Left out: tuning each arm for itself; both use what was found for decision rewards.
"""

import sys

from bench.study_results import IN_GROUPS, Arm, Study
from bench.study_runs import main

STUDY = Study(
    name="reward_modes",
    title="decision rewards against the outcome alone, equal budget",
    against="off",
    settings=(
        *IN_GROUPS,
        "training.iterations=40",
        "evaluation.every_n_iters=20",
        "training.keep_checkpoints=1",
    ),
    arms={
        "decision_stepwise": Arm(
            "a reward a decision",
            (
                "training.step_rewards_enabled=true",
                "training.step_rewards_mode=decision_stepwise",
                "algorithm.advantage=stepwise",
            ),
        ),
        "off": Arm(
            "outcome alone",
            (
                "training.step_rewards_enabled=false",
                "training.step_rewards_mode=off",
                "algorithm.advantage=grpo",
            ),
        ),
    },
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
