"""The learner in this process: the model, its optimizer, and the operations of the training loop."""

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from shared_schemas.trajectory import Trajectory
from trainer_backend.core.collate import Packed
from trainer_backend.core.critic import OfEpisode, values_of_episode
from trainer_backend.core.kl_reward import ScoredTokens
from trainer_backend.core.logprobs import chunk_within
from trainer_backend.core.policies import ACTOR
from trainer_backend.core.prompt_lengths import LongPrompt
from trainer_backend.core.seeds import derived_seed
from trainer_backend.core.segments import Segment
from trainer_backend.errors import JobError, UpdateStopped
from trainer_backend.inference.rendering import ChatRenderer
from trainer_backend.inference.served_policy import PolicyFacts
from trainer_backend.learner.adapter_folder import FOLDER, read_adapter, refuse_adapters, take_out
from trainer_backend.learner.attention import (
    SHARE_FROM,
    ByLength,
    PackedAttention,
    PaddedRows,
    attention_for,
)
from trainer_backend.learner.broadcast import WeightSender, checkpoint_tensors, own_address
from trainer_backend.learner.checkpoints import restore_progress, save_checkpoint, save_weights
from trainer_backend.learner.config import LearnerConfig
from trainer_backend.learner.device import Placement, place
from trainer_backend.learner.experts import find_experts
from trainer_backend.learner.fit import less_memory
from trainer_backend.learner.loading import (
    checked_base,
    copy_to_serve,
    held_copy,
    hold_in,
    load_checkpoint,
    load_named,
)
from trainer_backend.learner.lora import refuse_experts
from trainer_backend.learner.operators import operators_for
from trainer_backend.learner.optimizer import make_adamw
from trainer_backend.learner.own_critic import OwnCritic
from trainer_backend.learner.ranks import ALONE, Ranks
from trainer_backend.learner.scoring import Scorer, read_pieces, refuse_unknown, score_by
from trainer_backend.learner.sharding import gathered_copy, shard
from trainer_backend.learner.shares import checksum_model
from trainer_backend.learner.step_size import StepSize
from trainer_backend.learner.stepping import checkpoint_layers, memory_watched
from trainer_backend.learner.support import refuse_unsupported
from trainer_backend.learner.update import LogprobCache, PolicyUpdate, Reference
from trainer_backend.learner.value_head import ValueHead
from trainer_backend.learner.warmup import demonstrations, prompt_texts, tool_word_ids, tool_words, warm_up
from trainer_backend.models import build_preset, train_tokenizer
from trainer_backend.models.allowed_tokens import allow_only, read_allowed
from trainer_backend.models.folder import embedding_rows
from trainer_backend.models.kinds import logit_map, own_attention, read_head_dim
from trainer_backend.models.part_attention import why_no_parts
from trainer_backend.parts import CreditedEpisode, Hardware, Progress, WeightPart
from trainer_backend.rundir.checkpoint_paths import CRITIC_FILE, STARTED_FROM, TRAINING_FOLDER
from trainer_backend.rundir.digests import read_digest

log = structlog.get_logger(__name__)

# A server that hangs makes a pass over the weights fail; the other servers load them in the next pass.
_PASSES = 3


class LocalLearner:
    """Trains the policy on this machine, on the device that the job's `model.device` names.

    Not thread-safe: make one call at a time. With several `ranks`, each rank holds a share of the weights,
    and all ranks must make the same calls.

    Args:
        started_from: the checkpoint with the reference policy of the KL; None: the reference is the policy at
            the first update.
        adapter_folder: the folder with the adapters to load; None: adapters are new.
    """

    def __init__(
        self,
        config: LearnerConfig,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        *,
        started_from: Path | None = None,
        adapter_folder: Path | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        why_apart = refuse_unsupported(model, longest=config.inference.max_model_len)
        self.config, self.model, self.tokenizer, self._ranks = config, model, tokenizer, ranks
        training, placement = config.training, place(config.model.device)
        experts = find_experts(model, training)  # before a shard changes the model's class
        # With adapters, the model's own weights are not trained and can be held in low precision.
        hold_in(model, torch.float32 if config.lora is None else placement.held)
        if not ranks.are_several:
            model.to(placement.device)  # type: ignore[arg-type]
        self._adapter = None
        if config.lora is not None:
            from trainer_backend.learner.adapter import Adapter  # peft: half a second of a start

            table, seed = config.model, derived_seed(config.seed, "lora")
            base = table.name if table.path is None else str(table.path.resolve())
            refuse_experts(model, config.lora, engine=config.inference.engine, ranks=ranks.count)
            self._adapter = Adapter.fresh(model, config.lora, seed=seed, base=base)
        if self._adapter is not None and adapter_folder is not None:
            self._adapter.restore(adapter_folder)
        checkpoint_layers(model, training.gradient_checkpointing)
        self._checksum = checksum_model(model, tokenizer) if ranks.are_several else 0
        if ranks.are_several:
            shard(model, ranks, config.ranks, placement.device)
        scorer = build_scorer(model, placement, training.logits_chunk_tokens, ranks, why_apart)
        # Shared prefixes would share dropout masks too, and would count once in the routers' loss.
        drops = config.lora is not None and config.lora.dropout > 0
        is_apart = not training.share_prefixes or drops or (experts is not None and experts.coefficient > 0)
        shares = not is_apart and scorer.attention.takes_tries
        if not is_apart and not shares and isinstance(scorer.attention, ByLength):
            log.warning("learner_shares_no_prefixes", reason=why_no_parts())
        self.scorer = replace(scorer, experts=experts, share_from=SHARE_FROM if shares else None)
        log.info("learner_computes_by", **self.scorer.describe())
        self._reference = None if started_from is None else self._make_reference(started_from)
        rate, decay, epsilon = training.learning_rate, training.weight_decay, training.adam_epsilon
        self._optimizer = make_adamw(model, rate, decay, epsilon=epsilon, offload=training.optimizer_offload)
        self._step_size = StepSize(training, config.seed, ranks)
        level = config.value_level
        self._head: ValueHead | None = None
        self._critic: OwnCritic | None = None  # made later, as a copy of the policy at the start of RL
        if level is not None and training.critic == "head":
            self._head = ValueHead(model.config.hidden_size, placement.device, training, level)
        self._cache = LogprobCache()  # of `values` and `score`, until the next update
        self._sender: WeightSender | None = None
        self._is_on_offer = False
        self._weights_rest = threading.Lock()  # held during an update, and while weights are sent

    @classmethod
    def fresh(
        cls,
        config: LearnerConfig,
        prompts: Sequence[Trajectory],
        tokenizer: PreTrainedTokenizerFast | None = None,
        ranks: Ranks = ALONE,
    ) -> "LocalLearner":
        """Make a learner for a new run, with the model that the job's table [model] names.

        A preset uses `tokenizer`, which belongs to a fixed policy; None: a tokenizer is trained on `prompts`.
        """
        table = config.model
        if table.preset is not None and tokenizer is None:
            texts, words = prompt_texts(prompts), tool_words(prompts)
            tokenizer = train_tokenizer(texts, table.vocab_size, whole_words=words)

        def make() -> LocalLearner:
            # For the dropout of adapters; a checkpoint stores the state of this generator.
            torch.manual_seed(derived_seed(config.seed, "torch"))
            if table.preset is None or tokenizer is None:
                return cls(config, *load_named(table), ranks=ranks)
            model = build_preset(table.preset, tokenizer, seed=config.seed)
            if table.only_tool_words:
                allow_only(model, tool_word_ids(prompts, tokenizer))
            return cls(config, model, tokenizer, ranks=ranks)

        learner = ranks.in_turns(make)
        learner._refuse_other_models()
        return learner

    @classmethod
    def resumed(
        cls, config: LearnerConfig, checkpoint: Path, ranks: Ranks = ALONE
    ) -> "tuple[LocalLearner, Progress]":
        """Restore a learner from a checkpoint: model, optimizer, critic and RNG; return it with its progress.

        The reference policy of the KL and the base model of adapters are read from the checkpoint iteration_0
        of the same run, which was written at the start of RL.
        """
        started_from = checkpoint.with_name(STARTED_FROM)
        reference = started_from if config.training.needs_reference else None

        def make() -> LocalLearner:
            if config.lora is None:
                refuse_adapters(checkpoint)
                loaded, adapters = load_checkpoint(config.model, checkpoint), None
            else:
                checked_base(checkpoint)
                loaded, adapters = load_checkpoint(config.model, started_from), checkpoint / FOLDER
                take_out(loaded[0], started_from / FOLDER)
            learner = cls(config, *loaded, started_from=reference, adapter_folder=adapters, ranks=ranks)
            # The stored head of an own critic reads the critic's states, not the policy's.
            if learner._head is not None and not (checkpoint / TRAINING_FOLDER / CRITIC_FILE).exists():
                learner._head.restore(checkpoint)
            return learner

        learner = ranks.in_turns(make)
        learner._refuse_other_models()
        if config.has_own_critic:
            learner._own_critic().restore(checkpoint)
        learner._step_size.restore(checkpoint / TRAINING_FOLDER)
        return learner, restore_progress(checkpoint, learner._optimizer, ranks)

    @cached_property
    def _renderer(self) -> ChatRenderer:
        return ChatRenderer(self.tokenizer)

    def _own_critic(self) -> OwnCritic:
        level, training = self.config.value_level, self.config.training
        if self._critic is None:
            assert level is not None, "asked only where the estimator needs values"
            self._critic = OwnCritic(
                self.scorer, training, level, seed=self.config.seed, ranks=self.config.ranks
            )
        return self._critic

    def _refuse_other_models(self) -> None:
        """Raise JobError if the ranks have loaded different models or vocabularies."""
        samples = self._ranks.of_every_rank(self._checksum)
        if other := next((rank for rank, sample in enumerate(samples) if sample != samples[0]), 0):
            raise JobError(
                f"rank {other} of the learner has loaded a model or vocabulary other than that of rank 0",
                where="[model]",
                hint="Every node needs the same files: one disk, or the same revision in each cache.",
            )

    def _draw_apart(self, iteration: int) -> None:
        """Seed torch's generator by iteration, on all ranks except the first.

        The generator of the first rank is not seeded, because checkpoints store its state.
        """
        if not self._ranks.is_first:
            torch.manual_seed(derived_seed(self.config.seed, "torch", self._ranks.index, iteration))

    def warm_up(self, episodes: Sequence[Trajectory], tell: Callable[[int, int], None]) -> dict[str, float]:
        """Train the policy to imitate the teacher's `episodes`, before RL; see `learner.warmup`."""
        table, training = self.config.warmup, self.config.training
        if table is None:
            raise JobError("the job has no [warmup]")
        torch.set_num_threads(training.threads)
        segments = demonstrations(
            episodes,
            self._renderer,
            min_outcome_reward=table.min_outcome_reward,
            allowed=read_allowed(self.model.config),
        )
        self.model.train()
        self._draw_apart(0)
        with self._watched("the warm-up ran out of memory"):
            metrics = warm_up(self.scorer, segments, table, training, seed=self.config.seed, tell=tell)
        self.model.train(False)
        if self._adapter is not None:
            self._adapter.begin()
        return metrics

    @contextmanager
    def _watched(self, doing: str) -> Iterator[None]:
        """Run the context in `memory_watched`; then free memory if vLLM needs it (inference.sleep)."""
        try:
            with memory_watched(doing, hint=less_memory(self.config)):
                yield
        finally:
            if self.config.inference.sleep:
                for part in (self._optimizer, self._head, self._critic):
                    if part is not None:
                        part.zero_grad()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()

    def values(self, episodes: Mapping[str, Sequence[Segment]]) -> dict[str, OfEpisode]:
        """Compute the critic's values of each episode, by rollout id.

        There is one value per decision or per token, depending on the job's advantage estimator.
        """
        torch.set_num_threads(self.config.training.threads)
        segments = [segment for parts in episodes.values() for segment in parts]
        level = self.config.value_level
        assert level is not None, "asked only where the estimator needs values"
        with self._watched("scoring the values ran out of memory"):
            if (head := self._head) is None:
                values = self._own_critic().values(segments)
            else:  # the pass also computes log-probs, which are kept
                refuse_unknown(segments, self.model)
                values, logprobs = read_pieces(
                    segments,
                    self.scorer.states,
                    lambda states: (head.scored(states), states.logprobs_N),
                    self.config.training,
                    self.scorer,
                )
                self._cache.proximal.update(_by_episode(episodes, logprobs))
                head.settle(self._ranks)
        rows = _by_episode(episodes, values)
        return {name: values_of_episode(parts, rows[name], level=level) for name, parts in episodes.items()}

    def score(self, episodes: Mapping[str, Sequence[Segment]]) -> dict[str, ScoredTokens]:
        """Compute the log-probs of sampled tokens under the policy and the reference, by rollout id."""
        torch.set_num_threads(self.config.training.threads)
        known, reference = self._cache.proximal, self._cache.reference
        new = {name: parts for name, parts in episodes.items() if name not in known}
        with self._watched("scoring the log-probs ran out of memory"):
            known.update(self._logprobs(new, self.scorer.logprobs))
            reference.update(self._logprobs(episodes, self._held_reference()))
        return {
            name: ScoredTokens.of(parts, known[name], reference[name]) for name, parts in episodes.items()
        }

    def _logprobs(
        self, episodes: Mapping[str, Sequence[Segment]], policy: Reference
    ) -> dict[str, list[NDArray[Any]]]:
        """Compute the [N] log-probs of each segment's sampled tokens under `policy`, by rollout id."""
        if not episodes:
            return {}
        segments = [segment for parts in episodes.values() for segment in parts]
        refuse_unknown(segments, self.model)
        return _by_episode(episodes, score_by(policy, segments, self.config.training, self.scorer))

    def update(
        self, episodes: Sequence[CreditedEpisode], *, iteration: int, policy_version: int | None = None
    ) -> dict[str, float]:
        """Update the policy (`learner.update`) and the OwnCritic, if there is one; return the metrics."""
        torch.set_num_threads(self.config.training.threads)
        self._draw_apart(iteration)
        cache, self._cache = self._cache, LogprobCache()
        with self._weights_rest, self._watched("the update ran out of memory"):
            was_on_offer, self._is_on_offer = self._is_on_offer, False
            sender, self._sender = self._sender, None
            metrics = self._update_policy(episodes, iteration, policy_version, cache)
            if self.config.has_own_critic:
                metrics |= self._fit_critic(episodes, iteration, steps=int(metrics["optim/steps"]))
            if not metrics["optim/steps"]:  # the offered weights are still current
                self._is_on_offer, self._sender = was_on_offer, sender
        return metrics

    def _update_policy(
        self,
        episodes: Sequence[CreditedEpisode],
        iteration: int,
        policy_version: int | None,
        cache: LogprobCache,
    ) -> dict[str, float]:
        """Run the policy's optimizer steps.

        Takes no step while an OwnCritic warms up, or if `skip_certain_above` leaves no segment to train on.
        """
        training, share, metrics = self.config.training, 1.0, dict[str, float]()
        if training.skip_certain_above is not None:
            numbers = uncertain_segments(episodes, training.skip_certain_above)
            rest, cache = select_segments(episodes, numbers), cache.part(numbers)
            share = _tokens(rest) / _tokens(episodes)
            episodes, metrics = rest, {"optim/certain_frac": 1.0 - share}
        warms_up = self.config.has_own_critic and self._own_critic().iterations < training.critic_warmup
        if warms_up or not episodes:
            return metrics | {"optim/steps": 0.0, "optim/steps_skipped": 0.0}
        return metrics | self.policy_update(share).run(
            episodes, iteration=iteration, policy_version=policy_version, cache=cache
        )

    def _fit_critic(
        self, episodes: Sequence[CreditedEpisode], iteration: int, *, steps: int
    ) -> dict[str, float]:
        """Train the OwnCritic for one iteration.

        `steps` is the number of steps that the policy has taken. The attribute `steps_taken` of an
        UpdateStopped error is the sum of these steps and the critic's.
        """
        critic = self._own_critic()
        before = critic.steps
        try:
            with memory_watched("the critic ran out of memory", hint=less_memory(self.config)):
                return critic.fit(episodes, iteration)
        except UpdateStopped as error:
            error.steps_taken = steps + critic.steps - before
            raise

    def policy_update(self, share: float = 1.0) -> PolicyUpdate:
        """Prepare a policy update that trains on this `share` of the iteration's sampled tokens."""
        reference = None if self.config.training.kl_coef == 0 else self._held_reference()
        parts = self.scorer, self._optimizer, self.config
        head, step_size = self._head, self._step_size
        return PolicyUpdate(*parts, reference=reference, head=head, share=share, step_size=step_size)

    def save(self, folder: Path, progress: Progress) -> None:
        """Write a complete checkpoint, or raise CheckpointError and write nothing."""
        table, base = self.config.lora, folder.with_name(STARTED_FROM)
        whole = table is None or table.merged_checkpoints or folder == base or read_digest(base) is None
        save_checkpoint(
            folder,
            model=self.model,
            tokenizer=self.tokenizer,
            optimizer=self._optimizer,
            progress=progress,
            adapter=self._adapter,
            critic=self._critic or self._head,
            step_size=self._step_size,
            base=None if whole else base,
            ranks=self._ranks,
        )

    def publish(self, folder: Path, part: WeightPart = "whole") -> None:
        save_weights(folder, self.model, self.tokenizer, self._adapter, part, self._ranks)

    def offer(self, peer: str) -> tuple[str, int]:
        """Offer the current weights to vLLM servers; see `parts.Learner`."""
        with self._weights_rest:
            self._ranks.first_alone(lambda: self._open_sender(own_address(peer)))
            self._is_on_offer = True
            return ("", 0) if self._sender is None else self._sender.address

    def _open_sender(self, host: str) -> None:
        backend = "nccl" if self.scorer.placement.device.type == "cuda" else "gloo"
        # The other ranks wait in a collective while this one waits for a server.
        timeout_s = min(self.config.inference.replica_wait_s, self.config.ranks.timeout_s) / _PASSES
        self._sender = WeightSender(host, backend=backend, timeout_s=timeout_s)

    def broadcast(self, expected: int, wait_s: float, tell: Callable[[int, int], None]) -> int:
        """Send the offered weights to vLLM servers; see `parts.Learner`. Waits until no update is running.

        The first rank decides when servers are ready and sends the weights. All ranks take part, because each
        tensor is gathered from all of them.
        """
        with self._weights_rest:
            served, since = 0, time.monotonic()
            while self._is_on_offer and served < expected:
                sender = self._sender
                ready = 0 if sender is None else sender.ready(expected - served, since)
                is_over = time.monotonic() - since > wait_s
                ready, is_over = self._ranks.of_every_rank((ready, is_over))[0]
                if ready:
                    weights = checkpoint_tensors(self.model, self.scorer.placement)
                    count = sum(0 for _ in weights) if sender is None else sender.send(weights)
                    served, since = served + self._ranks.of_every_rank(count)[0], time.monotonic()
                elif is_over:
                    break
                else:
                    tell(served, expected)
            return served

    def find_long(self, conversations: Sequence[Sequence[Mapping[str, Any]]], most: int) -> list[LongPrompt]:
        return self._renderer.find_long(conversations, most)

    def score_ids(self, ids: Sequence[int]) -> list[float]:
        """Return the log-probs of ids[1:] under the policy, each given all ids before it."""
        length = len(ids)
        segment = Segment.of("", ids, logprobs=[0.0] * (length - 1), spans=[(1, length, 0, 0, 1.0)])
        with self._watched("scoring a prompt ran out of memory"):
            (logprobs,) = self._logprobs({"": [segment]}, self.scorer.logprobs).values()
        found: list[float] = logprobs[0].tolist()
        return found

    def hardware(self) -> Hardware:
        return place(self.config.model.device).hardware()

    def facts(self) -> PolicyFacts:
        """Return what an engine or server of the policy needs to know in addition to the weights."""
        return PolicyFacts.of_model(self.config.model, self.model, self.tokenizer)

    def weights(self) -> dict[str, Tensor]:
        """Return the current weights for an engine to copy; with adapters, only the adapters' weights."""
        if self._adapter is not None:
            return self._adapter.weights()
        return {name: tensor.detach() for name, tensor in self.model.state_dict().items()}

    def copy_to_serve(self) -> PreTrainedModel:
        """Copy the model for a local engine, on the same device and in the precision of serving.

        For later versions of the policy, the engine copies `weights()` into this model.
        """
        return copy_to_serve(self.model, self.scorer.placement.held)

    def _held_reference(self) -> Reference:
        if self._reference is None:
            self._reference = self._make_reference()
        return self._reference

    def _make_reference(self, folder: Path | None = None) -> Reference:
        """Make the reference policy from the checkpoint `folder`; if None, from the current policy."""
        adapter, scorer = self._adapter, self.scorer
        if adapter is not None:
            weights = adapter.copied(None if folder is None else read_adapter(folder / FOLDER))

            def with_weights(packed: Packed) -> Tensor:
                with adapter.replaced(weights):
                    return scorer.logprobs(packed)

            return with_weights
        if folder is not None:
            model = load_checkpoint(self.config.model, folder)[0]
        else:
            model = gathered_copy(self.model) if self._ranks.are_several else self.model
        held = frozen_scorer(scorer, model)
        if self._ranks.are_several:
            # Without a backward pass, weights gathered for a forward pass would never be freed.
            table = self.config.ranks.model_copy(update={"fsdp_reshard_after_forward": True})
            shard(held.model, self._ranks, table, scorer.placement.device)
        return held.logprobs


def uncertain_segments(episodes: Sequence[CreditedEpisode], probability: float) -> dict[str, list[int]]:
    """Return the indices of the segments that are worth training on, by rollout id.

    A segment is left out if the actor sampled it and each of its tokens had a probability p above
    `probability`. The gradient of such a token is small, because it is proportional to 1 - p. Its computation
    costs as much as that of any other gradient. docs/credit.md describes the bias.

    Source: Wang et al., Beyond the 80/20 Rule, arXiv:2506.01939, who select tokens by entropy.
    """
    least = math.log(probability)
    return {
        item.rollout_id: [
            number
            for number, segment in enumerate(item.segments)
            if item.policy != ACTOR or segment.logprobs.min() <= least
        ]
        for item in episodes
    }


def select_segments(
    episodes: Sequence[CreditedEpisode], numbers: Mapping[str, Sequence[int]]
) -> list[CreditedEpisode]:
    """Return the episodes with only the segments of these indices; omit episodes that have none."""
    return [
        replace(item, segments=[item.segments[number] for number in numbers[item.rollout_id]])
        for item in episodes
        if numbers[item.rollout_id]
    ]


def _by_episode(
    episodes: Mapping[str, Sequence[Segment]], rows: Iterable[NDArray[Any]]
) -> dict[str, list[NDArray[Any]]]:
    """Group `rows` by rollout id. There is one row per segment, in the order of `episodes`."""
    rest = iter(rows)
    return {name: list(islice(rest, len(parts))) for name, parts in episodes.items()}


def _tokens(episodes: Sequence[CreditedEpisode]) -> int:
    return sum(len(segment.logprobs) for item in episodes for segment in item.segments)


def build_scorer(
    model: PreTrainedModel,
    placement: Placement,
    logits_chunk: int | None = None,
    ranks: Ranks = ALONE,
    why_apart: str | None = None,
) -> Scorer:
    """Build the scorer of a model: choose its attention, its operators, and the size of a chunk of logits.

    `why_apart` is the reason why each segment needs its own row (`support.refuse_unsupported`). If it is
    None, segments are packed into common rows.
    """
    attention: PackedAttention
    if why_apart is None:  # never eager, which would add a boolean mask to its scores
        attention = attention_for(placement, head_dim=read_head_dim(model.config.get_text_config()))
    else:
        attention = PaddedRows(own_attention(model), why_apart, ranks)
    model.set_attn_implementation(attention.implementation)
    logits = logit_map(model.config)
    # The derivative of a logit cap takes a third more memory.
    budget = placement.logits_bytes() * (3 if logits.cap is not None else 4) // 4
    fits = chunk_within(budget, embedding_rows(model))
    operators = operators_for(placement, model.config)
    return Scorer(model, placement, attention, logits_chunk or fits, ranks, operators, logits=logits)


def frozen_scorer(scorer: Scorer, model: PreTrainedModel) -> Scorer:
    """Make a scorer of a frozen copy of `model`, on the device and with the settings of `scorer`."""
    copied = held_copy(model, scorer.placement.held)
    if not scorer.ranks.are_several:  # otherwise `shard` distributes it
        copied.to(scorer.placement.device)  # type: ignore[arg-type]
    copied.set_attn_implementation(scorer.attention.implementation)
    return replace(scorer, model=copied)
