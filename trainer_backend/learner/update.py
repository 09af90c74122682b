"""Scores the episodes of an iteration and updates the policy (stops 8 and 11 of docs/route.md)."""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from trainer_backend.core.aggregation import number_units
from trainer_backend.core.collate import Batch, Packed, collate, cut_batch, to_device
from trainer_backend.core.columns import Row
from trainer_backend.core.loss_metrics import mean_metrics, merge_metrics
from trainer_backend.core.router_loss import balance_loss, load_metrics
from trainer_backend.core.schedules import learning_rate
from trainer_backend.core.seeds import derived_seed
from trainer_backend.core.segments import Segment
from trainer_backend.core.tries import Tries
from trainer_backend.core.value_loss import value_loss
from trainer_backend.errors import NonFiniteLoss, UpdateStopped
from trainer_backend.job.training_table import MISMATCH_LIMIT_FLOAT32, MISMATCH_LIMIT_LOW
from trainer_backend.learner.attention import PaddedRows
from trainer_backend.learner.behaviour import FirstStep, Scores, Weighed, mismatch, mixture_metrics, weighed
from trainer_backend.learner.config import LearnerConfig
from trainer_backend.learner.experts import Routing
from trainer_backend.learner.fit import less_memory
from trainer_backend.learner.policy_terms import DRIFT, PolicyTerms, StepSums
from trainer_backend.learner.ranks import Ranks
from trainer_backend.learner.scoring import Scorer, refuse_unknown, score_by
from trainer_backend.learner.sharding import clip_gradient
from trainer_backend.learner.step_size import StepSize
from trainer_backend.learner.stepping import Scored, in_steps, memory_watched, stepping, together
from trainer_backend.learner.value_head import ValueHead
from trainer_backend.parts import CreditedEpisode
from trainer_backend.plugins import aggregation, schedule

# Computes [N] log-probs of sampled tokens under the reference policy of the KL term.
Reference = Callable[[Packed], Tensor]


@dataclass(frozen=True, slots=True)
class LogprobCache:
    """Known log-probs under the current weights and the reference policy.

    Each dict maps a rollout id to the [N] log-probs of each of its segments.
    """

    proximal: dict[str, Sequence[Row]] = field(default_factory=dict)
    reference: dict[str, Sequence[Row]] = field(default_factory=dict)

    def part(self, numbers: Mapping[str, Sequence[int]]) -> "LogprobCache":
        """Return a cache of only some segments: `numbers` maps each rollout id to their indices."""

        def of(logprobs: Mapping[str, Sequence[Row]]) -> dict[str, Sequence[Row]]:
            known = logprobs.keys() & numbers.keys()
            return {name: [logprobs[name][number] for number in numbers[name]] for name in known}

        return LogprobCache(of(self.proximal), of(self.reference))


EMPTY = LogprobCache()


class PolicyUpdate:
    """Trains the scorer's model in place, and the value head `head` if the episodes have value targets.

    Args:
        reference: the reference policy of the KL term; None without this term.
        share: the part of the iteration's sampled tokens that the episodes passed to `run` contain.
        step_size: the peak learning rate; None: a `StepSize` with the job's initial rate.
    """

    def __init__(
        self,
        scorer: Scorer,
        optimizer: torch.optim.Optimizer,
        config: LearnerConfig,
        *,
        reference: Reference | None = None,
        head: ValueHead | None = None,
        share: float = 1.0,
        step_size: StepSize | None = None,
    ) -> None:
        self._scorer, self._optimizer, self._reference, self._head = scorer, optimizer, reference, head
        self._config, self._table, self._ranks = config, config.training, scorer.ranks
        self._step_size = step_size or StepSize(config.training, config.seed, scorer.ranks)
        self._terms = PolicyTerms(config.objectives, config.training, share)
        name = config.training.aggregation
        self._aggregation = aggregation(name)
        self._aggregation_keys = config.training.read(self._aggregation.keys, name)
        self._tokens_by_rank = np.zeros(scorer.ranks.count)  # over all micro-batches so far
        # Over all steps: tokens of the segments; computed tokens, where a shared prefix counts once; and
        # computed tokens with padding, which only `PaddedRows` has.
        self._tokens = self._computed = self._places = 0
        default = MISMATCH_LIMIT_FLOAT32 if scorer.placement.low is None else MISMATCH_LIMIT_LOW
        self._mismatch_limit = config.training.mismatch_limit or default

    def run(
        self,
        episodes: Sequence[CreditedEpisode],
        *,
        iteration: int,
        policy_version: int | None = None,
        cache: LogprobCache = EMPTY,
    ) -> dict[str, float]:
        """Score all segments, then make `update_passes` passes over them in shuffled optimizer steps.

        Once the policy is farther than `target_kl` from the proximal policy, no further step is taken.
        `policy_version` is as in `parts.Learner.update`. Returns the iteration's metrics.

        Raises:
            SamplerMismatch: log-probs of sampler and learner differ by more than `mismatch_limit` for the
                same weights; no step is taken.
            NonFiniteLoss: a log-prob, the loss or the gradient is not finite.
            OutOfMemory: scoring or a step did not fit the device.
            BatchError: a sampled token has no finite advantage.

        The step that raises does not change the weights; `steps_taken` counts the steps before it.
        """
        by_id = {episode.rollout_id: episode for episode in episodes}
        parts: list[dict[str, float]] = []
        try:
            with memory_watched("the update ran out of memory", hint=less_memory(self._config)):
                drafts = self._drafts(episodes, cache)
                steps = list(self._steps(drafts, iteration))
                scores = self._scores(drafts, steps[0][0], episodes, cache)
                for number, (members, in_pass) in enumerate(steps):
                    # The first step is always taken.
                    limit = math.inf if self._table.target_kl is None or not parts else self._table.target_kl
                    part = self.gradient(
                        scores.step(members), by_id, steps=in_pass,
                        is_first=number == 0, first=scores.first, drift_limit=limit,
                    )  # fmt: skip
                    if number == 0:
                        gaps = mismatch(scores.samples.scored, policy_version, limit=self._mismatch_limit)
                    moved = part.pop(DRIFT)
                    if moved > limit:
                        break
                    self._set_learning_rate(iteration - 1 + number / len(steps))
                    parts.append({**part, "optim/grad_norm": self._apply()})
            rates = self._follow(scores, iteration)
        except UpdateStopped as error:
            self._zero_grad()
            error.steps_taken = len(parts)
            raise
        metrics = mean_metrics(parts)
        return {
            **metrics,
            **rates,
            **gaps,
            "optim/steps": float(len(parts)),
            "optim/steps_skipped": float(len(steps) - len(parts)),
            DRIFT: moved,
            **self._token_metrics(),
            **mixture_metrics(self._terms.objectives, scores.samples, metrics),
        }

    def _follow(self, scores: Scores, iteration: int) -> dict[str, float]:
        """Adapt the learning rate as in `StepSize.follow`; return its metrics and optim/lr."""
        with memory_watched("measuring the steps ran out of memory", hint=less_memory(self._config)):
            return {"optim/lr": self._rate()} | self._step_size.follow(
                scores.samples.scored, iteration, lambda segments: self._scorer.score(segments, self._table)
            )

    def _token_metrics(self) -> dict[str, float]:
        """Return metrics: number of tokens, share of padding, imbalance of the ranks' numbers of tokens."""
        metrics = {"learner/tokens": float(self._tokens), "learner/tokens_computed": float(self._computed)}
        if self._places:
            metrics["learner/padding_share"] = 1.0 - self._computed / self._places
        if not self._ranks.are_several:
            return metrics
        tokens = self._tokens_by_rank
        imbalance = float(tokens.max() / tokens.mean())
        return metrics | {"learner/ranks": float(len(tokens)), "learner/tokens_imbalance": imbalance}

    def weighed(self, episodes: Sequence[CreditedEpisode], cache: LogprobCache = EMPTY) -> Weighed:
        """Score all segments without dropout, and compute the tokens' behaviour weights (stop 8)."""
        drafts = self._drafts(episodes, cache)
        proximal = self._logprobs(episodes, cache.proximal, self._scorer.logprobs)
        return weighed(drafts, proximal, self._terms.objectives)

    def _drafts(self, episodes: Sequence[CreditedEpisode], cache: LogprobCache) -> list[Scored]:
        """Build a `Scored` for each segment, with all data that do not depend on the policy's log-probs.

        These data are log-probs under the reference policy and, if the aggregation spans the iteration, the
        token weights.
        """
        segments = [segment for episode in episodes for segment in episode.segments]
        # Checked before scoring, because an error of the embedding would not name the rollout.
        refuse_unknown(segments, self._scorer.model)
        policies = [episode.policy for episode in episodes for _ in episode.segments]
        reference: Sequence[Row | None] = [None] * len(segments)
        if self._reference is not None:
            reference = self._logprobs(episodes, cache.reference, self._reference)
        shares: Sequence[Row] = [()] * len(segments)
        if self._aggregation.over == "iteration":
            shares = self._aggregation.weights(segments, self._aggregation_keys)
        return [
            Scored(segment, policy=policy, share=share, reference=row)
            for segment, policy, share, row in zip(segments, policies, shares, reference, strict=True)
        ]

    def _scores(
        self,
        drafts: Sequence[Scored],
        members: Sequence[int],
        episodes: Sequence[CreditedEpisode],
        cache: LogprobCache,
    ) -> Scores:
        """Score all segments; leave out those of the first step if the step's forward passes can score them.

        `members` are the indices of the first step's segments in `drafts`.
        """
        objectives = self._terms.objectives
        units = {
            level
            for item in objectives.values()
            for level in (item.unit_level, item.weighting.behaviour_weight_level)
        }
        cached = all(episode.rollout_id in cache.proximal for episode in episodes)
        if cached or self._head is not None or self._drops or "episode" in units:
            rows = self._logprobs(episodes, cache.proximal, self._scorer.logprobs)
            return Scores(drafts, dict(enumerate(rows)), objectives)
        first = FirstStep([drafts[member] for member in members], objectives)
        others = sorted(set(range(len(drafts))) - set(members))
        found = self._scorer.score([drafts[i].segment for i in others], self._table) if others else []
        proximal = dict(zip(others, found, strict=True))
        return Scores(drafts, proximal, objectives, members=members, first=first)

    def _logprobs(
        self, episodes: Sequence[CreditedEpisode], cached: Mapping[str, Sequence[Row]], policy: Reference
    ) -> list[Row]:
        """Return each segment's [N] log-probs: from the cache if it has all episodes, else scored now."""
        if all(episode.rollout_id in cached for episode in episodes):
            return list(chain.from_iterable(cached[episode.rollout_id] for episode in episodes))
        segments = [segment for episode in episodes for segment in episode.segments]
        return [*score_by(policy, segments, self._table, self._scorer)]

    @property
    def _drops(self) -> bool:
        """Return whether a step's forward pass has dropout."""
        lora = self._config.lora
        return lora is not None and lora.dropout > 0

    def _steps(self, drafts: Sequence[Scored], iteration: int) -> Iterator[tuple[list[int], int]]:
        """Yield for each optimizer step the indices of its segments, and how many steps its pass has.

        A step has about `batch_decisions` decisions. The job's seed determines the shuffled order.
        """
        numbers = {id(draft): number for number, draft in enumerate(drafts)}
        for number in range(self._table.update_passes):
            order = together(drafts, self._terms.unit_levels)
            random.Random(derived_seed(self._config.seed, "shuffle", iteration, number)).shuffle(order)
            steps = list(in_steps(order, self._table.batch_decisions))
            yield from (([numbers[id(item)] for item in step], len(steps)) for step in steps)

    def gradient(
        self,
        step: Sequence[Scored],
        episodes: Mapping[str, CreditedEpisode],
        *,
        steps: int = 1,
        is_first: bool = False,
        first: FirstStep | None = None,
        drift_limit: float = math.inf,
    ) -> dict[str, float]:
        """Compute the gradient of a step into the parameters' `grad`; return the step's metrics.

        The metric DRIFT (KL from the proximal policy) is summed over the micro-batches. Once the sum exceeds
        `drift_limit` (nats), the remaining micro-batches run forward only, for the metrics. The caller must
        then discard the gradient.

        Args:
            step: the segments. They have proximal log-probs, unless `first` scores them in this step.
            episodes: the episodes of these segments, by rollout id.
            steps: number of steps in the pass.
            is_first: whether the weights are still those that computed the proximal log-probs.
        """
        segments = [item.segment for item in step]
        tries = self._scorer.tries(segments)
        width = self._scorer.row_tokens(segments, self._table, tries)
        weights = self._token_weights(step, steps)
        batch = self._terms.trusted(self._batch(step, episodes, weights, width, tries))
        sums, ranks, model = self._terms.sums(batch), self._ranks, self._scorer.model
        self._zero_grad()
        parts, moved = [], 0.0
        rows = ranks.rows_of_a_piece(len(batch.packed.token_ids_BL), self._table.micro_batch // width)
        pieces = self._pieces(batch, rows, is_first=is_first)
        self._count_tokens(step, pieces)
        load = self._load(batch, pieces)
        with stepping(model):
            for piece, counts in ranks.own_pieces(pieces):
                with torch.set_grad_enabled(moved <= drift_limit):
                    loss, metrics, error = self._checked_piece(piece, sums, first, load)
                moved += self._agreed_drift(metrics[DRIFT] if counts else 0.0, error)
                if moved <= drift_limit:
                    (loss if counts else 0.0 * loss).backward()  # type: ignore[no-untyped-call]
                if counts:
                    parts.append(metrics)
                    load.keep()
        head = () if self._head is None else self._head.trained.values()
        ranks.sum_gradients([*model.parameters(), *head])
        if first is not None:
            for rows_of_rank in ranks.of_every_rank(first.proximal):
                first.proximal |= rows_of_rank
        return merge_metrics(ranks.in_order(parts)) | load.metrics(ranks)

    def _count_tokens(self, step: Sequence[Scored], pieces: Sequence[Batch]) -> None:
        tokens = [int(piece.packed.segment_ids_BL.count_nonzero()) for piece in pieces]
        self._tokens += sum(len(item.segment) for item in step)
        self._computed += sum(tokens)
        self._tokens_by_rank += self._ranks.sums_by_rank(tokens)
        if isinstance(self._scorer.attention, PaddedRows):
            self._places += sum(PaddedRows.places(piece.packed) for piece in pieces)

    def _load(self, batch: Batch, pieces: Sequence[Batch]) -> "_Load":
        """Create the `_Load` of a step.

        With a balancing loss and several micro-batches, an extra forward pass computes `of_step`.
        """
        experts = self._scorer.experts
        load = _Load(int(batch.packed.segment_ids_BL.count_nonzero()))
        if experts is not None and experts.coefficient and len(pieces) > 1:
            with torch.no_grad():
                for piece, counts in self._ranks.own_pieces(pieces):
                    load.piece = Routing(experts, reads_probabilities=False)
                    self._scorer.hidden(piece.packed, load.piece)
                    if counts:
                        load.keep()
            load.of_step = load.sent_by_all(self._ranks)
            load.sent = None
        return load

    def _checked_piece(
        self, piece: Batch, sums: StepSums, first: FirstStep | None, load: "_Load"
    ) -> tuple[Tensor, dict[str, float], NonFiniteLoss | None]:
        """Return a micro-batch's loss and metrics; and, if a number is not finite, the error to raise."""
        try:
            loss, metrics = self._piece(piece, sums, first, load)
        except NonFiniteLoss as error:
            return torch.tensor(math.nan), {DRIFT: 0.0}, error
        if torch.isfinite(loss):
            return loss, metrics, None
        not_finite = NonFiniteLoss(
            f"the loss is {loss.item()}; the weights before this step are kept",
            hint="Lower training.learning_rate or training.max_grad_norm",
        )
        return loss, metrics, not_finite

    def _agreed_drift(self, drift: float, error: NonFiniteLoss | None) -> float:
        """Sum the drift of one micro-batch per rank over all ranks; if a rank has an error, all raise it."""

        def raise_own() -> None:
            if error is not None:
                raise error

        drift, errors = self._ranks.sums(drift, float(error is not None))
        if errors:
            self._ranks.together(raise_own)
        return drift

    def _token_weights(self, step: Sequence[Scored], steps: int) -> Sequence[Row]:
        """Compute, for each segment of a step, the weights of its sampled tokens."""
        if self._aggregation.over == "iteration":
            return [steps * np.asarray(item.share) for item in step]
        weights = self._aggregation.weights([item.segment for item in step], self._aggregation_keys)
        if self._aggregation.over == "step":
            return weights
        return [np.asarray(row) / self._config.planned_tokens for row in weights]

    def _batch(
        self,
        step: Sequence[Scored],
        episodes: Mapping[str, CreditedEpisode],
        weights: Sequence[Row],
        width: int,
        tries: Tries | None,
    ) -> Batch:
        segments = [item.segment for item in step]
        levels, numbers = self._terms.unit_levels, self._terms.numbers
        critic = {name: item.critic for name, item in episodes.items() if item.critic is not None}
        return collate(
            segments,
            advantages={name: episode.advantages for name, episode in episodes.items()},
            weights=weights,
            proximal=[_or_zeros(item.proximal, item.segment) for item in step],
            behaviour=[_or_zeros(item.behaviour, item.segment) for item in step],
            units=number_units(segments, [levels[item.policy] for item in step]),
            policies=[numbers[item.policy] for item in step],
            row_tokens=width,
            tries=tries,
            critic=critic or None,
            reference=[item.reference for item in step if item.reference is not None] or None,
        )

    def _pieces(self, batch: Batch, max_rows: int, *, is_first: bool) -> list[Batch]:
        """Divide the step into micro-batches, and add data that their own forward passes cannot compute.

        Such data are the log ratios of episodes in several micro-batches, and log-probs without dropout.
        `is_first` is as in `gradient`.
        """
        pieces = list(cut_batch(batch, max_rows))
        spans = self._terms.has_split_units(batch)
        if not (spans or self._drops):
            return pieces
        with torch.no_grad():
            logprobs_N = batch.proximal_logprob_N
            if not is_first:
                own = self._ranks.own_pieces(pieces)
                passes = [(self._scorer.logprobs(piece.packed), counts) for piece, counts in own]
                parts = [logprobs_N.cpu() for logprobs_N, counts in passes if counts]
                logprobs_N = torch.cat(self._ranks.in_order(parts))
            if spans:
                batch = self._terms.with_unit_logs(batch, logprobs_N)
            if self._drops:
                batch = replace(batch, policy_logprob_N=logprobs_N)
            return list(cut_batch(batch, max_rows))

    def _apply(self) -> float:
        """Clip the policy's gradient and take the optimizer step; return the norm before clipping."""
        norm = clip_gradient(self._scorer.model.parameters(), self._table.max_grad_norm)
        if not math.isfinite(norm):
            raise NonFiniteLoss(f"the norm of the gradient is {norm}; the weights are kept")
        if self._head is not None:
            self._head.refuse_non_finite()
        self._optimizer.step()
        if self._head is not None:
            self._head.step(policy_rate=self._rate())
        return norm

    def _zero_grad(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        if self._head is not None:
            self._head.zero_grad()

    def _piece(
        self, batch: Batch, sums: StepSums, first: FirstStep | None, load: "_Load"
    ) -> tuple[Tensor, dict[str, float]]:
        table, experts = self._table, self._scorer.experts
        load.piece = None if experts is None else Routing(experts, experts.coefficient > 0)
        states = self._scorer.states(batch.packed, load.piece)
        logprobs_N = states.logprobs_N
        if first is not None:
            batch = first.scored(batch, logprobs_N)
        batch = to_device(batch, logprobs_N.device)
        loss, metrics = self._terms.of(batch, logprobs_N, states.entropies_N, sums)
        if batch.critic is not None and self._head is not None:
            missed = value_loss(self._head.values(states), batch.critic, clip=table.value_clip)
            loss = loss + table.value_coef * missed
            metrics["value/loss"] = missed.item() / sums.critic
        if experts is not None and experts.coefficient:
            balance = load.loss()
            loss = loss + experts.coefficient * balance
            metrics["loss/router_aux"] = balance.item()
        return loss, metrics

    def _set_learning_rate(self, iterations_done: float) -> None:
        table = self._table
        rate = learning_rate(
            self._step_size.rate,
            progress=min(iterations_done / max(table.iterations, 1), 1.0),
            rise=table.learning_rate_rise,
            final=table.learning_rate_final,
            fall=schedule(table.learning_rate_schedule).fall,
        )
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    def _rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])


@dataclass(slots=True)
class _Load:
    """Counts how many of a step's tokens are routed to each expert. Unused if the model has no experts."""

    tokens: int
    """Number of the step's tokens, without padding."""
    of_step: Tensor | None = None
    """[layers M, experts E], counts over the whole step; None if the loss does not need them."""
    piece: Routing | None = None
    """The routing of the current micro-batch."""
    sent: Tensor | None = None
    """[M, E], counts over this rank's own micro-batches so far."""

    def keep(self) -> None:
        """Add the current micro-batch to `sent`."""
        if self.piece is not None and self.piece.sent:
            sent_ME = torch.stack(self.piece.sent)
            self.sent = sent_ME if self.sent is None else self.sent + sent_ME

    def loss(self) -> Tensor:
        """Compute the current micro-batch's part of the balancing loss."""
        piece = self.piece
        assert piece is not None and piece.probability_E is not None, "it was asked to read them"
        sent_ME = torch.stack(piece.sent) if self.of_step is None else self.of_step
        routed = float(len(sent_ME) * self.tokens)
        return balance_loss(piece.probability_E, sent_ME.sum(dim=0).to(piece.probability_E), routed)

    def sent_by_all(self, ranks: Ranks) -> Tensor | None:
        """Sum `sent` [M, E] over all ranks; return None without counts. All ranks must call this together."""
        own = None if self.sent is None else self.sent.cpu()
        parts = [part for part in ranks.of_every_rank(own) if part is not None]
        return torch.stack(parts).sum(dim=0) if parts else None

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """Return metrics of how evenly the step's tokens are distributed over the experts."""
        sent_ME = None if self.piece is None else self.sent_by_all(ranks)
        return {} if sent_ME is None else load_metrics(sent_ME)


def _or_zeros(scores: Row, segment: Segment) -> Row:
    """Return the scores, or zeros until the step's own forward pass computes them."""
    return scores if len(scores) else np.zeros(len(segment.logprobs), np.float32)
