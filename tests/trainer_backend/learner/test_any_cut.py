"""A gradient is the same, to 1e-6 of its size, however a step is cut into pieces or a pass into steps.

It is so, too, where what segments begin with is computed once.
"""

from dataclasses import replace
from itertools import cycle, product

import pytest
import torch

from tests.trainer_backend.learner.hand_made import find_gradient, make_learner, segment
from trainer_backend.core.aggregation import AggregationPlug
from trainer_backend.core.critic import ByToken, make_targets
from trainer_backend.learner.update import PolicyUpdate
from trainer_backend.parts import CreditedEpisode
from trainer_backend.plugins import AGGREGATIONS, LOSSES

LENGTHS = [(3, 2), (9, 4), (5, 1), (12, 7), (4, 3), (30, 5), (7, 6), (2, 8)]
# Tokens of a row and of a piece, and whether beginnings are shared.
CUTS = [(16, 64, False), (200, 400, False), (35, 64, True)]
RULES = [20 + 3 * j % 40 for j in range(32)]


def episodes(*, values: str | None) -> list[CreditedEpisode]:
    """`values`: a critic's are by this level; None: it has no targets."""
    made = []
    for i, (prompt, answer) in enumerate(LENGTHS):
        rules = RULES[: 16 * (i % 3)]  # of the second level of a trie, the first, or none
        ids = [*rules, *(20 + (7 * i + j) % 40 for j in range(prompt + answer))]
        prompt += len(rules)
        part = segment(f"r{i}", ids[:prompt], ids[prompt:], [-2.0 - 0.1 * j for j in range(answer)])
        advantages = [(-1.0) ** i * (1 + i / 4)]
        critic = make_targets([0.5], advantages) if values else None
        if values == "token":
            critic = make_targets(
                ByToken([[0.5] * answer]), ByToken([[advantages[0] + j for j in range(answer)]])
            )
        made.append(CreditedEpisode(f"r{i}", [part], advantages, critic))
    return made


def gradient(tokenizer, cut, **settings) -> tuple[torch.Tensor, float]:
    """Of one step over all episodes, from weights and proximal log-probs that are equal for every cut.

    With the loss of a critic, 0 without one.
    """
    row_tokens, micro_batch_tokens, is_shared = cut
    learner = make_learner(
        tokenizer,
        training__row_tokens=row_tokens,
        training__micro_batch_tokens=micro_batch_tokens,
        training__share_prefixes=is_shared,
        **settings,
    )
    head = learner._head
    given = episodes(values=learner.config.value_level)
    if head is not None:
        head._weight_D.data.fill_(0.05)  # fresh it is 0, and its loss reaches nothing
    # As after some steps: ratios are about 1, and some are held. An untrained model says -5.7 or so.
    known = {
        item.rollout_id: [
            [-5.7 + 0.3 * (-1) ** j for j in range(len(part.logprobs))] for part in item.segments
        ]
        for item in given
    }
    of_policy, metrics = find_gradient(learner, given, known)
    of_head = () if head is None else (weight.grad.flatten() for weight in head.trained.values())
    return torch.cat([of_policy, *of_head]).double(), 0.0 if head is None else metrics["value/loss"]


def assert_equal_for_every_cut(tokenizer, **settings):
    (first, missed), *others = (gradient(tokenizer, cut, **settings) for cut in CUTS)
    assert first.norm() > 1e-3
    for (_, _, is_shared), (other, also_missed) in zip(CUTS[1:], others, strict=True):
        assert also_missed == pytest.approx(missed, abs=1e-5)
        # Sums in another order: either way lies about 1e-6 from float64.
        assert ((other - first).norm() / first.norm()).item() < (2e-6 if is_shared else 1e-6)


LEVELS = ["token", "decision", "episode"]


@pytest.mark.parametrize(
    ("loss", "level"), sorted({*zip(LOSSES, cycle(LEVELS)), *product(["clipped"], LEVELS)})
)
def test_for_every_loss_and_level_of_ratio(tokenizer, loss, level):
    assert_equal_for_every_cut(tokenizer, algorithm__loss=loss, algorithm__ratio_level=level)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_for_every_aggregation_with_entropy_and_a_kl(tokenizer, aggregation):
    assert_equal_for_every_cut(
        tokenizer, training__aggregation=aggregation, training__entropy_coef=0.1, training__kl_coef=0.1
    )


@pytest.mark.parametrize(
    ("advantage", "clip"), [("gae", {}), ("gae", {"training__value_clip": 0.5}), ("gae_token", {})]
)
def test_with_a_critic_whose_loss_reaches_the_policy(tokenizer, advantage, clip):
    assert_equal_for_every_cut(
        tokenizer, algorithm__advantage=advantage, training__value_trunk_gradient=True, **clip
    )


@pytest.mark.parametrize(("critic", "returns"), [("head", None), ("own", 1.0)])
def test_a_critic_learns_the_same_whether_beginnings_are_shared(tokenizer, critic, returns):
    losses = []
    for is_shared in (False, True):
        learner = make_learner(
            tokenizer,
            algorithm__advantage="gae",
            training__critic=critic,
            training__share_prefixes=is_shared,
        )
        given = [
            replace(item, critic=make_targets([0.5], item.advantages if returns is None else [returns]))
            for item in episodes(values=None)
        ]
        losses.append([learner.update(given, iteration=1 + n)["value/loss"] for n in range(2)])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert losses[0][1] < losses[0][0]


class Recorder(torch.optim.Optimizer):
    """Takes no step, so that all gradients are those of the same weights, and keeps each of them."""

    def __init__(self, model) -> None:
        super().__init__(model.parameters(), {"lr": 0.0})
        self.gradients: list[torch.Tensor] = []

    def step(self, closure=None) -> None:
        weights = [weight for group in self.param_groups for weight in group["params"]]
        self.gradients.append(torch.cat([weight.grad.flatten() for weight in weights]).double())


def long_and_short() -> list[CreditedEpisode]:
    """Episodes of five, one and two decisions with prompts of their own, so of as many segments."""
    made = []
    for i, decisions in enumerate([5, 1, 2]):
        parts = [
            segment(
                f"r{i}", [5 + t, 6, 7 + i], [20 + t + k for k in range(1 + t % 3)], [-5.7] * (1 + t % 3), t
            )
            for t in range(decisions)
        ]
        made.append(CreditedEpisode(f"r{i}", parts, [(-1.0) ** t * (1 + i / 2) for t in range(decisions)]))
    return made


def gradients_of_passes(tokenizer, batch_decisions, **settings) -> list[list[torch.Tensor]]:
    """Of each step of each of two passes over `long_and_short`."""
    learner = make_learner(
        tokenizer,
        **settings,
        training__batch_decisions=batch_decisions,
        training__update_passes=2,
        training__max_grad_norm=1e9,
        training__entropy_coef=0.1,
    )
    recorder = Recorder(learner.model)
    PolicyUpdate(learner.scorer, recorder, learner.config).run(long_and_short(), iteration=1)
    half = len(recorder.gradients) // 2
    return [recorder.gradients[:half], recorder.gradients[half:]]


@pytest.mark.parametrize("aggregation", ["episode_equal", "constant"])
def test_the_steps_of_a_pass_add_up_to_the_iteration_however_it_is_cut(tokenizer, aggregation):
    settings = {"training__aggregation": aggregation}
    (whole,), (again,) = gradients_of_passes(tokenizer, 64, **settings)
    assert ((again - whole).norm() / whole.norm()).item() < 1e-6
    for batch_decisions in (1, 3):
        for steps in gradients_of_passes(tokenizer, batch_decisions, **settings):
            assert len(steps) > 1
            # a step of `episode_equal` weighs 1, whatever their number; one of `constant` what is in it
            total = sum(steps) / (len(steps) if aggregation == "episode_equal" else 1)
            assert ((total - whole).norm() / whole.norm()).item() < 1e-6


def test_constant_divides_by_the_plan_whatever_was_played(tokenizer):
    # 13 tokens were sampled. Of 8 planned episodes of 8 decisions of 8 tokens at most the plan is 512 tokens.
    ((mean,), _), ((planned,), _), ((given,), _) = (
        gradients_of_passes(tokenizer, 64, **settings)
        for settings in (
            {"training__aggregation": "token_mean"},
            {"training__aggregation": "constant"},
            {"training__aggregation": "constant", "training__constant_tokens": 3},
        )
    )
    torch.testing.assert_close(planned * 512, mean * 13, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(given * 8 * 3, mean * 13, rtol=1e-4, atol=1e-5)


def test_a_step_in_which_no_token_has_a_weight_changes_nothing(tokenizer, monkeypatch):
    plug = AggregationPlug(lambda segments, keys: [0.0 * part.logprobs for part in segments], over="plan")
    monkeypatch.setitem(AGGREGATIONS, "constant", plug)
    assert gradient(tokenizer, CUTS[0], training__aggregation="constant")[0].abs().max() == 0.0
