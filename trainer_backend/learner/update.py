"""One iteration of policy updates: stops 8 and 11 of the route."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from trainer_backend.core.collate import Batch, Packed, collate, cut_batch
from trainer_backend.core.errors import place
from trainer_backend.core.kl import kl_loss
from trainer_backend.core.loss_metrics import clip_metrics, merge_metrics
from trainer_backend.core.losses import (
    LossConfig,
    at_level_of,
    entropy_loss,
    log_ratio,
    truncated_weights,
    unit_means,
    weighted_sum,
)
from trainer_backend.core.schedules import learning_rate
from trainer_backend.core.seeds import derived_seed
from trainer_backend.core.segments import Segment
from trainer_backend.core.units import ratio_units
from trainer_backend.core.value_loss import value_loss
from trainer_backend.errors import NonFiniteLoss, UpdateStopped
from trainer_backend.jobfile.schema import JobConfig
from trainer_backend.learner.scoring import Scorer, row_width
from trainer_backend.learner.stepping import memory_watched, stepping
from trainer_backend.learner.steps import Scored, in_steps, together
from trainer_backend.learner.value_head import ValueHead
from trainer_backend.plugins import aggregation, policy_loss, schedule
from trainer_backend.protocols import CreditedEpisode

# [N] log-probs of the sampled tokens under what the KL term pulls towards.
Reference = Callable[[Packed], Tensor]


class PolicyUpdate:
    """Updates the scorer's model in place, and `head` beside it.

    `reference` is needed only where the job has a KL term, `head` only where episodes have targets for it.
    """

    def __init__(
        self,
        scorer: Scorer,
        optimizer: torch.optim.Optimizer,
        job: JobConfig,
        reference: Reference | None = None,
        head: ValueHead | None = None,
    ) -> None:
        self._scorer, self._optimizer, self._reference, self._head = scorer, optimizer, reference, head
        self._job, self._table = job, job.training
        plug = policy_loss(job.algorithm.loss)
        self._loss, self._level = plug.compute, job.algorithm.ratio_level or plug.ratio_level
        self._weights = aggregation(job.training.aggregation)
        table = self._table
        self._loss_config = LossConfig(
            clip_low=table.clip_low, clip_high=table.clip_high, clip_dual=table.clip_dual
        )

    def run(
        self,
        episodes: Sequence[CreditedEpisode],
        *,
        iteration: int,
        known: Mapping[str, Sequence[Sequence[float]]] | None = None,
    ) -> dict[str, float]:
        """Score all segments, then `update_passes` passes over them in shuffled optimizer steps.

        With `target_kl`, no step is taken on from where the policy was found further away than that. `known`
        are log-probs of the same weights, by rollout id for each segment: where all are there, none is made.

        Raises:
            NonFiniteLoss: a log-prob, the loss or the gradient is not finite; the weights are untouched
                by the step that met it.
            OutOfMemory: scoring or a step did not fit the device; likewise.
            BatchError: a sampled token without a finite advantage.
        """
        segments = [segment for episode in episodes for segment in episode.segments]
        by_id = {episode.rollout_id: episode for episode in episodes}
        parts: list[dict[str, float]] = []
        try:
            with memory_watched(self._job, "the update ran out of memory"):
                scored = self._known(episodes, known or {}) or self.scored(segments)
                steps = list(self._steps(scored, iteration))
                for number, step in enumerate(steps):
                    found = self.gradient(step, by_id)
                    moved = found["loss/approx_kl"]
                    if parts and self._table.target_kl is not None and moved > self._table.target_kl:
                        break  # found by the forward pass of a step that is then not taken
                    self._set_learning_rate(iteration - 1 + number / len(steps))
                    parts.append({**found, "optim/grad_norm": self._apply()})
        except UpdateStopped as error:
            self._zero_grad()
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

    def scored(self, segments: Sequence[Segment]) -> list[Scored]:
        """Stop 8: the learner's own log-probs before the first step.

        Raises:
            NonFiniteLoss: one is not finite, by the name of its token.
        """
        table = self._table
        size = {"row_tokens": table.row_tokens, "micro_batch_tokens": table.micro_batch_tokens}
        return _scored(segments, self._scorer.score(segments, **size))

    def _known(
        self, episodes: Sequence[CreditedEpisode], known: Mapping[str, Sequence[Sequence[float]]]
    ) -> list[Scored]:
        """As `scored`, where it was done before; empty where it was not."""
        if any(episode.rollout_id not in known for episode in episodes):
            return []
        segments = [segment for episode in episodes for segment in episode.segments]
        return _scored(segments, chain.from_iterable(known[episode.rollout_id] for episode in episodes))

    def _steps(self, scored: Sequence[Scored], iteration: int) -> Iterator[list[Scored]]:
        """Optimizer steps of about `batch_decisions` decisions; the shuffle follows from the job's seed."""
        for number in range(self._table.update_passes):
            order = together(scored, self._level)
            random.Random(derived_seed(self._job.job.seed, "shuffle", iteration, number)).shuffle(order)
            yield from in_steps(order, self._table.batch_decisions)

    def gradient(self, step: Sequence[Scored], episodes: Mapping[str, CreditedEpisode]) -> dict[str, float]:
        """The gradient of a step, left on the parameters, and its metrics. `episodes` are by rollout id."""
        segments = [item.segment for item in step]
        width = row_width(segments, self._table.row_tokens)
        critic = {name: item.critic for name, item in episodes.items() if item.critic is not None}
        batch = collate(
            segments,
            advantages={name: episode.advantages for name, episode in episodes.items()},
            weights=self._weights(segments),
            proximal=[item.proximal for item in step],
            units=ratio_units(segments, self._level),
            row_tokens=width,
            critic=critic or None,
        )
        self._zero_grad()
        parts = []
        pieces = list(cut_batch(batch, max(1, self._table.micro_batch_tokens // width)))
        means = self._episode_means(pieces) if self._level == "episode" else None
        with stepping(self._scorer.model):
            for piece in pieces:
                loss, metrics = self._piece(piece, means)
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
        if self._head is not None:
            self._head.refuse_non_finite()
        self._optimizer.step()
        if self._head is not None:
            self._head.step(policy_rate=self._rate())
        return float(norm)

    def _zero_grad(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        if self._head is not None:
            self._head.zero_grad()

    @torch.no_grad()
    def _episode_means(self, pieces: Sequence[Batch]) -> Tensor:
        """[units] mean log-ratio of each episode, whose segments may lie in several pieces."""
        ratios, units, weights = [], [], []
        for piece in pieces:
            logprobs = self._scorer.logprobs(piece.packed)[0]
            piece = piece.to(logprobs.device)
            ratios.append(log_ratio(logprobs, piece.proximal_logprob_N, piece.weight_N))
            units.append(piece.unit_N)
            weights.append(piece.weight_N)
        unit_N = torch.cat(units)
        means_N = unit_means(unit_N, torch.cat(ratios), torch.cat(weights))
        return means_N.new_zeros(int(unit_N.max()) + 1).index_copy_(0, unit_N, means_N)

    def _at_level(self, batch: Batch, logprobs: Tensor, episode_means: Tensor | None) -> Tensor:
        """Log-probs whose ratio to the proximal ones is that of the token's unit."""
        if self._level == "token":
            return logprobs
        proximal, weights = batch.proximal_logprob_N, batch.weight_N
        if episode_means is not None:
            return at_level_of(episode_means[batch.unit_N], logprobs, proximal)
        units = batch.unit_N - batch.unit_N.min()
        return at_level_of(
            unit_means(units, log_ratio(logprobs, proximal, weights), weights), logprobs, proximal
        )

    def _piece(
        self, batch: Batch, episode_means: Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        table, packed = self._table, batch.packed
        states = self._scorer.states(packed)
        logprobs, entropies = self._scorer.logprobs_at(states)
        batch = batch.to(logprobs.device)
        proximal = batch.proximal_logprob_N
        behaviour = truncated_weights(proximal, batch.packed.behaviour_logprob_N, table.behaviour_weight_cap)
        levelled = self._at_level(batch, logprobs, episode_means)
        surrogate = self._loss(
            levelled, proximal, batch.advantage_N, batch.weight_N * behaviour, self._loss_config
        )
        loss = surrogate + table.entropy_coef * entropy_loss(entropies, batch.weight_N)
        more = {}
        if batch.critic is not None and self._head is not None:
            missed = value_loss(self._head.values(states), batch.critic, clip=table.value_clip)
            loss = loss + table.value_coef * missed
            more["value/loss"] = missed.item()
        if self._reference is not None:
            with torch.no_grad():
                reference = self._reference(packed)
            distance = kl_loss(logprobs, reference, batch.weight_N, name=table.kl_kind)
            loss = loss + table.kl_coef * distance
            more["loss/kl"] = distance.item()
        metrics = more | clip_metrics(
            levelled, proximal, batch.advantage_N, batch.weight_N, self._loss_config
        )
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


def _scored(segments: Sequence[Segment], proximal: Iterable[Sequence[float]]) -> list[Scored]:
    found = [Scored(segment, list(values)) for segment, values in zip(segments, proximal, strict=True)]
    for item in found:
        _refuse_non_finite(item.segment, item.proximal)
    return found


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


def _mismatch(scored: Sequence[Scored]) -> dict[str, float]:
    """How far the sampler's log-probs are from the learner's own: the token-in, token-out check."""
    gaps = [
        abs(own - item.segment.logprobs[position])
        for item in scored
        for position, own in zip(item.segment.sampled_positions, item.proximal, strict=True)
    ]
    return {"mismatch/logprob_max": max(gaps), "mismatch/logprob_mean": sum(gaps) / len(gaps)}
