"""One iteration of policy updates: stops 8 and 11 of the route."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer_backend.core.collate import Batch, Packed, collate, cut_batch
from trainer_backend.core.errors import place
from trainer_backend.core.kl import kl_loss
from trainer_backend.core.loss_metrics import clip_metrics, merge_metrics
from trainer_backend.core.losses import LossConfig, entropy_loss, truncated_weights, weighted_sum
from trainer_backend.core.schedules import learning_rate
from trainer_backend.core.seeds import derived_seed
from trainer_backend.core.segments import CONTEXT, Segment
from trainer_backend.errors import NonFiniteLoss, UpdateStopped
from trainer_backend.job_schema import JobConfig
from trainer_backend.learner.scoring import Scorer, row_width
from trainer_backend.learner.stepping import memory_watched, stepping
from trainer_backend.plugins import aggregation, policy_loss, schedule
from trainer_backend.protocols import CreditedEpisode

# [N] log-probs of the sampled tokens under what the KL term pulls towards.
Reference = Callable[[Packed], Tensor]


@dataclass(frozen=True, slots=True)
class _Scored:
    """A segment with what stop 8 found: the learner's own log-probs before the first step, [N] each."""

    segment: Segment
    proximal: list[float]


class PolicyUpdate:
    """Updates the scorer's model in place. `reference` is needed only where the job has a KL term."""

    def __init__(
        self,
        scorer: Scorer,
        optimizer: torch.optim.Optimizer,
        job: JobConfig,
        reference: Reference | None = None,
    ) -> None:
        self._scorer, self._optimizer, self._reference = scorer, optimizer, reference
        self._job, self._table = job, job.training
        self._loss = policy_loss(job.algorithm.loss)
        self._weights = aggregation(job.training.aggregation)
        self._loss_config = LossConfig(clip_low=self._table.clip_low, clip_high=self._table.clip_high)

    def run(self, episodes: Sequence[CreditedEpisode], *, iteration: int) -> dict[str, float]:
        """Score all segments, then `update_passes` passes over them in shuffled optimizer steps.

        With `target_kl`, no step is taken on from where the policy was found further away than that.

        Raises:
            NonFiniteLoss: a log-prob, the loss or the gradient is not finite; the weights are untouched
                by the step that met it.
            OutOfMemory: scoring or a step did not fit the device; likewise.
            BatchError: a sampled token without a finite advantage.
        """
        segments = [segment for episode in episodes for segment in episode.segments]
        advantages = {episode.rollout_id: episode.advantages_T for episode in episodes}
        parts: list[dict[str, float]] = []
        try:
            with memory_watched(self._job, "the update ran out of memory"):
                scored = self._scored(segments)
                steps = list(self._steps(scored, iteration))
                for number, step in enumerate(steps):
                    found = self._gradient(step, advantages)
                    moved = found["loss/approx_kl"]
                    if parts and self._table.target_kl is not None and moved > self._table.target_kl:
                        break  # found by the forward pass of a step that is then not taken
                    self._set_learning_rate(iteration - 1 + number / len(steps))
                    parts.append({**found, "optim/grad_norm": self._apply()})
        except UpdateStopped as error:
            self._optimizer.zero_grad(set_to_none=True)
            error.steps_taken = len(parts)
            raise
        metrics = {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}
        metrics |= _extremes(parts)
        return {
            **metrics,
            **_mismatch(scored),
            "optim/steps": float(len(parts)),
            "optim/steps_skipped": float(len(steps) - len(parts)),
            "optim/lr": self._rate(),
            "loss/kl_to_proximal": moved,
        }

    def _scored(self, segments: Sequence[Segment]) -> list[_Scored]:
        table = self._table
        size = {"row_tokens": table.row_tokens, "micro_batch_tokens": table.micro_batch_tokens}
        proximal = self._scorer.score(segments, **size)
        for segment, values in zip(segments, proximal, strict=True):
            _refuse_non_finite(segment, values)
        return [_Scored(*row) for row in zip(segments, proximal, strict=True)]

    def _steps(self, scored: Sequence[_Scored], iteration: int) -> Iterator[list[_Scored]]:
        """Optimizer steps of about `batch_decisions` decisions; the shuffle follows from the job's seed."""
        for number in range(self._table.update_passes):
            order = list(scored)
            random.Random(derived_seed(self._job.job.seed, "shuffle", iteration, number)).shuffle(order)
            yield from _in_steps(order, self._table.batch_decisions)

    def _gradient(self, step: Sequence[_Scored], advantages: dict[str, Sequence[float]]) -> dict[str, float]:
        """The gradient of a step, left on the parameters, and its metrics."""
        segments = [item.segment for item in step]
        width = row_width(segments, self._table.row_tokens)
        batch = collate(
            segments,
            advantages=advantages,
            weights=self._weights(segments),
            proximal=[item.proximal for item in step],
            row_tokens=width,
        )
        self._optimizer.zero_grad(set_to_none=True)
        parts = []
        with stepping(self._scorer.model):
            for piece in cut_batch(batch, max(1, self._table.micro_batch_tokens // width)):
                loss, metrics = self._piece(piece)
                if not torch.isfinite(loss):
                    raise NonFiniteLoss(
                        f"the loss is {loss.item()}; the weights before this step are kept",
                        hint="Lower training.learning_rate or training.max_grad_norm",
                    )
                loss.backward()  # type: ignore[no-untyped-call]
                parts.append(metrics)
        return merge_metrics(parts)

    def _apply(self) -> float:
        """Clip the gradient and take the step; its norm before that."""
        norm = torch.nn.utils.clip_grad_norm_(self._scorer.model.parameters(), self._table.max_grad_norm)
        if not torch.isfinite(norm):
            raise NonFiniteLoss(f"the norm of the gradient is {norm.item()}; the weights are kept")
        self._optimizer.step()
        return float(norm)

    def _piece(self, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        table, packed = self._table, batch.packed
        logprobs, entropies = self._scorer.logprobs(packed)
        batch = batch.to(logprobs.device)
        proximal = batch.proximal_logprob_N
        behaviour = truncated_weights(proximal, batch.packed.behaviour_logprob_N, table.behaviour_weight_cap)
        surrogate = self._loss(
            logprobs, proximal, batch.advantage_N, batch.weight_N * behaviour, self._loss_config
        )
        loss = surrogate + table.entropy_coef * entropy_loss(entropies, batch.weight_N)
        kl = {}
        if self._reference is not None:
            with torch.no_grad():
                reference = self._reference(packed)
            distance = kl_loss(logprobs, reference, batch.weight_N, name=table.kl_kind)
            loss = loss + table.kl_coef * distance
            kl["loss/kl"] = distance.item()
        metrics = kl | clip_metrics(logprobs, proximal, batch.advantage_N, batch.weight_N, self._loss_config)
        metrics["loss/policy"] = surrogate.item()
        metrics["loss/entropy"] = weighted_sum(entropies.detach(), batch.weight_N).item()
        return loss, metrics

    def _set_learning_rate(self, iterations_done: float) -> None:
        table = self._table
        rate = learning_rate(
            table.learning_rate,
            progress=min(iterations_done / max(table.iterations, 1), 1.0),
            rise=table.learning_rate_rise,
            final=table.learning_rate_final,
            fall=schedule(table.learning_rate_schedule),
        )
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    def _rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])


def _in_steps(order: Sequence[_Scored], batch_decisions: int) -> Iterator[list[_Scored]]:
    """Cut into steps of about `batch_decisions` decisions, as equal as whole segments allow.

    A step of a few left-over decisions would move the weights as far as a full one: so no left-overs.
    """
    decisions = [len(set(item.segment.decision) - {CONTEXT}) for item in order]
    count = max(1, round(sum(decisions) / batch_decisions))
    share = sum(decisions) / count
    step: list[_Scored] = []
    done = 0.0
    for item, number in zip(order, decisions, strict=True):
        step.append(item)
        done += number
        if done >= share:
            yield step
            step, done = [], done - share
    if step:
        yield step


def _refuse_non_finite(segment: Segment, values: Sequence[float]) -> None:
    """Name the token whose log-prob is not finite."""
    for position, value in zip(segment.sampled_positions, values, strict=True):
        if not abs(value) < float("inf"):
            where = place(segment.rollout_id, segment.decision[position] + 1)
            raise NonFiniteLoss(f"{where}, token {position}: the learner's log-prob is {value}")


def _extremes(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Over a whole iteration the extremes of the ratio are extremes, not means."""
    return {
        "loss/ratio_min": min(part["loss/ratio_min"] for part in parts),
        "loss/ratio_max": max(part["loss/ratio_max"] for part in parts),
    }


def _mismatch(scored: Sequence[_Scored]) -> dict[str, float]:
    """How far the sampler's log-probs are from the learner's own: the token-in, token-out check."""
    gaps = [
        abs(own - item.segment.logprobs[position])
        for item in scored
        for position, own in zip(item.segment.sampled_positions, item.proximal, strict=True)
    ]
    return {"mismatch/logprob_max": max(gaps), "mismatch/logprob_mean": sum(gaps) / len(gaps)}
