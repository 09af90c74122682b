"""Adapts the peak learning rate after each iteration, for `learning_rate_schedule = "desired_kl"`."""

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

# The KL of an iteration is measured on at most this many decisions.
SAMPLE = 1000
# A decision is certain if each of its tokens was sampled with a higher probability than this, unless
# training.skip_certain_above sets another limit.
CERTAIN_ABOVE = 0.99
RATE_FILE = "learning_rate.json"

# Computes the log-probs of each segment's sampled tokens under the current weights.
Score = Callable[[Sequence[Segment]], Sequence[Row]]


class StepSize:
    """Holds the peak learning rate; the schedule "desired_kl" adapts it and stores it in checkpoints.

    With other schedules, it stays at `training.learning_rate`.
    """

    def __init__(self, table: TrainingTable, seed: int, ranks: Ranks = ALONE) -> None:
        self._table, self._seed, self._ranks = table, seed, ranks
        self._follows = schedule(table.learning_rate_schedule).follows_kl
        self.rate = table.learning_rate

    def follow(self, scored: Sequence[Scored], iteration: int, score: Score) -> dict[str, float]:
        """Measure how far an iteration's steps have moved the policy; adapt the rate of the next iteration.

        `scored` contains the log-probs before the first step. Returns the metric kl/decision. With another
        schedule, or if every decision was certain, the rate stays and no metric is returned.
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
        """Write the rate into `folder`, the training_state/ of a checkpoint."""
        if self._follows:
            (folder / RATE_FILE).write_text(json.dumps({"learning_rate": self.rate}), encoding="utf-8")

    def restore(self, folder: Path) -> None:
        """Load the rate that `save` wrote; keep the initial rate if the checkpoint used another schedule."""
        if self._follows and (folder / RATE_FILE).exists():
            self.rate = float(json.loads((folder / RATE_FILE).read_text(encoding="utf-8"))["learning_rate"])


def sample_decisions(
    scored: Sequence[Scored], certain_above: float, seed: tuple[int, int]
) -> dict[int, list[int]]:
    """Sample at most SAMPLE of the actor's decisions that were not certain.

    A decision was certain if each of its tokens had a probability above `certain_above` when it was sampled.
    Returns lists of decision numbers t, by the segment's index in `scored`.
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
    """Estimate the mean over decisions of KL(before || now), in nats, by k3 summed over a decision's tokens.

        k3 = exp(d) - 1 - d,  d = log-prob now - log-prob before

    `sample` is a result of `sample_decisions`. `score` computes the log-probs now. For k3 see core.kl.
    """
    rows = score([scored[number].segment for number in sample])
    nats = []
    for (number, decisions), now in zip(sample.items(), rows, strict=True):
        item = scored[number]
        d_N = np.asarray(now, np.float64) - np.asarray(item.proximal, np.float64)
        nats += (np.expm1(d_N) - d_N)[np.isin(item.segment.decision, decisions)].tolist()
    return math.fsum(nats) / sum(map(len, sample.values()))
