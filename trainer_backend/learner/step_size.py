"""The peak of the learning rate, which `learning_rate_schedule = "desired_kl"` moves after each iteration."""

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

# Decisions that the KL of an iteration is measured on, at most.
SAMPLE = 1000
# A decision of which each token was sampled with more is certain, where `skip_certain_above` says nothing.
CERTAIN_ABOVE = 0.99
RATE_FILE = "learning_rate.json"

# The log-probs of each segment under the current weights.
Score = Callable[[Sequence[Segment]], Sequence[Row]]


class StepSize:
    """The current peak. Every schedule but "desired_kl" leaves it where it began, and writes no state."""

    def __init__(self, table: TrainingTable, seed: int, ranks: Ranks = ALONE) -> None:
        self._table, self._seed, self._ranks = table, seed, ranks
        self._follows = schedule(table.learning_rate_schedule).follows_kl
        self.rate = table.learning_rate

    def follow(self, scored: Sequence[Scored], iteration: int, score: Score) -> dict[str, float]:
        """Measure how far an iteration's steps have moved the policy, and move the rate for the next one.

        `scored` has the log-probs before the first step. Gives kl/decision; nothing with other schedules, nor
        where every decision was certain: then the rate stays.
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
        """Read what `save` wrote; a checkpoint of another schedule leaves the rate where it begins."""
        if self._follows and (folder / RATE_FILE).exists():
            self.rate = float(json.loads((folder / RATE_FILE).read_text(encoding="utf-8"))["learning_rate"])


def sample_decisions(
    scored: Sequence[Scored], certain_above: float, seed: tuple[int, int]
) -> dict[int, list[int]]:
    """At most SAMPLE of the actor's decisions that are not certain: by number of the segment, their t.

    A decision is certain if each of its tokens had a higher probability when it was sampled.
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
    """The mean over these decisions of KL(before || now) in nats, by k3 summed over the tokens.

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
