"""Do turn scores teach a dialogue more than its outcome alone? Short sums, answered in up to three turns.

    python -m bench.study_dialogue [--quick] [--seeds 0 1 2] [--arms outcome turn_scores] [--background]

The job is configs/gsm8k_interaction.toml: a tiny model answers, an interaction scores every answer. For each
seed one warm start, which all arms load; then RL:

    outcome           the score of the last answer, the same advantage for all of a dialogue (mode off, grpo)
    outcome_stepwise  the same score, its return-to-go against those of siblings at the same turn (mode off)
    turn_scores       the score of each answer, credited as in outcome_stepwise (mode env_sparse)

The first two differ in the estimator, the last two in the rewards alone. Sums, sampling seeds, passes and
learning rates are equal. Told is the share of held-out sums that were answered right in the end, before and
after, with 95 % intervals; the JSON also has the rate by turn of the last iteration. What is done is skipped,
what was interrupted is resumed. After each arm bench/results/dialogue.json (curves, settings, times,
versions) and dialogue.png are written anew.
"""

import sys

from bench.study_results import Arm, Study
from bench.study_runs import main

STUDY = Study(
    name="dialogue",
    title="turn scores against the outcome alone, on short sums in dialogue",
    against="outcome",
    job="configs/gsm8k_interaction.toml",
    settings=("training.keep_checkpoints=1",),
    quick=(
        "training.iterations=2", "rollout.episodes_per_batch=16", "evaluation.instances=8",
        "evaluation.every_n_iters=1", "warmup.episodes=48", "warmup.epochs=2",
    ),
    arms={
        "outcome": Arm(
            "the outcome alone, grpo",
            (
                "training.step_rewards_enabled=false",
                "training.step_rewards_mode=off",
                "algorithm.advantage=grpo",
            ),
        ),
        "outcome_stepwise": Arm(
            "the outcome alone, stepwise",
            ("training.step_rewards_enabled=false", "training.step_rewards_mode=off"),
        ),
        "turn_scores": Arm("turn scores, stepwise", ()),
    },
    measure="outcome_reward",
    measured="sums answered right, held out",
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(STUDY))
