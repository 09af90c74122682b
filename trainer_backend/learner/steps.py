"""Which segments an optimizer step takes. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer_backend.core.losses import RatioLevel
from trainer_backend.core.segments import CONTEXT, Segment


@dataclass(frozen=True, slots=True)
class Scored:
    """A segment with what stop 8 found: the learner's own log-probs before the first step, [N] each."""

    segment: Segment
    proximal: list[float]


def together(scored: Sequence[Scored], level: RatioLevel) -> list[list[Scored]]:
    """What a step may not part: an episode whose tokens share their ratio, else a segment."""
    if level != "episode":
        return [[item] for item in scored]
    episodes: dict[str, list[Scored]] = {}
    for item in scored:
        episodes.setdefault(item.segment.rollout_id, []).append(item)
    return list(episodes.values())


def in_steps(order: Sequence[Sequence[Scored]], batch_decisions: int) -> Iterator[list[Scored]]:
    """Cut into steps of about `batch_decisions` decisions, as equal as what stays together allows.

    A step of a few left-over decisions would move the weights as far as a full one: so no left-overs.
    """
    decisions = [sum(len(set(item.segment.decision) - {CONTEXT}) for item in items) for items in order]
    count = max(1, round(sum(decisions) / batch_decisions))
    share = sum(decisions) / count
    step: list[Scored] = []
    done = 0.0
    for items, number in zip(order, decisions, strict=True):
        step.extend(items)
        done += number
        if done >= share:
            yield step
            step, done = [], done - share
    if step:
        yield step
