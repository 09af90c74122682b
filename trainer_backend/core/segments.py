"""Segments: the token sequences that an episode is trained on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from shared_schemas.trajectory import PolicyLogprobs, StepData, exact_tokens
from trainer_backend.errors import SegmentError, place

CONTEXT = -1


@dataclass(frozen=True)
class Segment:
    """One sequence of tokens, as the policy saw and wrote it.

    All five lists run over its L tokens. A token is *sampled* here if it belongs to a decision of this
    segment; every other one is context (prompts, and what earlier segments already trained).

    rollout_id: whose tokens these are.
    token_ids: [L] vocabulary ids.
    decision: [L] t of the decision that sampled the token, from 0; CONTEXT elsewhere.
    logprobs: [L] the sampler's log-prob (nats) at sampled tokens, 0 elsewhere.
    versions: [L] policy version that sampled the token; CONTEXT elsewhere.
    temperatures: [L] temperature of the softmax that the learner scores the token by: that which it was drawn
        at, but for samples of another policy (`segments_of`); 1 elsewhere.
    """

    rollout_id: str
    token_ids: tuple[int, ...]
    decision: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    temperatures: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def loss_mask(self) -> tuple[bool, ...]:
        """[L] True at sampled tokens."""
        return tuple(t != CONTEXT for t in self.decision)

    @cached_property  # asked for some eight times an update, and that was a twentieth of it; so no slots
    def sampled_positions(self) -> tuple[int, ...]:
        """[N] positions of the sampled tokens, in order; never 0, which nothing predicts."""
        count = len(self) - self.decision.count(CONTEXT)
        if CONTEXT not in self.decision[len(self) - count :]:  # one decision after its prompt: no loop
            return tuple(range(len(self) - count, len(self)))
        return tuple(i for i, t in enumerate(self.decision) if t != CONTEXT)


def segments_of(
    steps: Sequence[StepData], *, rollout_id: str, temperature: float | None = None
) -> list[Segment]:
    """The segments of one episode.

    The prompt of a decision is the first `prompt_ids_reused` ids of the previous prompt + response, then
    its own `prompt_token_ids`. Where it reuses all of them, the decision continues the open segment;
    where it reuses fewer (an edited context, a template that drops reasoning, a fresh prompt), a new
    segment opens, and what it reuses is context there. So every sampled token is trained exactly once,
    on the exact view that it was sampled from. A segment in which nothing was sampled is left out.

    Args:
        steps: [T] decisions in order, each with policy_logprobs and sampling.
        rollout_id: named in the segments and in errors.
        temperature: that of the softmax which is trained, where another policy sampled at its own; the
            sampler's log-probs stay as they are. None: what they were sampled at.

    Returns:
        Segments in order of their first decision.

    Raises:
        SegmentError: a decision without token ids or sampling, sampled at temperature 0, or whose lists
            do not fit together; more ids reused than exist; a log-prob that is not finite.

    Source: DESIGN.md section 3, "Token ids in, token ids out", and 4.9.
    """
    segments: list[Segment] = []
    open_segment = _Builder(rollout_id)
    for step in steps:
        where = place(rollout_id, step.turn)
        call = _checked_call(step, where, previous_length=len(open_segment.token_ids))
        sampled_at = _checked_temperature(step, where)
        trained_at = sampled_at if temperature is None else temperature
        if call.prompt_ids_reused < len(open_segment.token_ids):
            segments.append(open_segment.close())
            open_segment = open_segment.reopened(call.prompt_ids_reused)
        open_segment.add(call, decision=step.turn - 1, temperature=trained_at)
    segments.append(open_segment.close())
    return [segment for segment in segments if segment.sampled_positions]


class _Builder:
    """A segment that still grows."""

    def __init__(self, rollout_id: str, context: Sequence[int] = ()) -> None:
        self.rollout_id = rollout_id
        count = len(context)
        self.token_ids = list(context)
        self.decision = [CONTEXT] * count
        self.logprobs = [0.0] * count
        self.versions = [CONTEXT] * count
        self.temperatures = [1.0] * count

    def add(self, call: PolicyLogprobs, *, decision: int, temperature: float) -> None:
        context, count = len(call.prompt_token_ids), len(call.token_ids)
        self.token_ids += call.prompt_token_ids + call.token_ids
        self.decision += [CONTEXT] * context + [decision] * count
        self.logprobs += [0.0] * context + list(call.logprobs)
        self.versions += [CONTEXT] * context + _version_of_each_token(call.versions, count)
        self.temperatures += [1.0] * context + [temperature] * count

    def reopened(self, reused: int) -> "_Builder":
        return _Builder(self.rollout_id, self.token_ids[:reused])

    def close(self) -> Segment:
        return Segment(
            rollout_id=self.rollout_id,
            token_ids=tuple(self.token_ids),
            decision=tuple(self.decision),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            temperatures=tuple(self.temperatures),
        )


def _version_of_each_token(versions: Sequence[tuple[int, int]], count: int) -> list[int]:
    """[count] from runs [[first_token, version], ...]."""
    if len(versions) == 1:
        return [versions[0][1]] * count
    per_token: list[int] = []
    ends = [first for first, _ in versions[1:]] + [count]
    for (first, version), end in zip(versions, ends, strict=False):
        per_token += [version] * (end - first)
    return per_token


def _checked_temperature(step: StepData, where: str) -> float:
    """The temperature of a decision, once it is known to have one that a log-prob can be taken at."""
    if step.sampling is None or step.sampling.temperature <= 0.0:
        found = "no sampling" if step.sampling is None else "temperature 0 (greedy)"
        raise SegmentError(f"{found}; a log-prob needs the temperature of its softmax, above 0", where=where)
    return step.sampling.temperature


def _checked_call(step: StepData, where: str, *, previous_length: int) -> PolicyLogprobs:
    """The model call of a decision, once it is known to be one that can be trained on."""
    call = exact_tokens(step)
    if call is None:
        raise SegmentError(
            f"no exact tokens: policy {step.policy_name!r} samples no tokens, or its server returns "
            "no token ids; reinforcement needs the exact tokens and their log-probs",
            where=where,
        )
    if call.prompt_ids_reused > previous_length:
        raise SegmentError(
            f"reuses {call.prompt_ids_reused} ids of the previous prompt and response, which have "
            f"{previous_length}",
            where=where,
        )
    if call.token_ids and not call.prompt_ids_reused and not call.prompt_token_ids:
        raise SegmentError("an empty prompt; nothing predicts its first sampled token", where=where)
    _check_sampled(call, where)
    return call


def _check_sampled(call: PolicyLogprobs, where: str) -> None:
    if len(call.token_ids) != len(call.logprobs):
        raise SegmentError(f"{len(call.token_ids)} token_ids but {len(call.logprobs)} logprobs", where=where)
    if not all(map(math.isfinite, call.logprobs)):
        i, logprob = next((i, value) for i, value in enumerate(call.logprobs) if not math.isfinite(value))
        raise SegmentError(f"the sampler's log-prob is {logprob}", where=f"{where}, token {i}")
    firsts = [first for first, _ in call.versions]
    count = len(call.token_ids)
    if count and firsts == [0]:
        return  # one version for all, as a rule
    expected_start = [0] if count or firsts else []
    rising = all(a < b for a, b in pairwise([*firsts, max(count, 1)]))
    if firsts[:1] != expected_start or not rising:
        raise SegmentError(
            f"versions start at tokens {firsts}; expected 0 first, then rising, below {count}", where=where
        )
