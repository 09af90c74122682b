"""Which segments an optimizer step takes. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainer_backend.core.losses import RatioLevel
from trainer_backend.core.policies import ACTOR
from trainer_backend.core.segments import CONTEXT, Segment


@dataclass(frozen=True, slots=True)
class Scored:
    """A segment with what stop 8 found of its N sampled tokens, before the first step.

    proximal: [N] the learner's own log-probs (nats).
    behaviour: [N] weights to who sampled them (core.behaviour), in [0, cap].
    policy: who that was.
    share: [N] how much each counts of the whole iteration, where its aggregation says so (core.aggregation).
    reference: [N] log-probs (nats) of what a KL term pulls towards; None where there is no such term.
    """

    segment: Segment
    proximal: list[float]
    behaviour: list[float]
    policy: str = ACTOR
    share: Sequence[float] = ()
    reference: list[float] | None = None


def together(scored: Sequence[Scored], levels: Mapping[str, RatioLevel]) -> list[list[Scored]]:
    """What a step may not part: an episode whose tokens share their ratio or weight, else a segment.

    Args:
        levels: of the units of each policy's samples.
    """
    if "episode" not in levels.values():
        return [[item] for item in scored]
    kept: dict[object, list[Scored]] = {}
    for number, item in enumerate(scored):
        whole = levels[item.policy] == "episode"
        kept.setdefault(item.segment.rollout_id if whole else number, []).append(item)
    return list(kept.values())


def in_steps(order: Sequence[Sequence[Scored]], batch_decisions: int) -> Iterator[list[Scored]]:
    """Cut into steps of about `batch_decisions` decisions, as equal as what stays together allows.

    A step of a few left-over decisions would move the weights as far as a full one: so no left-overs.
    """
    decisions = [sum(len(set(item.segment.decision) - {CONTEXT}) for item in items) for items in order]
    left = sum(decisions)
    steps = max(1, round(left / batch_decisions))
    step: list[Scored] = []
    done = 0
    for items, number in zip(order, decisions, strict=True):
        step.extend(items)
        done += number
        # The share is that of what is left: a unit larger than a step takes nothing from the later ones.
        if done and steps > 1 and done * steps >= left:
            yield step
            left, steps = left - done, steps - 1
            step, done = [], 0
    if step:
        yield step
