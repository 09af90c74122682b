"""The peak of the learning rate, which `learning_rate_schedule = "desired_kl"` adapts."""

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from trainer_backend.core.columns import Row
from trainer_backend.core.policies import ACTOR
from trainer_backend.core.schedules import followed_rate, learning_rate
from trainer_backend.core.seeds import derived_seed
from trainer_backend.core.segments import Segment
from trainer_backend.errors import NonFiniteLoss
from trainer_backend.job.training_table import TrainingTable
from trainer_backend.learner.ranks import ALONE, Ranks
from trainer_backend.learner.stepping import Scored
from trainer_backend.plugins import schedule

# The most decisions on which the KL of an iteration is measured.
SAMPLE = 1000
# Default of `skip_certain_above`: a decision is certain if each token had a higher probability.
CERTAIN_ABOVE = 0.99
RATE_FILE = "learning_rate.json"

# The log-probs of each segment under the current weights.
Score = Callable[[Sequence[Segment]], Sequence[Row]]


class StepSize:
    """The current peak of the learning rate. Only "desired_kl" changes it, and stores it in checkpoints."""

    def __init__(self, table: TrainingTable, seed: int, ranks: Ranks = ALONE) -> None:
        self._table, self._seed, self._ranks = table, seed, ranks
        self._follows = schedule(table.learning_rate_schedule).follows_kl
        self.rate = table.learning_rate

    def follow(self, scored: Sequence[Scored], iteration: int, score: Score) -> dict[str, float]:
        """Measure how far an iteration's steps have moved the policy, and adapt the rate for the next.

        `scored` has the log-probs before the first step. Returns kl/decision; empty, and without effect, for
        other schedules, or if every decision was certain.
        """
        if not self._follows:
            return {}
        sample = sample_decisions(
            scored, self._table.skip_certain_above or CERTAIN_ABOVE, (self._seed, iteration)
        )
        if not sample:
            return {}
        kl = self._ranks.of_every_rank(kl_of_decisions(scored, sample, score))[0]
        if not math.isfinite(kl):
            raise NonFiniteLoss(f"the KL of the iteration's decisions is {kl}")
        table = self._table
        desired = learning_rate(
            table.desired_kl,
            progress=min((iteration - 1) / max(table.iterations, 1), 1.0),
            rise=0.0,
            final=table.desired_kl_final,
        )
        self.rate = followed_rate(self.rate, kl, desired=desired, begin=table.learning_rate)
        return {"kl/decision": kl}

    def save(self, folder: Path) -> None:
        """Write the state into a checkpoint's training_state/."""
        if self._follows:
            (folder / RATE_FILE).write_text(json.dumps({"learning_rate": self.rate}), encoding="utf-8")

    def restore(self, folder: Path) -> None:
        """Load what `save` wrote; after another schedule the rate keeps its first value."""
        if self._follows and (folder / RATE_FILE).exists():
            self.rate = float(json.loads((folder / RATE_FILE).read_text(encoding="utf-8"))["learning_rate"])


def sample_decisions(
    scored: Sequence[Scored], certain_above: float, seed: tuple[int, int]
) -> dict[int, list[int]]:
    """Sample at most SAMPLE of the actor's decisions that were not certain: lists of t by segment number.

    A decision was certain if each token had a probability above `certain_above` when it was sampled.
    """
    least = math.log(certain_above)
    found = [
        (number, int(t))
        for number, item in enumerate(scored)
        if item.policy == ACTOR
        for t in np.unique(item.segment.decision[item.segment.logprobs <= least])
    ]
    if len(found) > SAMPLE:
        found = sorted(random.Random(derived_seed(seed[0], "desired_kl", seed[1])).sample(found, SAMPLE))
    sample: dict[int, list[int]] = {}
    for number, t in found:
        sample.setdefault(number, []).append(t)
    return sample


def kl_of_decisions(scored: Sequence[Scored], sample: dict[int, list[int]], score: Score) -> float:
    """Estimate the mean KL(before || now) of these decisions in nats, by k3 summed over tokens.

        k3 = exp(d) - 1 - d,  d = log-prob now - log-prob before

    Source of k3: see core.kl.
    """
    rows = score([scored[number].segment for number in sample])
    nats = []
    for (number, decisions), now in zip(sample.items(), rows, strict=True):
        item = scored[number]
        d_N = np.asarray(now, np.float64) - np.asarray(item.proximal, np.float64)
        nats += (np.expm1(d_N) - d_N)[np.isin(item.segment.decision, decisions)].tolist()
    return math.fsum(nats) / sum(map(len, sample.values()))
