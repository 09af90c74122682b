"""Why an episode ends: DESIGN.md 4.5, worked by hand."""

from itertools import pairwise

import pytest

from shared_schemas.rollouts import RolloutLimits
from shared_schemas.trajectory import StopReason
from task_app.episode.termination import EpisodeFacts, ends_by_a_limit, stop_reason

LIMITS = RolloutLimits(max_decisions=3, max_invalid_decisions=2, timeout_s=10.0)

# Each fact alone, in the order in which the reasons are tested.
ALONE = {
    StopReason.CRITICAL_ERROR: {"critical_error": True},
    StopReason.ENVIRONMENT_DONE: {"environment_done": True},
    StopReason.INTERACTION_DONE: {"interaction_done": True},
    StopReason.TERMINATE_ACTION: {"terminate_action": True},
    StopReason.TERMINATION_REGEX: {"signal": True},
    StopReason.INVALID_ACTION: {"invalid_decisions": 2},
    StopReason.CONTEXT_LENGTH: {"context_exceeded": True},
    StopReason.DEADLINE: {"elapsed_s": 10.0},
    StopReason.EPISODE_TOKENS: {"sampled_tokens": 50},
    StopReason.MAX_USER_TURNS: {"user_is_silent": True},
    StopReason.MAX_DECISIONS: {"decisions_done": 3},
}


def reason_for(**facts: object) -> StopReason | None:
    return stop_reason(EpisodeFacts(**{"decisions_done": 1, **facts}), LIMITS, max_episode_tokens=50)


def test_an_episode_goes_on_while_no_reason_holds():
    assert reason_for(decisions_done=2, invalid_decisions=1, elapsed_s=9.9, sampled_tokens=49) is None


@pytest.mark.parametrize("reason", ALONE)
def test_each_reason_ends_an_episode_alone(reason):
    assert reason_for(**ALONE[reason]) is reason


def test_of_two_reasons_the_earlier_one_in_the_published_order_is_given():
    order = [
        "critical_error",
        "environment_done",
        "interaction_done",
        "terminate_action",
        "termination_regex",
        "invalid_action",
        "context_length",
        "deadline",
        "episode_tokens",
        "max_user_turns",
        "max_decisions",
    ]
    assert [reason.value for reason in StopReason] == order
    assert list(ALONE) == list(StopReason)
    for first, second in pairwise(ALONE):
        assert reason_for(**ALONE[first], **ALONE[second]) is first


def test_only_limits_cut_an_episode_off():
    cut = {reason for reason in StopReason if ends_by_a_limit(reason)}
    assert cut == {
        StopReason.INVALID_ACTION,
        StopReason.CONTEXT_LENGTH,
        StopReason.DEADLINE,
        StopReason.EPISODE_TOKENS,
        StopReason.MAX_USER_TURNS,
        StopReason.MAX_DECISIONS,
    }
