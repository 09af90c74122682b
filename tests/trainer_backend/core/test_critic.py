"""What a critic says, by decision or by token, laid over segments; and the loss it learns by."""

import math

import pytest
import torch

from tests.trainer_backend.segment_columns import make_batch, segment
from trainer_backend.core.collate import cut_batch
from trainer_backend.core.critic import (
    ByToken,
    CriticTargets,
    explained_variance,
    make_targets,
    read_column,
    values_of_episode,
)
from trainer_backend.core.value_loss import CriticColumns, value_loss
from trainer_backend.errors import AdvantageError, BatchError

# Rollout a: two decisions of two tokens and one in one segment, a third of two in another; b: one of one.
SEGMENTS = [segment("a", [-1, 0, 0, -1, 1]), segment("a", [-1, 2, 2]), segment("b", [-1, 0])]
BY_TOKEN = {"a": ByToken([[1.0, 2.0], [3.0], [4.0, 5.0]]), "b": ByToken([[6.0]])}
BY_DECISION = {"a": [1.0, 2.0, 3.0], "b": [6.0]}


def of_rows(advantages, critic=None):
    return make_batch(SEGMENTS, advantages=advantages, critic=critic, row_tokens=5)


def test_a_decisions_value_is_read_where_its_first_token_is_predicted():
    values = [[1.0, 2.0, 3.0], [4.0, 5.0]]
    assert values_of_episode(SEGMENTS[:2], values, level="decision") == [1.0, 3.0, 4.0]
    by_token = values_of_episode(SEGMENTS[:2], values, level="token")
    assert by_token == ByToken([[1.0, 2.0], [3.0], [4.0, 5.0]])
    assert (by_token.firsts_T, by_token.means_T) == ([1.0, 3.0, 4.0], [1.5, 3.0, 4.5])
    assert by_token.flat == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_missing_or_infinite_value_is_refused_by_name():
    with pytest.raises(AdvantageError, match="rollout a, turn 2, token 4: the critic's value is nan"):
        values_of_episode(SEGMENTS[:1], [[1.0, 2.0, math.nan]], level="decision")
    with pytest.raises(AdvantageError, match="rollout a, turn 2: no token was sampled"):
        values_of_episode([segment("a", [-1, 0, -1, 2])], [[1.0, 2.0]], level="token")


def test_advantages_of_tokens_reach_their_own_and_those_of_decisions_all_of_theirs():
    # row 1 holds the first segment, row 2 the two others
    assert of_rows(BY_TOKEN).advantage_N.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert of_rows(BY_DECISION).advantage_N.tolist() == [1.0, 1.0, 2.0, 3.0, 3.0, 6.0]


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        (ByToken([[1.0], [3.0], [4.0, 5.0]]), r"rollout a, turn 1: 1 numbers \(advantage\) for 2 sampled"),
        (ByToken([[1.0, 2.0], [3.0, 3.5], [4.0, 5.0]]), "turn 2: 2 numbers"),
        (ByToken([[1.0, 2.0]]), "turn 2: 0 numbers"),
        (ByToken([[1.0, math.inf], [3.0], [4.0, 5.0]]), "turn 1, token 2: its advantage is inf"),
        ([1.0], "turn 2, token 4: its advantage is missing"),
    ],
)
def test_numbers_that_do_not_fit_the_sampled_tokens_are_refused_by_name(numbers, told):
    with pytest.raises(BatchError, match=told):
        read_column(SEGMENTS[0], {"a": numbers}, "advantage")


def critic(values, returns):
    return {name: CriticTargets(values[name], returns[name]) for name in values}


def test_each_decision_counts_the_same_in_the_value_loss_or_each_token():
    by_decision = of_rows(BY_DECISION, critic(BY_DECISION, BY_DECISION)).critic
    quarter = 1 / 4
    assert by_decision.weight_N.tolist() == [quarter, 0.0, quarter, quarter, 0.0, quarter]
    by_token = of_rows(BY_TOKEN, critic(BY_TOKEN, BY_TOKEN)).critic
    assert by_token.weight_N.tolist() == pytest.approx([1 / 6] * 6)
    assert by_token.return_N.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_the_columns_of_the_cuts_are_those_of_the_whole():
    whole = of_rows(BY_TOKEN, critic(BY_TOKEN, BY_TOKEN))
    cuts = [cut.critic for cut in cut_batch(whole, 1)]
    assert len(cuts) == 2
    for name in ("value_N", "return_N", "weight_N"):
        joined = torch.cat([getattr(cut, name) for cut in cuts])
        assert torch.equal(joined, getattr(whole.critic, name))


@pytest.mark.parametrize(
    ("now", "clip", "loss", "gradient"),
    [
        (1.0, None, 0.5 * 4.0, -2.0),
        (1.0, 0.5, 0.5 * 6.25, 0.0),  # held at 0.5: the error is that of 0.5
        (0.25, 0.5, 0.5 * 2.75**2, -2.75),  # inside the range nothing is held
        (-1.0, 0.5, 0.5 * 16.0, -4.0),  # moved away: the larger error is its own
    ],
)
def test_half_the_squared_error_and_its_clip_by_hand(now, clip, loss, gradient):
    value = torch.tensor([now], requires_grad=True)
    found = value_loss(value, CriticColumns(*torch.tensor([[0.0], [3.0], [1.0]])), clip=clip)
    found.backward()
    assert (found.item(), value.grad.item()) == pytest.approx((loss, gradient))


def test_where_no_value_is_read_even_a_nan_touches_neither_loss_nor_gradient():
    value = torch.tensor([math.nan, 1.0], requires_grad=True)
    parts = CriticColumns(torch.tensor([0.0, 0.0]), torch.tensor([9.0, 3.0]), torch.tensor([0.0, 1.0]))
    loss = value_loss(value, parts, clip=0.5)
    loss.backward()
    assert math.isfinite(loss.item())
    assert value.grad.tolist() == [0.0, 0.0]


def test_targets_are_advantage_plus_value_at_one_level():
    assert make_targets([1.0, 2.0], [0.5, -4.0]).returns == [1.5, -2.0]
    rows = make_targets(ByToken([[1.0, 2.0]]), ByToken([[0.5, -4.0]]))
    assert rows.returns == ByToken([[1.5, -2.0]])
    with pytest.raises(ValueError, match="both be by decision, or both by token"):
        make_targets(ByToken([[1.0]]), [1.0])


def test_what_a_critic_explains_of_the_returns():
    returns = [1.0, 2.0, 3.0]
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance([5.0] * 3, returns) == 0.0
    assert explained_variance([3.0, 2.0, 1.0], returns) == -3.0  # misses by -2, 0, 2: four times the spread
    assert explained_variance([1.0], [2.0]) is None
    assert explained_variance([1.0, 2.0], [0.1 + 0.2, 0.3]) is None, "the returns differ by rounding alone"
    tiny = [1e-200 * value for value in returns]
    assert explained_variance(tiny, tiny) == 1.0, "no unit is too small"
