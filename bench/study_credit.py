"""Which estimator of credit learns most from the same number of decisions? The demo's model in Crafter.

    python -m bench.study_credit [--quick] [--seeds 0 1 2] [--arms grpo stepwise …] [--background]

For each seed one warm start (the demo's), which all arms load; then RL with one estimator each:

    grpo      the outcome of the episode alone (mode off): the same advantage for all its decisions
    stepwise  a reward a decision; its return-to-go against those of its siblings at the same turn
    gigpo     the same rewards; whole episodes and decisions in equal states, half and half
    gae       the same rewards; what was earned against what a critic expected
    branch    the same rewards; some decisions measured by playing on from before them, the others as stepwise

Worlds, sampling seeds, passes and learning rates are equal, and so are the decisions that an iteration may
sample: `branch` plays fewer episodes, for what it plays on counts too. Two things are then not equal, and the
results, their picture and the table say both, as they were measured (in brackets: in the results that are
committed). It samples fewer decisions an iteration (2,700 instead of 2,950). And as nothing is trained on
what was played on, it trains on 20 x 50 decisions at most where they train on 64 x 50, so it takes a third of
their optimizer steps (3.7 an iteration instead of 11.5 to 11.7). So its gain does not say how good it is.

What is done is skipped, what was interrupted is resumed, arms may be run one by one. After each arm
bench/results/credit.json (curves with 95 % intervals, settings, times, versions) and credit.png are written
anew. An arm takes some 4 minutes a seed on two cores: that is why it is shorter than the demo.

Left out: tuning each arm for itself; all use what was found for `stepwise`.
"""

import sys

from bench.study_results import IN_GROUPS, Arm, Study
from bench.study_runs import main

UNEQUAL = (
    "branch samples fewer decisions and takes about a third of the optimizer steps an iteration, since "
    "nothing is trained on what was played on (summary: decisions_an_iteration, steps_an_iteration): its "
    "gain does not say how good it is"
)
BY_DECISION = ("training.step_rewards_enabled=true", "training.step_rewards_mode=decision_stepwise")

STUDY = Study(
    name="credit",
    title="estimators of credit on one warm start, equal budget of decisions",
    against="grpo",
    beside=lambda: {"not_equal": UNEQUAL},
    # 64 episodes of 50 decisions an iteration, as the demo; 15 iterations; evaluated at both ends.
    settings=(
        *IN_GROUPS,
        "training.keep_checkpoints=1",
        "training.iterations=15",
        "evaluation.every_n_iters=15",
    ),
    arms={
        "grpo": Arm(
            "grpo, outcome alone",
            (
                "training.step_rewards_enabled=false",
                "training.step_rewards_mode=off",
                "algorithm.advantage=grpo",
            ),
        ),
        "stepwise": Arm("stepwise", (*BY_DECISION, "algorithm.advantage=stepwise")),
        "gigpo": Arm("gigpo", (*BY_DECISION, "algorithm.advantage=gigpo")),
        "gae": Arm("gae", (*BY_DECISION, "algorithm.advantage=gae")),
        "branch": Arm(
            "branch",
            (
                *BY_DECISION,
                "algorithm.advantage=branch",
                "algorithm.branches_per_episode=2",
                "algorithm.branch_rollouts=2",
                # From a decision in the middle half an episode is left: 2 * 2 of them cost two episodes more,
                # so a third of 64, in whole groups.
                "rollout.episodes_per_batch=20",
            ),
        ),
    },
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
