"""Studies of learning: a table of jobs and arms, each with several seeds.

    python -m bench.studies NAME [--quick] [--seeds 0 1 2] [--arms …]

Without a NAME the command lists the studies. For each seed, all arms start from one checkpoint, unless the
study compares warm-ups or runs whole jobs. Worlds, sampling seeds, passes and rates are equal, unless an arm
changes them; no arm is tuned on its own. Finished runs are skipped, and interrupted runs are resumed. After
each arm, bench/results/NAME.json (curves with 95 % intervals, settings, times, versions) and NAME.png are
written again. The JSON file keeps the seeds that other machines ran with the same settings.
"""

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.kit import ROOT
from bench.study_results import IN_GROUPS, Arm, Study
from bench.study_runs import finished, main, warm_start_job
from trainer_backend.job.load import load_job

OFF = ("training.step_rewards_enabled=false", "training.step_rewards_mode=off")
BY_DECISION = ("training.step_rewards_enabled=true", "training.step_rewards_mode=decision_stepwise")

# Short games of configs/crafter_cpu.toml. Collecting and learning take turns, or overlap one iteration ahead.
AHEAD = Study(
    name="ahead",
    title="collecting ahead, and learner and gateway in processes, against taking turns in one",
    against="turns",
    settings=(
        *IN_GROUPS, "algorithm.advantage=stepwise", "training.keep_checkpoints=1", "training.iterations=24",
        "evaluation.every_n_iters=12",
    ),
    arms={
        "turns": Arm("one process, taking turns", ()),
        "ahead": Arm("one process, one iteration ahead", ("training.max_staleness=1",)),
        "processes": Arm(  # on two cores, two threads of each process would wait for each other
            "in processes, one iteration ahead",
            (
                "training.max_staleness=1", "cluster.launcher=local", "training.threads=1",
                "inference.threads=1",
            ),
        ),
    },
)  # fmt: skip

# Short sums, answered in up to three turns. The first two arms differ in the estimator, the last two in the
# rewards alone.
DIALOGUE = Study(
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
        "outcome": Arm("the outcome alone, grpo", (*OFF, "algorithm.advantage=grpo")),
        "outcome_stepwise": Arm("the outcome alone, stepwise", OFF),
        "turn_scores": Arm("turn scores, stepwise", ()),
    },
    measure="outcome_reward",
    measured="sums answered right, held out",
)  # fmt: skip

REWARD_MODES = Study(
    name="reward_modes",
    title="decision rewards against the outcome alone, equal budget",
    against="off",
    settings=(
        *IN_GROUPS, "training.iterations=40", "evaluation.every_n_iters=20", "training.keep_checkpoints=1",
    ),
    arms={
        "decision_stepwise": Arm("a reward a decision", (*BY_DECISION, "algorithm.advantage=stepwise")),
        "off": Arm("outcome alone", (*OFF, "algorithm.advantage=grpo")),
    },
)  # fmt: skip

# Each arm has its own warm-up: the same teacher plays with the tools that the arm has.
STATELM = Study(
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
            # A job without editing may list no context tools but the default ones.
            ("multi_turn.statelm_enabled=false", 'multi_turn.context_tools=["deleteContext", "checkBudget"]'),
        ),
    },
    measure="outcome_reward",
    measured="success rate, held out",
    own_warm_starts=True,
)  # fmt: skip


def fixed_policies(study: Study, folder: Path, settings: Sequence[str]) -> Mapping[str, str]:
    """Return the folders of the models {good} and {bad} of the settings; make those that do not exist.

    `good` imitates the scripted teacher on eight times as many episodes as the actor's warm-up; all seeds
    share it. `bad` has random weights, and never writes a call that can be parsed.
    """
    own = [setting for setting in settings if "{" not in setting]
    episodes = load_job(ROOT / study.job, own).config.warmup
    assert episodes is not None, "the job has a warm-up"
    job = warm_start_job(study, (*own, f"warmup.episodes={8 * episodes.episodes}"))
    alone = job.model_copy(update={"rollout_only": (), "rollout_allocation_schedule": None})
    good = finished(folder / "good", alone).checkpoints / "iteration_0"
    return {"good": str(good), "bad": str(_random_twin(good, folder / "bad"))}


def _random_twin(model: Path, folder: Path) -> Path:
    """Return the folder of an untrained model with the size and the tokenizer of `model`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if folder.exists():
        return folder
    aside = folder.with_suffix(".tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for file in (*model.glob("tokenizer*"), model / "generation_config.json"):
        shutil.copy(file, aside / file.name)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(aside)
    return aside.rename(folder)


# alpha, the probability that the actor plays a rollout, rises to 1 by the middle of the run in both mixtures;
# `alone` is the same job with alpha = 1.
_ALONE = (
    "rollout_only.model_path={good}", "rollout_allocation_schedule.alpha_0=1",
    "rollout_allocation_schedule.beta=0",
)  # fmt: skip
_MIXED = ("rollout_allocation_schedule.alpha_0=0.2", "rollout_allocation_schedule.beta=0.05")
MIXTURE = Study(
    name="mixture",
    title="the actor alone, with a good fixed policy, with a bad one",
    against="alone",
    job="configs/crafter_mixture.toml",
    settings=("training.keep_checkpoints=1", *_ALONE),
    quick=(
        "training.iterations=2", "rollout.episodes_per_batch=8", "rollout.max_turns=5",
        "evaluation.instances=4", "evaluation.every_n_iters=1", "warmup.episodes=5", "warmup.epochs=1",
        *_ALONE,
    ),
    arms={
        "alone": Arm("alone", ()),
        "good": Arm("with a good one", _MIXED),
        "bad": Arm("with a bad one", (*_MIXED, "rollout_only.model_path={bad}")),
    },
    models=fixed_policies,
)  # fmt: skip

# Which estimator learns most from the same number of decisions and optimizer steps? Decisions of branches
# count too, so `branch` plays fewer episodes: a branch from the middle of an episode has half its length, so
# 2 * 2 branches cost as much as two episodes. That leaves a third of 64 episodes, in whole groups. Where
# branches are not trained, or the critic learns alone for two iterations, equal steps need smaller batches.
_CRITIC = ("training.critic=own", "training.critic_warmup=2", "training.batch_decisions=222")
_BRANCH = (
    *BY_DECISION, "algorithm.advantage=branch", "algorithm.branches_per_episode=2",
    "algorithm.branch_rollouts=2", "rollout.episodes_per_batch=20",
)  # fmt: skip
_ESTIMATORS = (
    "stepwise", "gigpo", "gigpo_additive", "gigpo_soft", "g2po", "gagpo", "graphgpo",
    "rloo", "grpo_no_std", "reinforce_pp", "reinforce_pp_baseline",
)  # fmt: skip
CREDIT = Study(
    name="credit",
    title="estimators of credit on one warm start, equal decisions and optimizer steps",
    against="grpo",
    # As in the job, 64 episodes of 50 decisions an iteration. There are 15 iterations, and two evaluations.
    settings=(
        *IN_GROUPS, "training.keep_checkpoints=1", "training.iterations=15", "evaluation.every_n_iters=15",
    ),
    arms={
        "grpo": Arm("grpo, outcome alone", (*OFF, "algorithm.advantage=grpo")),
        **{name: Arm(name, (*BY_DECISION, f"algorithm.advantage={name}")) for name in _ESTIMATORS},
        **{
            name: Arm(name, (*BY_DECISION, *_CRITIC, f"algorithm.advantage={name}"))
            for name in ("gae", "gae_token")
        },
        "branch": Arm("branch", (*_BRANCH, "training.batch_decisions=85")),
        "branch_trained": Arm(
            "branch, trained", (*_BRANCH, "algorithm.train_branches=true", "training.batch_decisions=232")
        ),
    },
)  # fmt: skip

# A corridor of 30 cells (tests/corridor.py): in each, one of two ways is right, and the other ends the game.
# Key, door and treasure earn 1 each. Except in `plain`, three of four groups start at snapshots of the run.
_SHARE = "curriculum.share=0.75"
STARTS = Study(
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

# Whole jobs, each seed with its own warm-up, if the job has one. The demo takes ten minutes a seed on two
# quiet cores, whole games take an hour, and the others a quarter of an hour.
_MORE = ("evaluation.instances=300",)
JOBS = tuple(
    Study(
        name=name,
        title=f"{job}, from its beginning on",
        against=name,
        job=f"configs/{job}.toml",
        settings=settings,
        arms={name: Arm(name, ())},
        measure=measure,
        measured=f"{unit}, held out",
        from_the_start=True,
    )
    for name, job, settings, measure, unit in (
        ("demo", "crafter_demo", (), "unique_achievements", "unique achievements"),
        ("crafter_laptop", "crafter_laptop", (), "unique_achievements", "unique achievements"),
        ("crafter_from_scratch", "crafter_from_scratch", _MORE, "unique_achievements", "unique achievements"),
        ("babyai", "babyai", _MORE, "outcome_reward", "missions accomplished"),
        ("frozen_lake", "frozen_lake", _MORE, "outcome_reward", "goals reached"),
        ("sokoban", "sokoban", _MORE, "outcome_reward", "boxes on goals"),
        ("orders", "orders", _MORE, "outcome_reward", "databases exact"),
    )
)

NAMES = {
    study.name: study for study in (*JOBS, AHEAD, CREDIT, DIALOGUE, MIXTURE, REWARD_MODES, STARTS, STATELM)
}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        titles = "\n".join(f"    {name:22s}{study.title}" for name, study in NAMES.items())
        raise SystemExit(f"python -m bench.studies NAME, where NAME is one of\n{titles}")
    sys.exit(main(NAMES[sys.argv[1]], sys.argv[2:]))
