"""An update on a real tiny model from samples of the actor and of a fixed policy."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.trainer_backend.learner.hand_made import (
    SIZE,
    are_equal,
    copy_tensors,
    find_gradient,
    make_learner,
    segment,
)
from trainer_backend.core.critic import make_targets
from trainer_backend.core.policies import ACTOR
from trainer_backend.core.segments import Segment
from trainer_backend.errors import NonFiniteLoss, SegmentError
from trainer_backend.models.folder import embedding_rows
from trainer_backend.parts import CreditedEpisode

KINDS = ["decoupled", "single_ratio", "reinforce"]
# The ratio of single_ratio is its only weight, so it has no level of one.
CASES = [
    *[(kind, level) for kind in ("decoupled", "reinforce") for level in ("token", "decision", "episode")],
    ("single_ratio", None),
]
ADVANTAGES = [1.0, -1.0, 0.5, -0.25, 2.0, -2.0]


def mixed_learner(tokenizer, *, fixed=None, **overrides):
    mixture = {
        "rollout_only__model_path": "fixed",
        "rollout_allocation_schedule__alpha": 0.5,
        **{f"rollout_only__{key}": value for key, value in (fixed or {}).items() if value is not None},
    }
    training = {"training__batch_decisions": 64, "training__update_passes": 1, "training__row_tokens": 16}
    return make_learner(tokenizer, **{**mixture, **training, **overrides})


def make_parts(learner, name: str, i: int, shift: float) -> list[Segment]:
    """Two decisions with fresh prompts; their sampler found each token likelier by `shift` nats."""
    drafts = [([5, 6, 7 + i], [20 + i, 30 + i]), ([8, 9 + i], [40 + i, 50, 60 + i])]
    parts = []
    for t, (prompt, answer) in enumerate(drafts):
        (own,) = learner.scorer.score([segment(name, prompt, answer, [0.0] * len(answer))], SIZE)
        parts.append(segment(name, prompt, answer, [value + shift for value in own], t))
    return parts


def make_episodes(learner, policies, shift=0.0, values=None) -> list[CreditedEpisode]:
    made = []
    for i, policy in enumerate(policies):
        off = 0.0 if policy == ACTOR else shift
        advantages = [ADVANTAGES[i], ADVANTAGES[i] / 2]
        critic = None if values is None else make_targets(values, advantages)
        parts = make_parts(learner, f"r{i}", i, off)
        made.append(CreditedEpisode(f"r{i}", parts, advantages, critic, policy))
    return made


MIXED = [ACTOR, "fixed", ACTOR, "fixed", "fixed", ACTOR]
OWN, FIXED = [ACTOR] * 6, ["fixed"] * 6


@pytest.mark.parametrize("kind", KINDS)
def test_unlikely_samples_weigh_as_each_objective_says(tokenizer, kind):
    # every token of the fixed policy was e^0.25 as likely to it as to the learner: weights e^-0.25, a token
    fixed = {"objective": kind}
    learner = mixed_learner(tokenizer, fixed=fixed, training__entropy_coef=0.0)
    found, _ = find_gradient(learner, make_episodes(learner, FIXED, shift=0.25))
    own, _ = find_gradient(learner, make_episodes(learner, OWN))
    # the ratio to mu alone is e^-0.25 = 0.78, below 1 - clip_low: bad tokens are held, good ones are not
    share = (found.norm() / own.norm()).item()
    if kind == "single_ratio":
        assert share < 0.75
    else:
        assert share == pytest.approx(math.exp(-0.25), abs=1e-5)


def test_the_weight_of_an_episode_is_that_of_all_its_segments_in_whichever_step_they_lie(tokenizer):
    learner = mixed_learner(tokenizer, fixed={"behaviour_weight_level": "episode"})
    episodes = make_episodes(learner, ["fixed", ACTOR], shift=0.1)
    scored = learner.policy_update().weighed(episodes).scored
    of_fixed = [weight for item in scored if item.policy == "fixed" for weight in item.behaviour]
    assert of_fixed == pytest.approx([math.exp(-0.5)] * 5, abs=1e-5)  # five tokens of 0.1 nats
    assert [weight for item in scored[2:] for weight in item.behaviour] == pytest.approx([1.0] * 5, abs=1e-5)


@pytest.mark.parametrize(("kind", "level"), CASES)
def test_a_mixed_step_is_the_same_however_it_is_cut(tokenizer, kind, level):
    found = []
    for row_tokens, micro_batch_tokens in ((16, 64), (35, 4096)):
        learner = mixed_learner(
            tokenizer,
            fixed={"objective": kind, "behaviour_weight_level": level},
            training__behaviour_weight_cap=3.0,
            training__row_tokens=row_tokens,
            training__micro_batch_tokens=micro_batch_tokens,
            training__kl_coef=0.1,
        )
        episodes = make_episodes(learner, MIXED, shift=-0.15)
        with torch.no_grad():  # as after some steps
            known = {
                item.rollout_id: [
                    [logprob + 0.1 for logprob in learner.scorer.score([part], SIZE)[0]]
                    for part in item.segments
                ]
                for item in episodes
            }
        found.append(find_gradient(learner, episodes, known))
    (of_whole, whole), (of_cut, cut) = found
    assert of_whole.norm() > 1e-3
    assert ((of_whole - of_cut).norm() / of_whole.norm()).item() < 1e-5
    assert cut == pytest.approx(whole, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_actors_curves_hold_none_of_the_others_samples(tokenizer, kind):
    alone = mixed_learner(tokenizer)
    apart = alone.update(make_episodes(alone, [ACTOR, ACTOR]), iteration=1)
    learner = mixed_learner(tokenizer, fixed={"objective": kind})
    metrics = learner.update(make_episodes(learner, [ACTOR, ACTOR, "fixed", "fixed"], shift=1.0), iteration=1)
    for name, value in apart.items():
        if name.startswith(("loss/", "mismatch/")) and name != "loss/kl_to_proximal":
            assert metrics[name] == pytest.approx(value, abs=1e-5), name
    assert metrics["mixture/fixed/ratio_mean"] == pytest.approx(
        1.0 if kind == "decoupled" else math.exp(-1), abs=1e-5
    )
    assert metrics["mixture/actor/entropy"] == metrics["loss/entropy"]
    assert ("mixture/fixed/clip_low_share" in metrics) == (kind != "reinforce")


def test_an_iteration_without_the_actors_samples_has_no_curve_of_its_and_learns(tokenizer):
    learner = mixed_learner(tokenizer)
    before = copy_tensors(learner)
    metrics = learner.update(make_episodes(learner, FIXED, shift=0.2), iteration=1)
    told = {name for name in metrics if name.startswith(("loss/", "mismatch/", "mixture/actor/"))}
    assert told == {"loss/kl_to_proximal"}
    assert not are_equal(learner.model.state_dict(), before)


def test_weights_are_told_before_truncation_of_the_fixed_and_after_it_of_each(tokenizer):
    # by the decision: e^(2 * 0.5) and e^(3 * 0.5) for two of two episodes, held at 3
    fixed = {"behaviour_weight_level": "decision", "behaviour_weight_cap": 3.0}
    learner = mixed_learner(tokenizer, fixed=fixed)
    metrics = learner.update(make_episodes(learner, ["fixed", ACTOR, "fixed"], shift=-0.5), iteration=1)
    short, long = math.exp(1.0), math.exp(1.5)
    expected = {
        "actor/importance_sampling": 1.0,
        "actor/importance_weight_mean": (short + long) / 2,
        "actor/importance_weight_std": (long - short) / 2,
        "actor/importance_weight_min": short,
        "actor/importance_weight_max": long,
        "mixture/ess": (2 * short + 6) ** 2 / (4 * (2 * short**2 + 18)),
        "mixture/fixed/ess": (2 * short + 6) ** 2 / (4 * (2 * short**2 + 18)),
        "mixture/fixed/weight_mean": (short + 3) / 2,
        "mixture/fixed/truncated_share": 0.5,
        # they weigh more than 1 on average, and still count as no more than their effective sample size
        "mixture/counted_share": (2 * short + 6) ** 2 / (4 * (2 * short**2 + 18)),
        "mixture/actor/ess": 1.0,
        "mixture/actor/counted_share": 1.0,
        "mixture/actor/weight_mean": 1.0,
        "mixture/actor/truncated_share": 0.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-4)
    own = learner.update(make_episodes(learner, [ACTOR, ACTOR]), iteration=2)
    assert own["actor/importance_sampling"] == 0.0
    assert "actor/importance_weight_mean" not in own
    assert "mixture/ess" not in own
    assert "mixture/fixed/lost_mass" not in metrics, "it says every token"


def test_far_away_samples_are_equal_among_each_other_and_count_for_nothing(tokenizer):
    # weights of a decision: e^-20 and e^-30 in each episode, so the first decisions have it all
    learner = mixed_learner(tokenizer, fixed={"behaviour_weight_level": "decision"})
    metrics = learner.update(make_episodes(learner, ["fixed", ACTOR, "fixed"], shift=10.0), iteration=1)
    assert metrics["mixture/fixed/ess"] == pytest.approx(0.5, abs=1e-3)
    assert metrics["mixture/fixed/counted_share"] == pytest.approx(math.exp(-20) / 2, rel=1e-3)
    assert metrics["mixture/counted_share"] == metrics["mixture/fixed/counted_share"]
    assert metrics["mixture/fixed/truncated_share"] == 0.0


def test_what_a_truncated_sampler_never_says_is_told_whatever_the_level(tokenizer):
    # it drew from a part of the vocabulary that has e^-0.25 = 0.78 of the actor's probability
    fixed = {"top_k": 5, "behaviour_weight_level": "episode"}
    learner = mixed_learner(tokenizer, fixed=fixed, rollout__allow_truncated_sampling=True)
    metrics = learner.update(make_episodes(learner, [ACTOR, "fixed"], shift=0.25), iteration=1)
    assert metrics["mixture/fixed/lost_mass"] == pytest.approx(1 - math.exp(-0.25), abs=1e-5)
    assert "mixture/actor/lost_mass" not in metrics


def test_states_that_the_actor_hardly_reaches_hardly_raise_its_entropy(tokenizer):
    # no advantage: what is left of the gradient is the entropy bonus, and each token weighs e^-3
    learner = mixed_learner(tokenizer, training__entropy_coef=0.1)

    def bonus(policies, shift=0.0):
        episodes = make_episodes(learner, policies, shift)
        return find_gradient(learner, [replace(item, advantages=[0.0, 0.0]) for item in episodes])[0]

    own, found = bonus(OWN), bonus(FIXED, shift=3.0)
    assert own.norm() > 1e-6
    assert ((found - math.exp(-3) * own).norm() / own.norm()).item() < 1e-5


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_an_id_that_the_actor_does_not_know_is_named_by_its_turn(tokenizer, kl_coef):
    learner = mixed_learner(tokenizer, training__kl_coef=kl_coef)
    rows = embedding_rows(learner.model)
    (episode,) = make_episodes(learner, ["fixed"])
    first, second = episode.segments
    for position, value in ((0, rows), (len(second) - 1, rows + 7), (1, -1)):
        ids = second.token_ids.copy()
        ids[position] = value
        given = replace(episode, segments=[first, replace(second, token_ids=ids)])
        told = rf"r0, turn 2, token {position}: token id {value}, but the actor knows the ids 0 to {rows - 1}"
        with pytest.raises(SegmentError, match=told):
            learner.update([given], iteration=1)
        with pytest.raises(SegmentError, match=told):
            learner.score({"r0": given.segments})


def test_a_job_without_fixed_policies_tells_of_none(tokenizer):
    learner = make_learner(tokenizer)
    metrics = learner.update(make_episodes(learner, [ACTOR, ACTOR]), iteration=1)
    assert not [name for name in metrics if name.startswith(("mixture/", "actor/"))]


@pytest.mark.parametrize(("trains", "touched"), [(False, False), (True, True)])
def test_a_critic_learns_from_a_fixed_policys_samples_only_where_the_job_says_so(tokenizer, trains, touched):
    learner = mixed_learner(tokenizer, fixed={"train_value_head": trains}, algorithm__advantage="gae")
    values = [0.5, -0.5]
    metrics = learner.update(make_episodes(learner, [ACTOR, "fixed"], values=values), iteration=1)
    assert "value/loss" in metrics  # so its optimizer has moments, which would move it by themselves
    weight = learner._head._weight_D.detach().clone()
    metrics = learner.update(make_episodes(learner, FIXED, values=values), iteration=2)
    assert ("value/loss" in metrics) == touched
    assert (not torch.equal(learner._head._weight_D, weight)) == touched


def test_what_a_critic_misses_is_a_mean_over_what_it_learns_from(tokenizer):
    # fresh, it says 0; targets are 1.5 and 0 for the actor's, and 0.75 and 0 for the other's
    learner = mixed_learner(tokenizer, algorithm__advantage="gae")
    episodes = make_episodes(learner, [ACTOR, "fixed"], values=[0.5, -0.5])
    assert learner.update(episodes, iteration=1)["value/loss"] == pytest.approx(0.5 * 1.5**2 / 2)
    both = mixed_learner(tokenizer, fixed={"train_value_head": True}, algorithm__advantage="gae")
    # by weights of e^-0.5 a token: each decision's value is read at its first
    episodes = make_episodes(both, [ACTOR, "fixed"], values=[0.5, -0.5], shift=0.5)
    factor = math.exp(-0.5)
    missed = 0.5 * (1.5**2 + 0.0 + factor * (0.5**2 + 1.0))
    assert both.update(episodes, iteration=1)["value/loss"] == pytest.approx(
        missed / (2 + 2 * factor), abs=1e-5
    )


def test_a_behaviour_log_prob_that_is_not_finite_stops_the_update_by_its_token(tokenizer):
    learner = mixed_learner(tokenizer)
    episodes = make_episodes(learner, ["fixed"])
    whole = episodes[0].segments[1]
    broken = replace(whole, logprobs=np.array([*whole.logprobs[:-1], -math.inf]))
    given = CreditedEpisode("r0", [episodes[0].segments[0], broken], [1.0, 1.0], None, "fixed")
    with pytest.raises(NonFiniteLoss, match="rollout r0, turn 2, token 4: the sampler's log-prob is -inf"):
        learner.update([given], iteration=1)


def test_the_distance_that_stops_an_update_is_measured_on_a_fixed_policys_samples_too(tokenizer):
    training = {"training__update_passes": 4, "training__learning_rate": 1e-2}
    free = mixed_learner(tokenizer, **training)
    held = mixed_learner(tokenizer, **training, training__target_kl=1e-9)
    went_on, stopped = (one.update(make_episodes(one, FIXED), iteration=1) for one in (free, held))
    assert (went_on["optim/steps"], stopped["optim/steps"]) == (4, 1)
    assert stopped["loss/kl_to_proximal"] > 1e-9
