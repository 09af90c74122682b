"""A critic with layers of its own: what it learns, what the policy feels of it, what a checkpoint holds."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.trainer_backend.learner.hand_made import are_equal, copy_tensors, make_learner, segment
from tests.trainer_backend.learner.test_optimizer import Shortage
from tests.trainer_backend.learner.test_value_head import (
    OWN,
    make_critic,
    make_episodes,
    scored,
    states,
)
from trainer_backend.core.critic import CriticTargets
from trainer_backend.errors import NonFiniteLoss, OutOfMemory, SegmentError
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.learner.shapes import model_shape
from trainer_backend.parts import Progress


def make_own_critic(tokenizer, advantage="gae", **overrides) -> LocalLearner:
    return make_critic(tokenizer, advantage, **{**OWN, **overrides})


def test_a_step_does_not_depend_on_how_it_is_cut_into_pieces(tokenizer):
    learner = make_own_critic(tokenizer, training__critic_passes=1, training__row_tokens=16)
    given = make_episodes(learner, [1.0, -1.0] * 6)
    learner.update(given, iteration=1)  # so that the head's weights are not 0
    critic, found = learner._critic, []
    weights = list(critic._scorer.model.parameters())
    before = [weight.clone() for weight in weights]
    learner.update(given, iteration=2)
    assert not any(map(torch.equal, weights, before)), "all its layers learn"
    episodes = make_episodes(learner, [2.0, -1.0, 0.5] * 4)
    for tokens in (4096, 64):
        critic._table = critic._table.model_copy(update={"micro_batch_tokens": tokens})
        loss = critic.gradient([part for item in episodes for part in item.segments], {
            item.rollout_id: item.critic for item in episodes
        })  # fmt: skip
        found.append((loss, torch.cat([weight.grad.flatten() for weight in weights])))
    (whole, gradient), (cut, gradient_of_cut) = found
    assert cut == pytest.approx(whole, rel=1e-6)
    assert gradient.norm() > 0.01
    torch.testing.assert_close(gradient_of_cut, gradient, rtol=1e-4, atol=1e-6)


def test_while_it_warms_up_the_policy_stays_and_nothing_new_is_served(tokenizer):
    learner = make_own_critic(tokenizer, training__critic_warmup=1)
    before = copy_tensors(learner)
    metrics = learner.update(make_episodes(learner, [1.0, -2.0], advantage=1.0), iteration=1)
    assert metrics["optim/steps"] == 0.0 and metrics["value/loss"] > 0.0
    assert are_equal(learner.model.state_dict(), before)
    assert (
        learner.update(make_episodes(learner, [1.0, -2.0], advantage=1.0), iteration=2)["optim/steps"] > 0.0
    )
    assert not are_equal(learner.model.state_dict(), before)


def test_a_critic_that_begins_in_the_middle_of_a_run_warms_up_then(tokenizer, tmp_path: Path):
    learner = make_own_critic(tokenizer, training__critic_warmup=2)
    found = []
    for iteration in (50, 51, 52):
        episodes = make_episodes(learner, [1.0, -2.0], advantage=1.0)
        found.append(learner.update(episodes, iteration=iteration)["optim/steps"] > 0)
        learner.save(tmp_path / f"iteration_{iteration}", Progress(iteration, 1, 2))
        learner, _ = LocalLearner.resumed(learner.config, tmp_path / f"iteration_{iteration}")
    assert found == [False, False, True]


def test_a_loss_that_is_not_finite_leaves_the_critic_as_it_was(tokenizer):
    learner = make_own_critic(tokenizer)
    episodes = make_episodes(learner, [1.0, 1.0])
    broken = [replace(episode, critic=CriticTargets([0.0], [3e38])) for episode in episodes]
    with pytest.raises(NonFiniteLoss, match=r"critic.*Lower training\.critic_learning_rate"):
        learner.update(broken, iteration=1)
    assert scored(learner, states(1)) == {"r0": [0.0]}


@pytest.mark.parametrize(("policy_learns", "steps"), [(False, 1), (True, 2)], ids=["critic alone", "both"])
def test_an_error_of_its_second_step_counts_its_first_one_and_the_policy_s(tokenizer, policy_learns, steps):
    learner = make_own_critic(
        tokenizer,
        training__critic_batch_decisions=1,
        training__critic_passes=1,
        training__critic_warmup=0 if policy_learns else 1,
        training__update_passes=1,
    )
    episodes = make_episodes(learner, [1.0, 1.0], advantage=1.0)
    Shortage(learner._critic._scorer, 2)
    with pytest.raises(OutOfMemory, match="the critic ran out of memory") as caught:
        learner.update(episodes, iteration=1)
    assert caught.value.steps_taken == steps


def test_checkpointed_layers_are_computed_again_and_give_the_same_gradient(tokenizer):
    found = []
    for checkpointing in (False, 1):
        learner = make_own_critic(tokenizer, training__gradient_checkpointing=checkpointing)
        learner.update(
            make_episodes(learner, [1.0, -1.0]), iteration=1
        )  # so that the head's weights are not 0
        episodes, critic, calls = make_episodes(learner, [2.0, 0.5]), learner._critic, []
        for number, layer in enumerate(critic._scorer.model.model.layers):
            layer.mlp.register_forward_pre_hook(lambda *_, of=calls, number=number: of.append(number))
        critic.gradient([item.segments[0] for item in episodes], {
            item.rollout_id: item.critic for item in episodes
        })  # fmt: skip
        first = critic._scorer.model.model.layers[0].mlp
        found.append((sorted(calls), first.up_proj.weight.grad))
    (once, gradient), (twice, again) = found
    assert (once, twice) == ([0, 1], [0, 0, 1])
    torch.testing.assert_close(again, gradient, rtol=1e-4, atol=1e-6)


def test_a_token_beyond_its_vocabulary_is_refused_with_its_place(tokenizer):
    foreign = segment("r0", [5, 6, 7], [20, 10**6], [-1.0, -1.0])
    with pytest.raises(SegmentError, match="rollout r0, turn 1, token 4: token id 1000000, but the actor"):
        scored(make_own_critic(tokenizer), [foreign])


def test_the_plan_of_memory_counts_its_layers(tokenizer):
    config = make_learner(tokenizer).model.config
    plain, own = (model_shape(config, None, critic=critic) for critic in (None, "own"))
    assert own.critic == plain.parameters + 97 and plain.critic == 0
