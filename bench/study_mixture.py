"""Does a fixed policy that samples a part of the rollouts help the actor, and does a bad one harm it?

    python -m bench.study_mixture [--quick] [--seeds 0 1 2] [--arms alone good bad] [--background]

The job is configs/crafter_mixture.toml. For each seed one weak warm start, which all arms load; then RL:

    alone   the actor plays everything: the same job with alpha = 1
    good    beside a clone of the scripted teacher, made once for all seeds: it imitated eight times as much
    bad     beside a model of random weights, which never writes a call that can be read

alpha, the probability that the actor plays a rollout, rises to 1 by the middle of the run in both mixtures.
Worlds, sampling seeds, learning rates and rollouts an iteration are equal; so are decisions, but for episodes
that end in death: none ends for calls that cannot be read. Told are held-out outcomes of the actor alone, by
iteration; the first evaluation that is as good as the last one of `alone`; and the differences, seed by seed.
Beside them stands what a lock whose dials are turned shows without a model (bandit_mixture.py): with a good
fixed policy, on a lock that the actor alone never opens; with a bad one, on a lock that it does.

What is done is skipped, what was interrupted is resumed, arms may be run one by one. After each arm
bench/results/mixture.json (curves with 95 % intervals, settings, times, versions) and mixture.png are written
anew. An arm takes some eight minutes a seed on two cores, the clone two.
"""

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.bandit_mixture import Lock, leaning, learned
from bench.kit import ROOT
from bench.study_results import Arm, Study
from bench.study_runs import finished, main, warm_start_job
from trainer_backend.core.allocation import ConstantSchedule
from trainer_backend.job.load import load_job

# The clone imitates so many times the episodes that the actor's warm-up has.
TIMES = 8
MIXED = ("rollout_allocation_schedule.alpha_0=0.2", "rollout_allocation_schedule.beta=0.05")


def models(study: Study, folder: Path, settings: Sequence[str]) -> Mapping[str, str]:
    """The fixed policies, made where they are not there yet; {good} and {bad} in settings and switches."""
    own = [setting for setting in settings if "{" not in setting]
    episodes = load_job(ROOT / study.job, own).config.warmup
    assert episodes is not None, "the job has a warm-up"
    job = warm_start_job(study, (*own, f"warmup.episodes={TIMES * episodes.episodes}"))
    clone = finished(
        folder / "good",
        job.model_copy(update={"rollout_only": (), "rollout_allocation_schedule": None}),
    )
    good = clone.checkpoints / "iteration_0"
    return {"good": str(good), "bad": str(_random_twin(good, folder / "bad"))}


def locks() -> Mapping[str, Any]:
    """By arm, the iteration after which the lock opens in every second try, for each of three seeds."""
    good = Lock(dials=6, numbers=4, fixed=leaning(4, 0))
    bad = Lock(dials=2, numbers=4, fixed=leaning(4, 1))
    arms = {"alone_hard": (good, 1.0), "good": (good, 0.5), "alone_easy": (bad, 1.0), "bad": (bad, 0.5)}
    return {
        "locks": {
            name: [_opened(lock, alpha, seed) for seed in range(3)] for name, (lock, alpha) in arms.items()
        }
    }


def _opened(lock: Lock, alpha: float, seed: int) -> int | None:
    found = learned(lock, ConstantSchedule(seed=seed, alpha=alpha), iterations=40)
    return next((i for i, chance in enumerate(found, start=1) if chance >= 0.5), None)


def _random_twin(model: Path, folder: Path) -> Path:
    """A model of the same size and tokenizer whose weights were never trained."""
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


STUDY = Study(
    name="mixture",
    title="the actor alone, beside a good fixed policy, beside a bad one",
    against="alone",
    job="configs/crafter_mixture.toml",
    settings=(
        "training.keep_checkpoints=1",
        "rollout_only.model_path={good}",
        "rollout_allocation_schedule.alpha_0=1",
        "rollout_allocation_schedule.beta=0",
    ),
    quick=(
        "training.iterations=2", "rollout.episodes_per_batch=8", "rollout.max_turns=5",
        "evaluation.instances=4", "evaluation.every_n_iters=1", "warmup.episodes=5", "warmup.epochs=1",
        "rollout_only.model_path={good}", "rollout_allocation_schedule.alpha_0=1",
        "rollout_allocation_schedule.beta=0",
    ),
    arms={
        "alone": Arm("alone", ()),
        "good": Arm("with a good one", MIXED),
        "bad": Arm("with a bad one", (*MIXED, "rollout_only.model_path={bad}")),
    },
    beside=locks,
    models=models,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(STUDY))
