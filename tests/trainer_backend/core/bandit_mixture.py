"""A bandit in which a fixed policy samples beside the actor: the objectives of a mixture without a model.

An arm is a combination of a lock: T dials, each turned to one of K numbers, and 1 is paid where all are
right. The actor is T softmaxes, uniform at first, and learns as a job does: siblings are compared with each
other, and AdamW takes a few steps by the objective of who sampled. All of it follows from its arguments.

With one dial a fixed policy brings nothing in expectation: its weights make its gradient the actor's own.
With several, weights by the token let the actor learn on each dial beside the others as a good policy turns
them, together as it would never see them by itself. That is the bias of token weights at work; weights by the
episode have none, and learn no faster here than the actor alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer_backend.core.allocation import DrawnSchedule
from trainer_backend.core.behaviour import WeightKeys, behaviour_weights
from trainer_backend.core.losses import ClipKeys, clipped_policy_loss
from trainer_backend.core.objective import Objective, ObjectiveKind, Tokens
from trainer_backend.core.policies import ACTOR


@dataclass(frozen=True, slots=True)
class Lock:
    """A small job: a lock that opens at one number.

    Attributes:
        dials: T; 0 is right on each.
        numbers: K of each dial.
        fixed: [K] how likely the fixed policy turns a dial to each number; the same for all dials, none 0, so
            that no combination is out of its weights' reach.
        kind: by which its samples train.
        weighting: of its samples.
        group: samples of an iteration, all siblings.
        steps, learning_rate: of an iteration; AdamW's.
    """

    dials: int
    numbers: int
    fixed: Sequence[float]
    kind: ObjectiveKind = "decoupled"
    weighting: WeightKeys = field(default_factory=WeightKeys)
    group: int = 16
    steps: int = 2
    learning_rate: float = 0.05


def leaning(numbers: int, towards: int, *, share: float = 0.9) -> list[float]:
    """[K] a policy that picks one number with this probability, and the others with equal ones."""
    rest = (1.0 - share) / numbers
    return [share + rest if number == towards else rest for number in range(numbers)]


def learned(lock: Lock, schedule: DrawnSchedule, iterations: int) -> list[float]:
    """[iterations] the exact probability that the actor opens the lock after each iteration.

    Args:
        schedule: who draws each sample; its seed is that of the draws too.
    """
    generator = torch.Generator().manual_seed(schedule.seed)
    logits_TK = torch.zeros(lock.dials, lock.numbers, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.AdamW([logits_TK], lr=lock.learning_rate, weight_decay=0.0)
    found = []
    for iteration in range(1, iterations + 1):
        chosen = schedule.choices(iteration, [(i,) for i in range(lock.group)])
        own_G = torch.tensor([policy == ACTOR for policy in chosen])
        _iterate(lock, logits_TK, optimizer, own_G, generator)
        found.append(logits_TK.detach().log_softmax(dim=1)[:, 0].sum().exp().item())
    return found


def _iterate(
    lock: Lock, logits_TK: Tensor, optimizer: torch.optim.Optimizer, own_G: Tensor, generator: torch.Generator
) -> None:
    """Sample a group, compare its members, and take the steps."""
    proximal_TK = logits_TK.detach().log_softmax(dim=1)
    fixed_TK = torch.tensor(lock.fixed, dtype=torch.float64).log().expand_as(proximal_TK)
    sampler_GTK = torch.where(own_G[:, None, None], proximal_TK, fixed_TK)
    drawn = torch.multinomial(sampler_GTK.exp().flatten(0, 1), 1, generator=generator)
    turned_GT1 = drawn.view(lock.group, lock.dials, 1)
    opened_G = (turned_GT1 == 0).all(dim=1).squeeze(1).double()
    advantages_G = opened_G - opened_G.mean()

    def said(logprobs: Tensor) -> Tensor:
        """[N] log-probs of the picked numbers, sample by sample."""
        return logprobs.expand_as(sampler_GTK).gather(2, turned_GT1).flatten()

    for _ in range(lock.steps):
        now = said(logits_TK.log_softmax(dim=1))
        columns = (now, said(proximal_TK), said(sampler_GTK), advantages_G.repeat_interleave(lock.dials))
        losses = [
            _loss(kind, lock, columns, chosen_G.repeat_interleave(lock.dials))
            for kind, chosen_G in (("decoupled", own_G), (lock.kind, ~own_G))
            if chosen_G.any()
        ]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()


def _loss(kind: ObjectiveKind, lock: Lock, columns: Sequence[Tensor], chosen_N: Tensor) -> Tensor:
    """The loss of one policy's samples; all tokens of the step have equal weight."""
    logprobs, proximal, behaviour, advantages = columns
    units = torch.arange(len(advantages)) // (
        1 if lock.weighting.behaviour_weight_level == "token" else lock.dials
    )
    objective = Objective(kind, clipped_policy_loss, ClipKeys(clip_high=0.2), "token", lock.weighting)
    tokens = Tokens(
        logprobs=logprobs,
        proximal_logprobs=proximal,
        behaviour_logprobs=behaviour,
        advantages=advantages,
        weights=torch.full_like(advantages, 1.0 / len(advantages)),
        behaviour_weights=behaviour_weights(proximal, behaviour, units, lock.weighting),
        units=units,
    ).at(chosen_N)
    return objective.surrogate(tokens, objective.unit_logs(tokens))
