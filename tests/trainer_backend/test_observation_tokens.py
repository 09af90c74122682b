"""Observations are not the policy's doing: their tokens change nothing that an update is made of."""

import math
from itertools import cycle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_schemas.trajectory import ObservationData, PolicyLogprobs, Sampling, StepData
from trainer_backend.core.advantages.episodes import EpisodeRewards
from trainer_backend.core.aggregation import number_units
from trainer_backend.core.collate import collate
from trainer_backend.core.critic import make_targets, values_of_episode
from trainer_backend.core.losses import level_ratios, log_ratio, unit_means
from trainer_backend.core.segments import build_segments
from trainer_backend.job.training_table import AlgorithmTable, TrainingTable
from trainer_backend.plugins import AGGREGATIONS, ESTIMATORS, LOSSES

CONFIG = AlgorithmTable(gamma=0.5, gae_lambda=0.5, gae_token_lambda=0.5)
# Of each episode, the answers of its decisions; ids tell which token it is, wherever it comes to lie.
ANSWERS = {"r-0": [(50, 51, 52), (53,)], "r-1": [(60,), (61, 62), (63, 64)]}
REWARDS = {"r-0": [1.0, 0.0], "r-1": [0.0, 0.5, 2.0]}
SPANS = st.lists(st.lists(st.integers(1, 40), max_size=12), min_size=5, max_size=5)
BARE = [[]] * 5


def conversation(name, spans):
    """Segments of an episode: each prompt goes on from all before, and brings one id and its span."""
    steps, length = [], 0
    for t, (answer, span) in enumerate(zip(ANSWERS[name], spans, strict=False)):
        prompt = (7, *span)
        call = PolicyLogprobs(
            prompt_ids_reused=length, prompt_token_ids=prompt, token_ids=answer,
            logprobs=tuple(-token / 40 for token in answer), finish_reason="stop", versions=((0, 0),),
        )  # fmt: skip
        length += len(prompt) + len(answer)
        steps.append(
            StepData(
                turn=t + 1, observation_data=ObservationData(), action_taken={"type": "text"},
                sampling=Sampling(), policy_logprobs=call,
            )
        )  # fmt: skip
    (segment,) = build_segments(steps, rollout_id=name)
    return segment


def take_step(estimator, aggregation, spans, level="token"):
    """By sampled token: advantage, weight, unit, target of a critic; in the order of the tokens' ids."""
    parts = [conversation("r-0", spans), conversation("r-1", spans[2:])]
    plug = ESTIMATORS[estimator]
    values = {}
    for part in parts:
        said = [[part.token_ids[i] / 10 for i in part.sampled_positions]]
        values[part.rollout_id] = values_of_episode([part], said, level=plug.needs_values or "token")
    episodes = [
        EpisodeRewards(
            name, "g", REWARDS[name], state_keys_T=["s"] * len(REWARDS[name]),
            texts_T=["s"] * len(REWARDS[name]),
            values_T=getattr(found, "firsts_T", found),
            token_values=found if plug.needs_values != "decision" else None,
            branch_returns_T=[[0.5]] * len(REWARDS[name]),
        )
        for name, found in values.items()
    ]  # fmt: skip
    found = plug.compute(episodes, CONFIG.read(plug.keys, estimator))
    trained = dict(zip(ANSWERS, found.per_token or found.per_episode, strict=True))
    batch = collate(
        parts,
        advantages=trained,
        weights=AGGREGATIONS[aggregation].weights(parts, None),
        proximal=[[value + 0.1 for value in part.logprobs] for part in parts],
        behaviour=[[1.0] * len(part.logprobs) for part in parts],
        units=number_units(parts, [level] * len(parts)),
        policies=[0] * len(parts),
        row_tokens=max(map(len, parts)),
        critic={name: make_targets(values[name], trained[name]) for name in trained}
        if plug.needs_values
        else None,
    )
    order = batch.packed.target_N.argsort()
    return batch, order


def columns(batch, order):
    found = {
        "token": batch.packed.target_N, "advantage": batch.advantage_N, "weight": batch.weight_N,
        "behaviour": batch.packed.behaviour_logprob_N, "first": batch.packed.first_N,
    }  # fmt: skip
    if batch.critic is not None:
        found |= {"target": batch.critic.return_N, "of value": batch.critic.weight_N}
    return {name: column[order].tolist() for name, column in found.items()}


# Advantages follow from the estimator alone, and weights from the aggregation alone.
@pytest.mark.parametrize(("estimator", "aggregation"), [*zip(ESTIMATORS, cycle(AGGREGATIONS))])
@settings(max_examples=10, deadline=None)
@given(spans=SPANS)
def test_no_span_of_observation_tokens_changes_an_advantage_a_mask_a_weight_or_a_denominator(
    estimator, aggregation, spans
):
    batch, order = take_step(estimator, aggregation, spans)
    assert columns(batch, order) == columns(*take_step(estimator, aggregation, BARE))
    assert batch.packed.target_N[order].tolist() == sorted(
        token for answers in ANSWERS.values() for answer in answers for token in answer
    )
    tokens = sum(map(len, (answer for answers in ANSWERS.values() for answer in answers)))
    total = tokens if aggregation == "constant" else 1.0  # what the update divides by is the job's
    assert math.fsum(batch.weight_N.tolist()) == pytest.approx(total)


@pytest.mark.parametrize("level", ["token", "decision", "episode"])
@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=10, deadline=None)
@given(spans=SPANS)
def test_for_given_log_probs_the_loss_is_equal(loss, level, spans):
    def value(spans):
        batch, order = take_step("stepwise", "token_mean", spans, level)
        logprobs = -batch.packed.target_N / 37.0  # of the token, wherever it lies
        weights, proximal = batch.weight_N, batch.proximal_logprob_N
        if level != "token":
            means = unit_means(batch.unit_N, log_ratio(logprobs, proximal, weights), weights)
            logprobs = level_ratios(means, logprobs, proximal)
        rows = (column[order] for column in (logprobs, proximal, batch.advantage_N, weights))
        keys = TrainingTable(clip_low=0.05, clip_high=0.05).read(LOSSES[loss].keys, loss)
        return LOSSES[loss].compute(*rows, keys)

    torch.testing.assert_close(value(spans), value(BARE), rtol=1e-6, atol=1e-7)
